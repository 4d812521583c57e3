"""Fixtures of the database tests."""

from tests.backends import database_of, prepared_postgres, prepared_sqlite

__all__ = ["database_of", "prepared_postgres", "prepared_sqlite"]
