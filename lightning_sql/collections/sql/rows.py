"""Between pydantic items and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy import Table
from sqlalchemy.engine import RowMapping

from lightning_sql.collections.checks import project
from lightning_sql.database.schema import EXTRA, PARTITION
from lightning_sql.fields import field_kinds

__all__ = ["RowMapper"]

T = TypeVar("T", bound=BaseModel)


class RowMapper(Generic[T]):
    """Writes items of one type as rows of one table, and reads them back.

    Fields that have no column of their own (extra ones, and those of a newer model) share the column
    `extra_fields`.
    """

    def __init__(self, item_type: type[T], table: Table) -> None:
        self.item_type = item_type
        self.columns = [name for name in field_kinds(item_type) if name in table.c]
        self._model_columns = set(self.columns)

    def row(self, item: T, partition: str) -> dict[str, Any]:
        """Every column of an item, ready to be bound."""
        values = project(item, self.item_type).model_dump(mode="python", warnings=False)
        extra = {name: value for name, value in values.items() if name not in self._model_columns}
        return {PARTITION: partition, EXTRA: extra or None} | {name: values.get(name) for name in self.columns}

    def item(self, row: RowMapping) -> T:
        """The item of a row."""
        values = {name: row[name] for name in self.columns}
        return self.item_type.model_validate(values | (row[EXTRA] or {}))

    def stored_columns(self, fields: Sequence[str] | None) -> list[str]:
        """The columns to write when these fields are updated; None is every field.

        A field without a column lives in the shared one, which is then written as a whole: merge it first.
        """
        if fields is None:
            return [*self.columns, EXTRA]
        columns = [name for name in fields if name in self._model_columns]
        return columns if len(columns) == len(fields) else [*columns, EXTRA]
