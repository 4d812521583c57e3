"""From a database URL to a store, and to the schema below it.

Database modules are imported only when a database is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lightning_sql.errors import ConfigurationError
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.threaded import threaded

if TYPE_CHECKING:
    from lightning_sql.database.migrate import Migrations
    from lightning_sql.metrics import Recorder
    from lightning_sql.store.interface import LightningStore

__all__ = [
    "MEMORY_URL",
    "check_database_url",
    "displayed_url",
    "is_memory",
    "migrations_of",
    "open_store",
    "prepare_database",
]

MEMORY_URL: Final = "memory://"


def is_memory(database_url: str) -> bool:
    """Whether the URL asks for the memory backend, as SQLite's own names for a database in memory do."""
    return database_url in (MEMORY_URL, "sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite:///:memory:")


def check_database_url(database_url: str) -> None:
    """Check a database URL without connecting.

    Raises:
        ConfigurationError: it is none, or its parameters are unknown.
    """
    if not is_memory(database_url):
        from lightning_sql.database.engine import Database

        Database(database_url)


def displayed_url(database_url: str) -> str:
    """A database URL as it may be shown and logged: without user, password and parameters."""
    if is_memory(database_url):
        return database_url
    from lightning_sql.database import engine

    try:
        return engine.displayed_url(engine.parse_url(database_url))
    except ConfigurationError:
        return "(malformed database URL)"


def migrations_of(database_url: str) -> Migrations:
    """The schema of a database: `upgrade`, `downgrade`, `current`, `check`.

    Raises:
        ConfigurationError: not a database URL, or the memory backend, which has no schema.
    """
    if is_memory(database_url):
        raise ConfigurationError("the memory backend has no schema to migrate")
    from lightning_sql.database.migrate import Migrations

    return Migrations(database_url)


async def prepare_database(database_url: str, *, migrate: bool = False) -> None:
    """Make a database ready to serve: create its schema, or upgrade it where that is allowed.

    An empty database and an SQLite file (after a copy of it) are brought up to date by themselves;
    an old PostgreSQL schema only with `migrate`.

    Raises:
        ConfigurationError: not a database URL.
        SchemaOutdatedError: the schema is old, or newer than this release.
        DatabaseUnavailableError: the database cannot be reached.
    """
    if not is_memory(database_url):
        await migrations_of(database_url).prepare(migrate=migrate)


def _store(
    database_url: str,
    partition: str,
    scan_debounce_seconds: float,
    clock: Callable[[], float] | None,
    join: bool,
    claim_timeout_seconds: float | None,
    database_wait_seconds: float,
    recorder: Recorder | None,
    thread_safe: bool,
) -> LightningStore:
    if is_memory(database_url):
        from lightning_sql.collections.memory import MemoryCollections
        from lightning_sql.collections.tracking import RecordingTracker

        tracker = None if recorder is None else RecordingTracker(recorder)

        def make() -> LightningStore:
            return CollectionStore(
                MemoryCollections(clock=time.time if clock is None else clock, tracker=tracker),
                scan_debounce_seconds=scan_debounce_seconds,
                clock=time.monotonic if clock is None else clock,
                claim_timeout_seconds=claim_timeout_seconds,
                recorder=recorder,
            )

        return threaded(make) if thread_safe else make()
    from lightning_sql.database.engine import Database
    from lightning_sql.store.sql_store import SqlStore

    return SqlStore(
        Database(database_url, wait_seconds=database_wait_seconds),
        partition=partition,
        scan_debounce_seconds=scan_debounce_seconds,
        clock=clock,
        join=join,
        claim_timeout_seconds=claim_timeout_seconds,
        recorder=recorder,
    )


async def open_store(
    database_url: str,
    *,
    partition: str = "default",
    scan_debounce_seconds: float = 10.0,
    clock: Callable[[], float] | None = None,
    join: bool = True,
    claim_timeout_seconds: float | None = None,
    database_wait_seconds: float = 40.0,
    recorder: Recorder | None = None,
    thread_safe: bool = False,
) -> LightningStore:
    """Open a store on a database that is prepared, creating the schema of an empty one.

    Args:
        database_url: `sqlite:///file`, `postgresql://host/name` or `memory://`.
        partition: one training run, or one tenant; stores of different partitions see nothing of each other.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger.
        clock: seconds since the epoch, for tests; by default that of the database or the process.
        join: whether concurrent calls of one kind go to the database together.
        claim_timeout_seconds: after how long an attempt of which nothing was heard since it was begun is given up
            and its rollout queued again, whatever its retry settings; None is never.
        database_wait_seconds: how long a call waits for a database that is away before it fails; a statement may take
            half of it.
        recorder: who takes down what the store does; None is nobody.
        thread_safe: whether several threads, each with an event loop of its own, may use the store at once. In a
            database they always may; in memory, all calls then go through one thread.

    Raises:
        ConfigurationError: not a database URL.
        SchemaOutdatedError: the schema is not the one that this release needs.
        DatabaseUnavailableError: the database cannot be reached.
    """
    await prepare_database(database_url)
    return _store(
        database_url,
        partition,
        scan_debounce_seconds,
        clock,
        join,
        claim_timeout_seconds,
        database_wait_seconds,
        recorder,
        thread_safe,
    )
