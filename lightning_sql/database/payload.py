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
from collections.abc import Callable
from typing import Any, Final, cast

from pydantic_core import to_jsonable_python

from lightning_sql.errors import UnstorableValueError

__all__ = ["NESTING_LIMIT", "decode_json", "decode_text", "encode_json", "encode_text", "needle_forms"]

NESTING_LIMIT: Final = 500
"""Deepest nesting of lists and objects in a payload."""

_MARK: Final = "\x1a"
_JSON_MARK: Final = "\\u001a"
_NEEDS_ESCAPE: Final = re.compile("\x00|[\ud800-\udfff]")
_ESCAPED: Final = re.compile("[\x00-\x10\x1a\ud800-\udfff]")
_CODE: Final = re.compile("\x1a([\x01-\x10]{4})")
_NON_FINITE: Final = {"\x1aNaN": math.nan, "\x1aInfinity": math.inf, "\x1a-Infinity": -math.inf}


def _digits(match: re.Match[str]) -> str:
    point = ord(match.group())
    return _MARK + "".join(chr(1 + (point >> shift & 15)) for shift in (12, 8, 4, 0))


def _character(match: re.Match[str]) -> str:
    point = 0
    for digit in match.group(1):
        point = point << 4 | ord(digit) - 1
    return chr(point)


def encode_text(text: str) -> str:
    """The text as a text column holds it."""
    if text.startswith(_MARK) or _NEEDS_ESCAPE.search(text):
        return _MARK + _ESCAPED.sub(_digits, text)
    return text


def decode_text(text: str) -> str:
    """The text that `encode_text` was given."""
    return _CODE.sub(_character, text[1:]) if text.startswith(_MARK) else text


def needle_forms(needle: str) -> list[str]:
    """What to look for in stored texts when looking for a substring: as it is, and as escaped texts would hold it."""
    escaped = _ESCAPED.sub(_digits, needle)
    # What needs an escape cannot stand in a text without one, and most drivers could not even ask for it.
    return [escaped] if _NEEDS_ESCAPE.search(needle) else list(dict.fromkeys([needle, escaped]))


def _escape(value: Any, depth: int) -> Any:
    if depth > NESTING_LIMIT:
        raise UnstorableValueError(f"the payload is nested deeper than {NESTING_LIMIT} levels")
    if isinstance(value, str):
        return encode_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _MARK + ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {encode_text(k) if isinstance(k, str) else k: _escape(v, depth + 1) for k, v in items}
    if isinstance(value, list | tuple):
        return [_escape(item, depth + 1) for item in cast(list[Any], value)]
    if value is None or isinstance(value, int | float):
        return value
    return _escape(to_jsonable_python(value, inf_nan_mode="constants"), depth)


def _unescape(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, decode_text(value)) if value.startswith(_MARK) else value
    if isinstance(value, dict):
        return {decode_text(key): _unescape(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_unescape(item) for item in cast(list[Any], value)]
    return value


_dump: Final[Callable[[Any], str]] = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def _too_deep(text: str) -> bool:
    """Whether the nesting may pass the limit: brackets inside strings count too, so a yes needs a closer look."""
    return text.count("[") + text.count("{") > NESTING_LIMIT


def encode_json(value: Any) -> str:
    """The value as JSON text that any JSON column holds.

    Raises:
        UnstorableValueError: it is nested too deep, or is no JSON value and cannot be made one.
    """
    try:
        try:
            text = _dump(value)
            if _JSON_MARK in text or "\\u0000" in text or _NEEDS_ESCAPE.search(text) or _too_deep(text):
                text = _dump(_escape(value, 0))
        except (ValueError, TypeError):  # a non-finite float, or something that is no JSON yet
            text = _dump(_escape(value, 0))
    except RecursionError:
        raise UnstorableValueError(f"the payload is nested deeper than {NESTING_LIMIT} levels") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, UnstorableValueError):
            raise
        raise UnstorableValueError("the payload holds something that is not JSON") from error
    return text


def decode_json(text: str) -> Any:
    """The value that `encode_json` was given."""
    value = json.loads(text)
    return _unescape(value) if _JSON_MARK in text else value
