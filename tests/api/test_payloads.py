"""JSON in and out, for anything that a Python client can send."""

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_api.payloads import decode_json, encode_json

TEXT = st.text(st.characters(codec=None, categories=None)) | st.text("\ud800\udc00\x00\x1aab")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


def with_nulls(value: Any) -> Any:
    """The document with null for every float that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    return value


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


@given(DOCUMENTS)
def test_what_a_client_writes_is_read_exactly(document: Any) -> None:
    for ascii_only in (True, False):
        try:
            body = json.dumps(document, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:
            continue
        # Text comparison also tells -0.0 from 0.0, 1 from 1.0 and NaN from everything else.
        assert json.dumps(decode_json(body)) == json.dumps(document)


@given(DOCUMENTS)
def test_what_is_answered_is_valid_and_equal(document: Any) -> None:
    text = encode_json(document).decode()
    assert json.dumps(json.loads(text, parse_constant=refuse)) == json.dumps(with_nulls(document))
