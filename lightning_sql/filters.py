"""Filters, sorting and paging, normalised once for every backend (CONTRACT.md sections 5 and 11.1).

A caller's filter is a mapping `field -> operator -> value` with two special keys, `_aggregate` and
`_must`. `normalize_filter` turns it into flat conditions; `matches` is their meaning, and what every
SQL translation is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, cast

from pydantic import BaseModel

from lightning_sql.errors import InvalidRequestError
from lightning_sql.fields import FieldKind, field_kinds, sort_default

__all__ = [
    "Condition",
    "Filter",
    "FilterOptions",
    "Sort",
    "SortOptions",
    "field_value",
    "matches",
    "normalize_filter",
    "normalize_sort",
    "page_of",
    "sort_items",
]

T = TypeVar("T", bound=BaseModel)

Operator: TypeAlias = Literal["exact", "within", "contains"]
FilterOptions: TypeAlias = Mapping[str, Any]
"""`{field: {"exact" | "within" | "contains": value}, "_aggregate": "and" | "or", "_must": {...} | [{...}]}`"""

_OPERATORS: Final = ("exact", "within", "contains")


class SortOptions(TypedDict):
    """`name` is a field of the item type, `order` is ascending unless it says `desc`."""

    name: str
    order: NotRequired[Literal["asc", "desc"]]


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of one field; `value` is never None, and a tuple for `within`."""

    field: str
    operator: Operator
    value: Any


@dataclass(frozen=True, slots=True)
class Filter:
    """All of `must`, and all (or, with `any_of`, at least one) of `pool`."""

    pool: tuple[Condition, ...] = ()
    any_of: bool = False
    must: tuple[Condition, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether every item passes."""
        return not self.pool and not self.must


@dataclass(frozen=True, slots=True)
class Sort:
    """Order by one scalar field; ties keep insertion order in both directions."""

    field: str
    kind: FieldKind
    descending: bool = False


def _members(value: Any) -> tuple[Any, ...]:
    # Something that cannot be iterated over has no members, so nothing is within it.
    return tuple(cast(Iterable[Any], value)) if isinstance(value, Iterable) else ()


def _conditions(fields: Mapping[str, Any]) -> Iterable[Condition]:
    for field, operators in fields.items():
        if not isinstance(operators, Mapping):
            raise TypeError(f"the filter of {field!r} must map operators to values")
        for operator, value in cast(Mapping[str, Any], operators).items():
            if operator not in _OPERATORS:
                raise InvalidRequestError(f"unknown filter operator {operator!r} for {field!r}")
            if value is None:
                continue
            yield Condition(field, operator, _members(value) if operator == "within" else value)


def _must(definition: Any) -> tuple[Condition, ...]:
    if definition is None:
        return ()
    if isinstance(definition, Mapping):
        entries: Sequence[Any] = [definition]
    elif isinstance(definition, Sequence) and not isinstance(definition, str | bytes):
        entries = cast(Sequence[Any], definition)
    else:
        raise TypeError("`_must` must be a mapping or a sequence of mappings")
    found: list[Condition] = []
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise TypeError("each entry of `_must` must be a mapping")
        for condition in _conditions(cast(Mapping[str, Any], entry)):
            if (condition.field, condition.operator) in seen:
                raise InvalidRequestError(f"`_must` tests {condition.field!r} twice with {condition.operator!r}")
            seen.add((condition.field, condition.operator))
            found.append(condition)
    return tuple(found)


def normalize_filter(options: FilterOptions | None) -> Filter:
    """Check a caller's filter and flatten it.

    Without an effective condition it matches everything, with `or` too.

    Raises:
        InvalidRequestError: unknown operator or aggregate, or an operator twice for a field of `_must`.
        TypeError: the wrong shape.
    """
    if options is None:
        return Filter()
    aggregate = options.get("_aggregate", "and")
    if aggregate not in ("and", "or"):
        raise InvalidRequestError(f"`_aggregate` must be 'and' or 'or', not {aggregate!r}")
    fields = {name: value for name, value in options.items() if name not in ("_aggregate", "_must")}
    return Filter(tuple(_conditions(fields)), aggregate == "or", _must(options.get("_must")))


def normalize_sort(options: SortOptions | None, item_type: type[BaseModel]) -> Sort | None:
    """Check a caller's sort against the fields of the item type.

    Raises:
        InvalidRequestError: no field of that name, a field whose values have no order, or an unknown order.
    """
    if options is None:
        return None
    name, order = options.get("name"), options.get("order", "asc")
    if not name:
        raise InvalidRequestError("a sort needs the name of a field")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"the sort order must be 'asc' or 'desc', not {order!r}")
    kind = field_kinds(item_type).get(name)
    if kind is None:
        raise InvalidRequestError(f"{item_type.__name__} has no field {name!r} to sort by")
    if kind is FieldKind.DOCUMENT:
        raise InvalidRequestError(f"the values of {item_type.__name__}.{name} have no order to sort by")
    return Sort(name, kind, order == "desc")


def field_value(item: BaseModel, field: str) -> Any:
    """The value of a declared or extra field; None when there is no such field."""
    if field in type(item).model_fields:
        return getattr(item, field)
    return (item.model_extra or {}).get(field)


def _test(condition: Condition, actual: Any) -> bool:
    if actual is None:
        return False
    wanted = condition.value
    if condition.operator == "exact":
        return bool(actual == wanted)
    if condition.operator == "within":
        return actual in wanted
    if isinstance(actual, str):
        return isinstance(wanted, str) and wanted in actual
    return isinstance(actual, list) and wanted in actual


def matches(filter_: Filter, value_of: Callable[[str], Any]) -> bool:
    """Whether an item, seen through `value_of(field)`, passes the filter."""
    if not all(_test(condition, value_of(condition.field)) for condition in filter_.must):
        return False
    if not filter_.pool:
        return True
    combine = any if filter_.any_of else all
    return combine(_test(condition, value_of(condition.field)) for condition in filter_.pool)


def sort_items(items: Iterable[T], sort: Sort | None) -> list[T]:
    """The items in the order that `sort` asks for, stable in both directions."""
    if sort is None:
        return list(items)
    default = sort_default(sort.field, sort.kind)

    def key(item: T) -> Any:
        value = getattr(item, sort.field)
        return default if value is None else value

    return sorted(items, key=key, reverse=sort.descending)


def page_of(items: Sequence[T], limit: int, offset: int) -> Sequence[T]:
    """The slice that a page shows; a negative limit shows all from the offset on."""
    return items[offset:] if limit < 0 else items[offset : offset + limit]
