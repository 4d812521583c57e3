"""How many examples a property is tried with."""

from hypothesis import settings

__all__ = ["effort"]


def effort(examples: int) -> settings:
    """The settings of a property that every run of the tests tries with so many examples, and the long profile with all
    that it has (`--hypothesis-profile long`)."""
    return settings() if settings.get_current_profile_name() == "long" else settings(max_examples=examples)
