"""Alembic from Python: create, upgrade, check and name the schema of a database."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from lightning_sql.database import native
from lightning_sql.database.engine import RETRY_SECONDS, Database
from lightning_sql.database.recovery import pause_of
from lightning_sql.errors import ConfigurationError, SchemaOutdatedError, TransactionConflictError

__all__ = ["METADATA", "Migrations", "scripts"]

R = TypeVar("R")

METADATA: Final = native.ROLLOUTS.metadata
"""Every table that this release declares: the native store's, and those of the protocols that they stand beside."""

_RELATIVE: Final = re.compile(r"[+-][0-9]{1,4}")
READ_SECONDS: Final = 30.0
"""How long looking at the schema may take; changing it may take as long as it does."""

POLL_SECONDS: Final = 0.02

UPGRADE_COMMAND: Final = "lightning-sql migrate up"


def scripts() -> Path:
    """The migrations: inside the wheel beside the library's modules, in a checkout beside its folder."""
    library = Path(__file__).resolve().parent.parent
    shipped = library / "_migrations"
    return shipped if shipped.is_dir() else library.parent / "migrations"


class Migrations:
    """The schema of one database.

    Raises (every method):
        DatabaseUnavailableError: the database cannot be reached.
    """

    def __init__(self, database_url: str) -> None:
        self._database = Database(database_url, reflection=True)
        self._config = Config()
        self._config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
        self._config.set_main_option("path_separator", "os")
        self._tree = ScriptDirectory.from_config(self._config)

    @property
    def head(self) -> str:
        """The revision that this release needs."""
        return self._tree.get_heads()[0]

    def revisions(self) -> list[str]:
        """Every revision that this release knows, the first one first."""
        return [script.revision for script in self._tree.walk_revisions()][::-1]

    async def current(self) -> str | None:
        """The revision of the database; None when it has no schema of ours."""
        return await self._read(_revision)

    async def upgrade(self, revision: str = "head") -> None:
        """Bring the schema up to a revision. Several processes may do so at once: one does it, the others wait.

        Raises:
            ConfigurationError: no such revision.
        """
        self._check_name(revision)
        await self._database.dialect.prepare(self._database.url)
        await self._write(lambda: command.upgrade(self._config, revision))

    async def downgrade(self, revision: str) -> None:
        """Take the schema down to a revision, or to `base`. Raises as `upgrade` does."""
        self._check_name(revision)
        await self._write(lambda: command.downgrade(self._config, revision))

    async def check(self) -> list[str]:
        """What differs between the database and the tables that this release declares; a line for each difference."""

        def compare(connection: Connection) -> list[str]:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return [_line(difference) for difference in compare_metadata(context, METADATA)]

        return await self._read(compare)

    async def prepare(self, *, migrate: bool = False) -> None:
        """Make the database ready to serve.

        An empty database gets its schema. An old one is upgraded where nobody else depends on it
        (SQLite, after a copy of the file) or when `migrate` allows it.

        Raises:
            SchemaOutdatedError: the schema is old, or newer than this release.
        """
        await self._database.dialect.prepare(self._database.url)
        current = await self.current()
        if current == self.head:
            return
        if current is not None:
            self._known(current)
        if current is None or migrate:
            await self.upgrade()
            return

        async def back_up(connection: AsyncConnection) -> None:
            # Asked again, where nobody else can be at it: a second server must not copy what the first one upgraded.
            if await connection.run_sync(_revision) != current:
                return
            if not await self._database.dialect.back_up(self._database.url, current):
                raise SchemaOutdatedError(
                    f"the database is at revision {current}, this release needs {self.head}: run `{UPGRADE_COMMAND}`"
                )

        await self._write(lambda: command.upgrade(self._config, "head"), back_up)

    def _check_name(self, revision: str) -> None:
        """Refuse what is no name of a revision without repeating it: it may be a URL that stands in the wrong place."""
        names = ["base", *self.revisions(), "head"]
        if revision not in names and not _RELATIVE.fullmatch(revision):
            raise ConfigurationError(f"there is no such revision; there are {', '.join(names)}")

    def _known(self, revision: str) -> None:
        try:
            self._tree.get_revision(revision)
        except (CommandError, ResolutionError):
            raise SchemaOutdatedError(
                f"the database is at revision {revision}, which this release does not know: use a newer release"
            ) from None

    async def _whole(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Run a whole transaction, and again if it lost: against others, or since the process was forked meanwhile."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETRY_SECONDS
        tries = 0
        while True:
            try:
                with self._database.translated():
                    return await attempt()
            except TransactionConflictError:
                if loop.time() > deadline:
                    raise
            finally:
                await self._database.close()
            await asyncio.sleep(pause_of(tries))
            tries += 1

    async def _read(self, work: Callable[[Connection], R]) -> R:
        async def attempt() -> R:
            async with asyncio.timeout(READ_SECONDS), self._database.transaction(writing=False) as connection:
                return await connection.run_sync(work)

        return await self._whole(attempt)

    async def _write(
        self, work: Callable[[], Any], first: Callable[[AsyncConnection], Awaitable[None]] | None = None
    ) -> None:
        def run(connection: Connection) -> None:
            self._config.attributes["connection"] = connection
            try:
                work()
            finally:
                del self._config.attributes["connection"]

        async def attempt() -> None:
            async with self._database.transaction(writing=True) as connection:
                lock = self._database.dialect.lock([MIGRATION_LOCK])
                if lock is not None:
                    await connection.execute(lock)
                if first is not None:
                    await first(connection)
                async with _alembic_alone():
                    await connection.run_sync(run)

        try:
            await self._whole(attempt)
        except CommandError as error:
            raise ConfigurationError(str(error)) from None


MIGRATION_LOCK: Final = 0x6C69676874_6E696E
"""The key of the lock under which a database is migrated."""


_alembic = threading.Lock()


@asynccontextmanager
async def _alembic_alone() -> AsyncGenerator[None]:
    """A block in which no other event loop or task of the process runs Alembic's scripts: what they see is global."""
    lock = _alembic
    while not lock.acquire(blocking=False):  # noqa: ASYNC110 - it is other threads' too
        await asyncio.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _forget() -> None:
    global _alembic
    _alembic = threading.Lock()  # the thread that held it is not in this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _line(difference: Any) -> str:
    if isinstance(difference, list):  # the differences of one column come together
        return "; ".join(_line(part) for part in cast(list[Any], difference))
    kind, *details = difference
    return f"{kind}: " + ", ".join(str(detail) for detail in details if detail is not None)
