"""Fixtures of the contract tests."""

from tests.backends import (
    clock,
    collections_of,
    database_of,
    new_store,
    prepared_postgres,
    prepared_sqlite,
    server,
    sessions_of,
    store_of,
    with_sample_tables,
)

__all__ = [
    "clock",
    "collections_of",
    "database_of",
    "new_store",
    "prepared_postgres",
    "prepared_sqlite",
    "server",
    "sessions_of",
    "store_of",
    "with_sample_tables",
]
