"""Connections to PostgreSQL that the native store keeps for itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncpg.exceptions import AdminShutdownError, InternalClientError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from lightning_sql.database.dialects.postgresql_outcome import BackendSession, session_of
from lightning_sql.errors import DatabaseUnavailableError

__all__ = ["Connections", "Held", "driver_of", "is_undone", "warn_of_loss"]

logger: Final = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Held:
    """A connection that is kept, and the driver's own one below it."""

    connection: AsyncConnection
    driver: Any
    session: BackendSession | None


class Connections:
    """Connections that are checked out of the engine's pool and kept, each for one caller at a time."""

    def __init__(self, engine: AsyncEngine, most: int, settings: str | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._idle: list[Held] = []
        self._free = asyncio.Semaphore(most)
        self.in_use = 0
        """How many somebody works with."""

    @property
    def idle(self) -> int:
        """How many are kept for later."""
        return len(self._idle)

    async def use(self, work: Callable[[Held], Awaitable[R]]) -> R:
        """Work with a connection in autocommit, which is thrown away if that raises."""
        async with self._free:
            held = await self._checked_out()
            self.in_use += 1
            try:
                result = await work(held)
            except BaseException:
                # Whatever state it is in, nobody else shall find out.
                await self._discard(held.connection)
                raise
            finally:
                self.in_use -= 1
            self._idle.append(held)
            return result

    async def _checked_out(self) -> Held:
        while self._idle:
            held = self._idle.pop()
            if not held.driver.is_closed():
                return held
            await self._discard(held.connection)
        connection = self._engine.connect()
        await connection.start()
        driver: Any = None
        session: BackendSession | None = None
        try:
            driver = await driver_of(connection)
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            if self._settings is not None:
                await driver.execute(self._settings)
                session = await session_of(driver)
        except BaseException as error:
            broken = driver is not None and driver.is_closed()
            await self._discard(connection)
            if broken and isinstance(error, Exception):
                raise DatabaseUnavailableError from error
            raise
        return Held(connection, driver, session)

    @staticmethod
    async def _discard(connection: AsyncConnection) -> None:
        # Its settings are its own, so it does not go back to the pool.
        try:
            await connection.invalidate()
        finally:
            await connection.close()

    def break_idle(self) -> None:
        """Break those that nobody uses, so that nobody will."""
        for held in self._idle:
            held.driver.terminate()

    async def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            await self._discard(self._idle.pop().connection)


def is_undone(error: BaseException) -> bool:
    """Whether it is known that a statement, or a commit, did not take place whose connection broke.

    Either the driver had not sent it yet, or the server said why it ends the session. It says nothing
    more to a client that it could not tell of a commit.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, InternalClientError | AdminShutdownError):
            return True
        link = getattr(link, "orig", None) or link.__cause__
    return False


async def driver_of(connection: AsyncConnection) -> Any:
    """The driver's own connection below one of SQLAlchemy's."""
    return (await connection.get_raw_connection()).driver_connection


async def warn_of_loss(driver: Any) -> None:
    """Say so when what this database acknowledges need not be on disk."""
    query = "SELECT name FROM pg_settings WHERE name IN ('synchronous_commit', 'fsync') AND setting = 'off'"
    for [name] in await driver.fetch(query):
        logger.warning("%s is off in this database: what is acknowledged can be lost in a crash", name)
