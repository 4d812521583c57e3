"""Filters and sorts as SQL, meaning what `lightning_sql.filters.matches` and `sort_items` mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from sqlalchemy import ColumnElement, FromClause, Table, and_, false, func, literal, or_, true

from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.schema import SEQ
from lightning_sql.fields import FieldKind, field_kinds, is_nullable, sort_default
from lightning_sql.filters import Condition, Filter, Sort

__all__ = ["Translation", "order_by"]

_MISSING = object()


def _comparable(value: Any, kind: FieldKind) -> Any:
    """The value as a column of that kind would hold an equal one; `_MISSING` if none is equal in Python."""
    if kind is FieldKind.TEXT:
        return value if isinstance(value, str) else _MISSING
    if not isinstance(value, int | float) or (isinstance(value, float) and math.isnan(value)):
        return _MISSING
    if kind is FieldKind.REAL:
        try:
            real = float(value)
        except OverflowError:
            return _MISSING
        return real if real == value else _MISSING
    if value in (math.inf, -math.inf) or int(value) != value:
        return _MISSING
    whole = int(value)
    if kind is FieldKind.BOOLEAN:
        return bool(whole) if whole in (0, 1) else _MISSING
    return whole if -(2**63) <= whole < 2**63 else _MISSING


class Translation:
    """A filter over a table.

    `where` selects what may match. It is exact unless `inexact`, which is when a condition tests a
    field that has no comparable column: then the items must be tested one by one.
    """

    def __init__(self, filter_: Filter, table: Table, item_type: type[BaseModel], dialect: Dialect) -> None:
        self._table = table
        self._kinds = field_kinds(item_type)
        self._extra = item_type.model_config.get("extra") == "allow"
        self._dialect = dialect
        self.inexact = False
        must = [self._translate(condition) for condition in filter_.must]
        pool = [self._translate(condition) for condition in filter_.pool]
        if not pool:
            self.where = and_(true(), *must)
        elif filter_.any_of:
            self.where = and_(true(), *must, or_(false(), *pool))
        else:
            self.where = and_(true(), *must, *pool)

    def _translate(self, condition: Condition) -> ColumnElement[bool]:
        kind = self._kinds.get(condition.field)
        column = self._table.c.get(condition.field) if kind is not None else None
        if kind is None and not self._extra:
            return false()  # a field that items do not have is null, and null matches nothing
        if kind is None or kind is FieldKind.DOCUMENT or column is None:
            self.inexact = True
            return true()
        value = condition.value
        if condition.operator == "contains":
            if kind is not FieldKind.TEXT or not isinstance(value, str):
                return false()
            return self._dialect.contains(column, value) if value else column.is_not(None)
        if condition.operator == "exact":
            comparable = _comparable(value, kind)
            return false() if comparable is _MISSING else column == comparable
        members = [member for member in (_comparable(item, kind) for item in value) if member is not _MISSING]
        return self._dialect.within(column, members, kind) if members else false()


def order_by(
    sort: Sort | None, table: FromClause, item_type: type[BaseModel], inserted: str = SEQ
) -> Sequence[ColumnElement[Any]]:
    """The ORDER BY of a page: ties and no sort at all keep insertion order, which is that of column `inserted`."""
    if sort is None:
        return [table.c[inserted]]
    column = table.c[sort.field]
    key: ColumnElement[Any] = column
    if is_nullable(item_type, sort.field):
        key = func.coalesce(column, literal(sort_default(sort.field, sort.kind), column.type), type_=column.type)
    return [key.desc() if sort.descending else key.asc(), table.c[inserted]]
