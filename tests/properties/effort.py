"""How many examples a property is tried with."""

from hypothesis import settings

__all__ = ["effort"]


def effort(examples: int, *, at_most: int | None = None) -> settings:
    """The settings of a property.

    Args:
        examples: how many every run of the tests tries.
        at_most: how many are enough in the long profile (`--hypothesis-profile long`); all that it has, if None.
    """
    if settings.get_current_profile_name() != "long":
        return settings(max_examples=examples)
    return settings() if at_most is None else settings(max_examples=at_most)
