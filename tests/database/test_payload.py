"""JSON and text survive a column, whatever they hold."""

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sql.database.payload import (
    decode_json,
    decode_text,
    encode_json,
    encode_text,
    is_escaped,
    needle_forms,
)
from lightning_sql.errors import UnstorableValueError
from lightning_sql.jsonable import NESTING_LIMIT

ODD = st.characters(codec=None, categories=None) | st.sampled_from("\x00\x01\x0a\x10\x1a\ud800\udfff")
TEXT = st.text(ODD, max_size=12) | st.text(ODD, max_size=12).map("\x1a".__add__)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal in every bit and in the order of keys; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(TEXT)
def test_text_comes_back_and_is_storable(text: str) -> None:
    stored = encode_text(text)
    assert decode_text(stored) == text
    assert "\x00" not in stored
    stored.encode()


@given(TEXT, TEXT)
def test_different_texts_are_stored_differently(left: str, right: str) -> None:
    assert (encode_text(left) == encode_text(right)) == (left == right)


def stored_contains(text: str, needle: str) -> bool:
    """The test that a database makes, on what it holds."""
    stored = encode_text(text)
    plain, escaped = needle_forms(needle)
    return escaped in stored if is_escaped(stored) else plain is not None and plain in stored


@given(TEXT, TEXT)
def test_a_substring_test_on_stored_text_is_right(text: str, needle: str) -> None:
    assert stored_contains(text, needle) == (needle in text)


@given(TEXT, TEXT, TEXT)
def test_a_substring_that_is_there_is_found(before: str, needle: str, after: str) -> None:
    assert stored_contains(before + needle + after, needle)


@given(JSON)
def test_json_comes_back_exactly(value: Any) -> None:
    text = encode_json(value)
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")  # an escaped backslash begins no escape
    json.loads(text, parse_constant=pytest.fail)
    assert same(decode_json(text), value)


@pytest.mark.parametrize(
    "value",
    [10**40, -0.0, 1e300, 5e-324, "\x1aNaN", "\x1a", {"\x1aInfinity": math.inf}, {"b": 1, "a": {"\x00": "\ud800"}}],
)
def test_what_looks_like_an_escape_comes_back(value: Any) -> None:
    assert same(decode_json(encode_json(value)), value)


def nested(depth: int) -> Any:
    value: Any = "\x00"
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_nesting_up_to_the_limit_is_kept_and_beyond_it_refused() -> None:
    assert decode_json(encode_json(nested(NESTING_LIMIT))) == nested(NESTING_LIMIT)
    for depth in (NESTING_LIMIT + 1, 5_000, 200_000):
        with pytest.raises(UnstorableValueError):
            encode_json(nested(depth))


def test_many_brackets_side_by_side_are_not_deep() -> None:
    value = [[[]] for _ in range(3 * NESTING_LIMIT)] + ["[" * 3 * NESTING_LIMIT]
    assert same(decode_json(encode_json(value)), value)


def test_what_is_not_json_is_refused_or_made_json() -> None:
    assert decode_json(encode_json({"a": (1, 2), "b": b"x"})) == {"a": [1, 2], "b": "x"}
    with pytest.raises(UnstorableValueError):
        encode_json({"a": object()})
