"""What hypothesis draws: payloads, odd strings, the arguments of calls."""

import string
from typing import Any

from hypothesis import strategies as st

from lightning_sql.records import RolloutConfig
from lightning_sql.testing.samples import ODD_STRINGS

ODD_CHARACTERS = "\x00\x1a\x1b\x7f\ud800\udfff\ufeff\u2028\U0001f600\\\"'%_é" + string.ascii_letters[:4] + "01n"

short_texts = st.one_of(
    st.text(ODD_CHARACTERS, max_size=6),
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from([text for text in ODD_STRINGS.values() if len(text) < 100]),
)
"""Strings with whatever Python allows in them, the difficult more often than by chance."""

integers = st.one_of(st.integers(-3, 3), st.integers(-(2**70), 2**70), st.sampled_from([2**53 + 1, 2**63, 10**40]))
floats = st.one_of(st.floats(), st.sampled_from([-0.0, 1.0, 5e-324, 1e300, 0.1]))

payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, floats, short_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(short_texts, inner, max_size=4)),
    max_leaves=12,
)
"""Any JSON as Python has it."""

small_payloads = st.one_of(st.none(), st.integers(0, 3), st.dictionaries(st.sampled_from("ab"), st.booleans()))

limits = st.sampled_from([None, None, 0.5, 2.0, 10.0])
configs = st.builds(
    RolloutConfig,
    timeout_seconds=limits,
    unresponsive_seconds=limits,
    max_attempts=st.integers(1, 4),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), max_size=3),
).map(lambda config: config.model_dump())
"""The config of a rollout, as plain data."""

modes = st.sampled_from([None, "train", "val", "test"])
workers = st.sampled_from([None, None, "w1", "w2", "x"])


def requests() -> st.SearchStrategy[dict[str, Any]]:
    """What is said of a new rollout, as plain data."""
    return st.fixed_dictionaries(
        {"input": small_payloads},
        optional={
            "mode": modes,
            "resources_id": st.sampled_from([None, "mine"]),
            "config": configs,
            "metadata": st.dictionaries(st.sampled_from("xy"), st.integers(0, 2)),
        },
    )


def pages(*fields: str | None) -> st.SearchStrategy[dict[str, Any]]:
    """Sorting by one of these fields, and paging."""
    return st.fixed_dictionaries(
        {
            "sort_by": st.sampled_from(fields),
            "sort_order": st.sampled_from(["asc", "desc"]),
            "limit": st.sampled_from([-1, -1, 1, 2, 5]),
            "offset": st.integers(0, 3),
        }
    )
