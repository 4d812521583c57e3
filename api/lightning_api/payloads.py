"""JSON in and out of the service, exactly.

What a Python client can write is read: bare `NaN` and `Infinity`, lone surrogates, integers of any
size. What is answered is valid JSON all the same: a non-finite float is `null`, a lone surrogate is
written as an escape.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from lightning_sql.jsonable import NESTING_LIMIT

__all__ = ["MalformedJsonError", "UndecodableBodyError", "decode_json", "encode_json"]

_BODY_DEPTH: Final = NESTING_LIMIT + 4
"""How deeply arrays and objects may nest in a body: a payload stands at most four levels below its root."""

_fast_decoder: Final = msgspec.json.Decoder()


class UndecodableBodyError(Exception):
    """A request body is not UTF-8."""


class MalformedJsonError(Exception):
    """A request body is not JSON, or more than this service accepts of it."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        """Where in the text, in characters from its start."""


def decode_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        UndecodableBodyError: the text is not UTF-8.
        MalformedJsonError: it is not JSON, nests too deeply, or has an integer of more than 4300 digits.
    """
    try:
        value = _fast_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        # The standard library also reads what Python clients write and RFC 8259 does not have, and
        # says where a text is wrong.
        value = _decode_lenient(body)
    if body.count(b"[") + body.count(b"{") > _BODY_DEPTH and _deeper_than(value, _BODY_DEPTH):
        raise MalformedJsonError(f"the body nests more than {NESTING_LIMIT} levels deep")
    return value


def _decode_lenient(body: bytes) -> Any:
    try:
        text = body.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise UndecodableBodyError("the body is not UTF-8") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise MalformedJsonError(error.msg, error.pos) from None
    except RecursionError:
        raise MalformedJsonError(f"the body nests more than {NESTING_LIMIT} levels deep") from None
    except ValueError:
        raise MalformedJsonError("the body contains an integer of too many digits") from None


def _deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(item, list):
                below.extend(item)  # pyright: ignore[reportUnknownArgumentType]
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _record_fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    # A model's own dictionary holds its fields in the order of their declaration: nothing is copied.
    return {**vars(value), **value.model_extra} if value.model_extra else vars(value)


_encoder: Final = msgspec.json.Encoder(enc_hook=_record_fields)


def encode_json(value: Any, *, exact: bool = False) -> bytes:
    """The JSON text of records, mappings, sequences and scalars.

    With `exact`, a non-finite float is written as Python writes it (`NaN`, `Infinity`), not as null.
    """
    if exact:
        return json.dumps(value, default=_record_fields, separators=(",", ":")).encode("ascii")
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # Lone surrogates: only the standard library can write them, as escapes.
        text = json.dumps(value, default=_record_fields)
        finite = json.loads(text, parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":"), allow_nan=False).encode("ascii")
