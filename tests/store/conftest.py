"""Fixtures of the tests of the stores' parts."""

from tests.backends import clock, collections_of, database_of, new_store, prepared_postgres, prepared_sqlite
from tests.store.native import dialect, open_store, store
from tests.store.statements import rig

__all__ = [
    "clock",
    "collections_of",
    "database_of",
    "dialect",
    "new_store",
    "open_store",
    "prepared_postgres",
    "prepared_sqlite",
    "rig",
    "store",
]
