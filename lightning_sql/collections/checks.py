"""What every backend checks of its arguments before it touches anything."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from lightning_sql.collections.protocols import LABELS, AtomicLabel
from lightning_sql.errors import DuplicatedPrimaryKeyError, InvalidRequestError
from lightning_sql.fields import FieldKind, field_kinds

__all__ = [
    "check_items",
    "check_labels",
    "check_not_committing",
    "check_number",
    "check_primary_keys",
    "check_unique",
    "check_update_fields",
    "duplicate_message",
    "key_of",
    "missing_key_message",
    "project",
]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")

Key = tuple[Hashable, ...]


def check_primary_keys(item_type: type[BaseModel], primary_keys: Sequence[str]) -> tuple[str, ...]:
    """The primary key of a collection.

    Raises:
        InvalidRequestError: it is empty, or names something that is not a scalar field of the items.
    """
    if not primary_keys:
        raise InvalidRequestError("a collection needs a primary key")
    kinds = field_kinds(item_type)
    for name in primary_keys:
        if kinds.get(name, FieldKind.DOCUMENT) is FieldKind.DOCUMENT:
            raise InvalidRequestError(f"{item_type.__name__} has no scalar field {name!r} to be a primary key")
    return tuple(primary_keys)


def check_items(items: Iterable[Q], item_type: type[Q]) -> list[Q]:
    """The items as a list.

    Raises:
        TypeError: one of them is not of the type.
    """
    checked = list(items)
    for item in checked:
        if not isinstance(item, item_type):
            raise TypeError(f"expected {item_type.__name__}, got {type(item).__name__}")
    return checked


def check_update_fields(item_type: type[BaseModel], names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names of the fields to update, without repeats; None is the whole item.

    Raises:
        InvalidRequestError: a name that is no declared field.
    """
    if names is None:
        return None
    unknown = [name for name in names if name not in item_type.model_fields]
    if unknown:
        raise InvalidRequestError(f"{item_type.__name__} has no field {unknown[0]!r} to update")
    return tuple(dict.fromkeys(names))


def check_number(value: Any, what: str) -> int | float:
    """A value that arithmetic is done on.

    Raises:
        TypeError: it is no int (a bool is none) and no finite float.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise TypeError(f"{what} must be an int or a float, not {value!r:.100}")
    return value


def check_labels(labels: Iterable[AtomicLabel] | None) -> tuple[AtomicLabel, ...]:
    """The labels in the order in which their locks are taken; None is all of them.

    Raises:
        InvalidRequestError: an unknown label.
    """
    if labels is None:
        return LABELS
    wanted = set(labels)
    unknown = wanted.difference(LABELS)
    if unknown:
        raise InvalidRequestError(f"unknown label {min(map(str, unknown))!r}")
    return tuple(label for label in LABELS if label in wanted)


def check_not_committing(commit: bool) -> None:
    """Refuse `commit` where no retry is possible.

    Raises:
        InvalidRequestError: `commit` was asked of `atomic`.
    """
    if commit:
        raise InvalidRequestError("`commit` needs a callback that can run again: use `execute`")


def key_of(item: BaseModel, primary_keys: Sequence[str]) -> Key:
    """The primary key of an item."""
    return tuple(getattr(item, name) for name in primary_keys)


def check_unique(keys: Iterable[Key]) -> None:
    """Refuse a call that names a key twice.

    Raises:
        DuplicatedPrimaryKeyError: it does.
    """
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise DuplicatedPrimaryKeyError(f"the primary key {key!r:.200} stands twice in one call")
        seen.add(key)


def project(item: T, item_type: type[T]) -> T:
    """The item as exactly `item_type`: what a subclass adds is left out."""
    if type(item) is item_type:
        return item
    values = {name: getattr(item, name) for name in item_type.model_fields}
    return item_type.model_construct(**values, **(item.model_extra or {}))


def missing_key_message(item_type: type[BaseModel], key: Key) -> str:
    """What a `RecordNotFoundError` says."""
    return f"there is no {item_type.__name__} with the primary key {key!r:.200}"


def duplicate_message(item_type: type[BaseModel], key: Key) -> str:
    """What a `DuplicatedPrimaryKeyError` about stored data says."""
    return f"a {item_type.__name__} with the primary key {key!r:.200} exists already"
