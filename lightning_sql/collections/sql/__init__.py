"""The protocols in SQL: any pydantic item type over its table, on PostgreSQL and SQLite."""

from __future__ import annotations

from lightning_sql.collections.sql.collection import SqlCollection
from lightning_sql.collections.sql.collections import ItemTypes, SqlCollections
from lightning_sql.collections.sql.key_value import SqlKeyValue
from lightning_sql.collections.sql.queue import SqlQueue

__all__ = ["ItemTypes", "SqlCollection", "SqlCollections", "SqlKeyValue", "SqlQueue"]
