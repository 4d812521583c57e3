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

from lightning_sql.jsonable import NESTING_LIMIT, deeper_than
from lightning_sql.store.row_json import encode_json

__all__ = ["BODY_DEPTH", "MalformedJsonError", "UndecodableBodyError", "decode_json", "encode_json"]

BODY_DEPTH: Final = NESTING_LIMIT + 4
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


def decode_json(body: bytes, depth: int = BODY_DEPTH) -> Any:
    """The value of a JSON text.

    Args:
        body: the text.
        depth: how deeply arrays and objects may nest in it.

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
    if body.count(b"[") + body.count(b"{") > depth and deeper_than(value, depth):
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
