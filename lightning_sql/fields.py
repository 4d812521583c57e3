"""What kind of value each field of a pydantic model holds.

The kind decides how a field sorts, what its nulls count as, and which column stores it.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

__all__ = ["FieldKind", "field_kinds", "is_nullable", "sort_default"]


class FieldKind(Enum):
    """How the values of a field compare."""

    TEXT = "text"
    INTEGER = "integer"
    REAL = "real"
    BOOLEAN = "boolean"
    DOCUMENT = "document"
    """Anything else: stored as JSON, never ordered."""


_SCALARS: dict[Any, FieldKind] = {
    str: FieldKind.TEXT,
    int: FieldKind.INTEGER,
    float: FieldKind.REAL,
    bool: FieldKind.BOOLEAN,
}


def _kind(annotation: Any) -> FieldKind:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin is Literal:
        kinds = {_SCALARS.get(type(value), FieldKind.DOCUMENT) for value in get_args(annotation) if value is not None}
        return kinds.pop() if len(kinds) == 1 else FieldKind.DOCUMENT
    if origin in (Union, UnionType):
        kinds = {_kind(member) for member in get_args(annotation) if member is not NoneType}
        return kinds.pop() if len(kinds) == 1 else FieldKind.DOCUMENT
    return _SCALARS.get(annotation, FieldKind.DOCUMENT)


@lru_cache(maxsize=256)
def field_kinds(model: type[BaseModel]) -> dict[str, FieldKind]:
    """The kind of each declared field of a model, in the order of declaration."""
    return {name: _kind(field.annotation) for name, field in model.model_fields.items()}


def sort_default(field: str, kind: FieldKind) -> str | int | float | bool:
    """What a null counts as when sorting: +infinity for a `*_time` field, otherwise the smallest usual value."""
    if field.endswith("_time"):
        return float("inf")
    return {FieldKind.TEXT: "", FieldKind.INTEGER: 0, FieldKind.REAL: 0.0, FieldKind.BOOLEAN: False}[kind]


@lru_cache(maxsize=1024)
def is_nullable(model: type[BaseModel], field: str) -> bool:
    """Whether a declared field may be null."""
    annotation: Any = model.model_fields[field].annotation
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)
