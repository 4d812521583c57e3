"""Where a collection's statements run: in a transaction of their own, or in one that is open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from sqlalchemy import ColumnElement, Table
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from lightning_sql.collections.tracking import MetricsTracker, TrackedCollection
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.engine import Database
from lightning_sql.database.schema import PARTITION

__all__ = ["Session", "SqlContainer"]

R = TypeVar("R")
Work = Callable[[AsyncConnection], Awaitable[R]]


@dataclass(frozen=True, slots=True)
class Session:
    """A database and a partition of it; with a connection, one open transaction."""

    database: Database
    partition: str
    connection: AsyncConnection | None = None

    async def read(self, work: Work[R]) -> R:
        """Run statements that only read."""
        if self.connection is not None:
            with self.database.translated():
                return await work(self.connection)
        return await self.database.run(lambda: self._alone(work, writing=False))

    async def write(self, work: Work[R], *, undo: bool = False) -> R:
        """Run statements that write. With `undo`, a failure inside an open transaction takes back what they did."""
        if self.connection is None:
            return await self.database.run(lambda: self._alone(work, writing=True))
        with self.database.translated():
            if not undo:
                return await work(self.connection)
            async with self.connection.begin_nested():
                return await work(self.connection)

    async def _alone(self, work: Work[R], *, writing: bool) -> R:
        with self.database.translated():
            async with self.database.transaction(writing=writing) as connection:
                return await work(connection)


class SqlContainer(TrackedCollection):
    """What collections, queues and key-value stores in SQL have in common."""

    def __init__(self, session: Session, table: Table, tracker: MetricsTracker | None) -> None:
        super().__init__(tracker)
        self._session = session
        self._table = table

    @property
    @override
    def collection_name(self) -> str:
        return self._table.name.removeprefix("collection_")

    @property
    def _dialect(self) -> Dialect:
        return self._session.database.dialect

    @property
    def _mine(self) -> ColumnElement[bool]:
        """The rows of this partition."""
        return self._table.c[PARTITION] == self._session.partition

    def bound(self, session: Session) -> Self:
        """The same container inside an open transaction."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._session = session
        return view

    @asynccontextmanager
    async def _tracked(self, operation: str) -> AsyncGenerator[None]:
        async with self.tracking_context(operation, self.collection_name):
            yield


Row = dict[str, Any]
