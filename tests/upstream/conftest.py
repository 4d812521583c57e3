"""Fixtures of the tests with upstream's own code."""

from tests.backends import (
    clock,
    collections_of,
    database_of,
    new_store,
    prepared_postgres,
    prepared_sqlite,
    server,
)

__all__ = [
    "clock",
    "collections_of",
    "database_of",
    "new_store",
    "prepared_postgres",
    "prepared_sqlite",
    "server",
]
