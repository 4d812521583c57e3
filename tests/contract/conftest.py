"""Fixtures of the contract tests."""

from tests.backends import clock, collections_of, database_of, prepared_postgres, prepared_sqlite, server, store_of

__all__ = ["clock", "collections_of", "database_of", "prepared_postgres", "prepared_sqlite", "server", "store_of"]
