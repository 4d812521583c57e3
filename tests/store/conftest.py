"""Fixtures of the tests of the stores' parts."""

from tests.backends import clock, collections_of, database_of, new_store, prepared_postgres, prepared_sqlite
from tests.store.statements import rig

__all__ = [
    "clock",
    "collections_of",
    "database_of",
    "new_store",
    "prepared_postgres",
    "prepared_sqlite",
    "rig",
]
