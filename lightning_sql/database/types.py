"""Column types that keep what Python gives them, and refuse what they could not give back."""

from __future__ import annotations

import math
from typing import Any, Final

from sqlalchemy import Boolean, Double
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine
from typing_extensions import override

from lightning_sql.database.dialects.types import BIG_INTEGER, BYTEWISE_TEXT, JSON_TEXT
from lightning_sql.database.payload import decode_json, decode_text, encode_json, encode_text
from lightning_sql.errors import UnstorableValueError
from lightning_sql.fields import FieldKind

__all__ = ["COLUMN_TYPES", "ExactText", "Integer64", "Payload", "Real"]


class ExactText(TypeDecorator[str]):
    """Any Python string, compared bytewise."""

    impl = BYTEWISE_TEXT
    cache_ok = True

    @override
    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else encode_text(value)

    @override
    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else decode_text(value)


class Payload(TypeDecorator[Any]):
    """Any JSON value, exactly; NULL is None.

    Args:
        inside: how many levels of a value are the column's own, above its payloads.
    """

    impl = JSON_TEXT
    cache_ok = True

    def __init__(self, inside: int = 0) -> None:
        super().__init__()
        self.inside = inside

    @override
    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else encode_json(value, inside=self.inside)

    @override
    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else decode_json(value)


class Integer64(TypeDecorator[int]):
    """An integer of 64 bits; a larger one is an `UnstorableValueError`."""

    impl = BIG_INTEGER
    cache_ok = True

    @override
    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and not -(2**63) <= value < 2**63:
            raise UnstorableValueError("an integer does not fit 64 bits")
        return value


class Real(TypeDecorator[float]):
    """A float of 64 bits, infinities included; NaN, which has no order, is an `UnstorableValueError`."""

    impl = Double
    cache_ok = True

    @override
    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        if value is not None and math.isnan(value):
            raise UnstorableValueError("NaN does not fit a numeric column")
        return None if value is None else float(value)


COLUMN_TYPES: Final[dict[FieldKind, type[TypeEngine[Any]]]] = {
    FieldKind.TEXT: ExactText,
    FieldKind.INTEGER: Integer64,
    FieldKind.REAL: Real,
    FieldKind.BOOLEAN: Boolean,
    FieldKind.DOCUMENT: Payload,
}
"""The column that stores a field of each kind."""
