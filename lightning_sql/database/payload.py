"""JSON and text into a column and out again, exactly.

A database's JSON cannot hold NUL, lone surrogates or non-finite floats, and its text no NUL and no
lone surrogates. What cannot be held is escaped, reversibly and only when present: a string that needs
it becomes U+001A and then its characters, in which NUL, lone surrogates, U+0001 to U+0010 and U+001A
are U+001A and four "digits" U+0001 to U+0010 (a digit d is the character d+1, most significant first).
Digits never stand for themselves in an escaped string, so a substring test on the escaped forms is
right. A non-finite float becomes U+001A and its name, which no escaped string looks like.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
from pydantic_core import to_jsonable_python

from lightning_sql.errors import UnstorableValueError
from lightning_sql.jsonable import NESTING_LIMIT, TOO_DEEP, rebuilt
from lightning_sql.records import Event, Link, OtelResource, SpanContext, TraceStatus

__all__ = [
    "ESCAPE_MARK",
    "decode_json",
    "decode_text",
    "encode_json",
    "encode_part",
    "encode_text",
    "is_escaped",
    "needle_forms",
]

ESCAPE_MARK: Final = "\x1a"
"""What every escaped text begins with."""
_JSON_MARK: Final = "\\u001a"
_NEEDS_ESCAPE: Final = re.compile("\x00|[\ud800-\udfff]")
_ESCAPED: Final = re.compile("[\x00-\x10\x1a\ud800-\udfff]")
_CODE: Final = re.compile("\x1a([\x01-\x10]{4})")
_NON_FINITE: Final = {"\x1aNaN": math.nan, "\x1aInfinity": math.inf, "\x1a-Infinity": -math.inf}


def _digits(match: re.Match[str]) -> str:
    point = ord(match.group())
    return ESCAPE_MARK + "".join(chr(1 + (point >> shift & 15)) for shift in (12, 8, 4, 0))


def _character(match: re.Match[str]) -> str:
    point = 0
    for digit in match.group(1):
        point = point << 4 | ord(digit) - 1
    return chr(point)


def encode_text(text: str) -> str:
    """The text as a text column holds it."""
    if text.startswith(ESCAPE_MARK) or "\x00" in text or (not text.isascii() and _NEEDS_ESCAPE.search(text)):
        return ESCAPE_MARK + _ESCAPED.sub(_digits, text)
    return text


def decode_text(text: str) -> str:
    """The text that `encode_text` was given."""
    return _CODE.sub(_character, text[1:]) if text.startswith(ESCAPE_MARK) else text


def needle_forms(needle: str) -> tuple[str | None, str]:
    """What to look for when looking for a substring: in plain stored texts, and in escaped ones (`is_escaped`).

    None where it cannot be: a plain text holds nothing that needs an escape.
    """
    return None if _NEEDS_ESCAPE.search(needle) else needle, _ESCAPED.sub(_digits, needle)


def is_escaped(stored: str) -> bool:
    """Whether a stored text is escaped."""
    return stored.startswith(ESCAPE_MARK)


def _escape_leaf(value: Any) -> Any:
    if isinstance(value, str):
        return encode_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ESCAPE_MARK + ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, int | float):
        return value
    if type(value) in _PARTS:
        # pydantic's own way would lose lone surrogates. A payload in it stands one level below it.
        return _escape(_part(value), NESTING_LIMIT + 1)
    return _escape(to_jsonable_python(value, inf_nan_mode="constants"))


def _unescape_leaf(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(ESCAPE_MARK):
        return _NON_FINITE.get(value, decode_text(value))
    return value


def _escape(value: Any, limit: int = NESTING_LIMIT) -> Any:
    return rebuilt(value, _escape_leaf, encode_text, limit=limit)


def _unescape(value: Any) -> Any:
    # What is stored must come back, whatever it stood in when its depth was looked at.
    return rebuilt(value, _unescape_leaf, decode_text, limit=sys.maxsize)


def _part(value: Any) -> dict[str, Any]:
    """The members of a part of a span, in the order of their declaration."""
    if type(value) not in _PARTS:
        raise TypeError(f"a {type(value).__name__} has no JSON form of its own")
    members = cast(dict[str, Any], vars(value))
    return {**members, **value.model_extra} if value.model_extra else members


_PARTS: Final = frozenset({TraceStatus, Event, Link, SpanContext, OtelResource})
"""Records that are nothing but their fields, so that nobody need be asked how they are written."""

_dump: Final[Callable[[Any], str]] = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"), default=_part
).encode


_fast_encoder: Final = msgspec.json.Encoder(enc_hook=_part)
_fast_decoder: Final = msgspec.json.Decoder()
_plain_encoder: Final = msgspec.json.Encoder()


def _needs_another_look(text: str) -> bool:
    """Whether JSON text may hold what a column cannot: control characters are escapes there already."""
    if "\\u00" in text and (_JSON_MARK in text or "\\u0000" in text):
        return True
    return (not text.isascii() and _NEEDS_ESCAPE.search(text) is not None) or _too_deep(text)


def _too_deep(text: str) -> bool:
    """Whether the nesting may pass the limit: brackets inside strings count too, so a yes needs a closer look."""
    return text.count("[") + text.count("{") > NESTING_LIMIT


def _may_need_escape(encoded: bytes) -> bool:
    """Whether JSON may hold an escape that no column holds, or be nested too deep: a yes needs a closer look."""
    return b"\\u00" in encoded or encoded.count(b"[") + encoded.count(b"{") > NESTING_LIMIT


def _encode_plain(value: Any) -> str | None:
    """As `encode_json`, for a value that is JSON already and holds nothing that needs an escape: by far the most.

    The faster encoder knows more types than JSON has; what comes back as something else than it was is none
    of its business, nor is what it refuses.
    """
    try:
        encoded = _plain_encoder.encode(value)
        if _may_need_escape(encoded):
            return None
        return encoded.decode() if _fast_decoder.decode(encoded) == value else None
    except Exception:  # noqa: BLE001 - the other way will say what is wrong, if anything is
        return None


def encode_json(value: Any, *, inside: int = 0) -> str:
    """The value as JSON text that any JSON column holds.

    Args:
        value: a JSON value.
        inside: how many levels above the payloads in it belong to the column and not to them.

    Raises:
        UnstorableValueError: it is nested too deep, or is no JSON value and cannot be made one.
    """
    plain = _encode_plain(value)
    if plain is not None:
        return plain
    try:
        try:
            text = _dump(value)
            if _needs_another_look(text):
                text = _dump(_escape(value, NESTING_LIMIT + inside))
        except (ValueError, TypeError):  # a non-finite float, or something that is no JSON yet
            text = _dump(_escape(value, NESTING_LIMIT + inside))
    except RecursionError:
        raise UnstorableValueError(TOO_DEEP) from None
    except (ValueError, TypeError) as error:
        if isinstance(error, UnstorableValueError):
            raise
        raise UnstorableValueError("the payload holds something that is not JSON") from error
    return text


def encode_part(value: Any) -> str:
    """As `encode_json`, faster, for a part of a span that was validated: attributes, or one of its records."""
    try:
        encoded = _fast_encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate
        return encode_json(value)
    # A null may have been a float that is not finite, and an escape may be one that no column holds.
    if b"null" in encoded or _may_need_escape(encoded):
        return encode_json(value)
    text = encoded.decode()
    return text if text.isascii() or _NEEDS_ESCAPE.search(text) is None else encode_json(value)


def decode_json(text: str) -> Any:
    """The value that `encode_json` was given."""
    try:
        value = _fast_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):  # what only Python's own parser reads: very long integers
        value = json.loads(text)
    return _unescape(value) if _JSON_MARK in text else value
