"""A database: its engines, its transactions, and its errors in our words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NoReturn, TypeVar

from sqlalchemy import select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from lightning_sql.database.dialects import dialect_of
from lightning_sql.database.dialects.base import CommitUnknownError, Dialect, EnginePair, Failure, FileLockedError
from lightning_sql.database.dialects.hot import HotPath
from lightning_sql.database.recovery import WAIT_SECONDS, Recovery, pause_of
from lightning_sql.errors import (
    ConfigurationError,
    DatabaseFullError,
    DatabaseUnavailableError,
    DuplicatedPrimaryKeyError,
    LightningError,
    OverloadedError,
    SchemaOutdatedError,
    TransactionConflictError,
    UnstorableValueError,
)
from lightning_sql.loops import PerLoop

__all__ = ["CommitUnknownError", "Database", "displayed_url", "lock_key", "parse_url"]

R = TypeVar("R")

RETRY_SECONDS: Final = 30.0
"""How long a transaction is tried again after it lost against others."""
REPAIR_SECONDS: Final = 5.0
"""How long something is tried again that failed for a reason which seldom goes away by itself, such as a full disk."""
IMPATIENT_SECONDS: Final = 0.2
"""Long enough for another connection instead of one that broke while nobody used it."""

_LAST_PORT: Final = 65535
_ADDRESS: Final = re.compile(r"([\w.%-]*|\[[\w.:%-]*\])(:\d+)?/")
"""The beginning of what can be the address of a server."""


def parse_url(database_url: str) -> URL:
    """The parts of a database URL.

    Raises:
        ConfigurationError: it is none; the message does not repeat it, since it may hold a password.
    """
    try:
        url = make_url(database_url)
        if url.port is None or 0 <= url.port <= _LAST_PORT:
            return url
    except (ArgumentError, ValueError):
        pass
    raise ConfigurationError(
        "the database URL cannot be read; it must be sqlite:///file, postgresql://host/name or memory://"
    )


def displayed_url(url: URL) -> str:
    """A database URL as it may be shown: without user, password and parameters.

    Whoever forgets to escape an `@` of a password has the rest of it taken for a part of the host.
    """
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database or ''}"
    host = url.host or ""
    port = "" if url.port is None else f":{url.port}"
    bracketed = f"[{host}]" if ":" in host else host
    address = f"{bracketed}{port}/{url.database or ''}".rpartition("@")[2]
    return f"{url.drivername}://{address if _ADDRESS.match(address) else '…'}"


@dataclass(slots=True, weakref_slot=True)
class _OfLoop:
    """What belongs to one event loop: its engines, and the transactions that run on it."""

    engines: EnginePair
    recovery: Recovery
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    closing: asyncio.Task[None] | None = None
    """What closes it, once for all who ask."""
    standing: list[Callable[[], Awaitable[None]]] = field(default_factory=list[Callable[[], Awaitable[None]]])


def _retrieve(task: asyncio.Task[Any]) -> None:
    # Retrieved, so that the error of a call whose caller has gone is not reported as lost.
    if not task.cancelled():
        task.exception()


class Database:
    """One database, for any number of event loops; an engine for each, made when first used.

    Args:
        database_url: `sqlite:///file` or `postgresql://host/name`; the async driver is added here.
        reflection: this object reads and changes the schema, not the records.
        wait_seconds: how long a call waits for a database that is away. A server that does not answer a hot statement
            within a quarter of it, or another statement within half of it, counts as away.

    Raises:
        ConfigurationError: not such a URL.
    """

    def __init__(self, database_url: str, *, reflection: bool = False, wait_seconds: float = WAIT_SECONDS) -> None:
        self.wait_seconds = wait_seconds
        self.url = parse_url(database_url)
        self.dialect: Dialect = dialect_of(self.url)
        self._loops = PerLoop(self._made_here, self.close)
        self._reflection = reflection
        # Engines connect lazily, so this only checks the parameters of the URL.
        self.dialect.engines(self.url)

    def __repr__(self) -> str:
        return f"<Database {displayed_url(self.url)}>"

    def _made_here(self) -> _OfLoop:
        engines = self.dialect.engines(
            self.url, reflection=self._reflection, wait_seconds=None if self._reflection else self.wait_seconds
        )
        return _OfLoop(engines, Recovery(self._probe, self.wait_seconds, self._returns))

    def _here(self) -> _OfLoop:
        return self._loops.here()

    @property
    def recovery(self) -> Recovery:
        """How calls on the running event loop wait while the database is away."""
        return self._here().recovery

    def _returns(self, error: DatabaseUnavailableError) -> bool:
        return self.dialect.is_server or isinstance(error, FileLockedError)

    async def _probe(self) -> None:
        with self.translated():
            async with self.transaction(writing=False) as connection:
                await connection.execute(select(1))

    def stop_waiting(self) -> None:
        """Fail what waits for the database on this event loop, now and until it is closed: it is to be closed soon."""
        here = self._loops.get()
        if here is not None:
            here.recovery.close()

    def close_first(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have something closed before the connections of this event loop are, on which it stands."""
        self._here().standing.append(close)

    async def close(self) -> None:
        """Close what stands on it on this event loop, wait for what is still running, and close its connections."""
        here = self._loops.get()
        if here is None:
            return
        if here.closing is None:
            here.closing = asyncio.create_task(self._close(here), name="lightning-sql close")
        # To its end even if the caller goes: what is half closed is of no use to anybody.
        await asyncio.shield(here.closing)

    async def _close(self, here: _OfLoop) -> None:
        while here.standing:
            await here.standing.pop()()
        here.recovery.close()
        while here.running:
            await asyncio.wait(list(here.running))
        await self._loops.forget()
        await here.engines.dispose()

    @contextmanager
    def translated(self, passing: Sequence[BaseException] = ()) -> Generator[None]:
        """Turn errors of the driver and of SQLAlchemy that the body raises into ours, but not those in `passing`."""
        try:
            yield
        except LightningError:
            raise
        except Exception as error:
            if any(error is passed for passed in passing):
                raise
            # asyncpg's errors arrive unwrapped while connecting.
            known = isinstance(error, SQLAlchemyError | OSError | TimeoutError)
            if not known and self.dialect.failure(error) is Failure.OTHER:
                raise
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        inner = getattr(error, "orig", None)
        if isinstance(inner, LightningError):  # raised by a column type
            raise inner from None
        match self.dialect.failure(error):
            case Failure.DUPLICATE:
                raise DuplicatedPrimaryKeyError from error
            case Failure.CONFLICT:
                raise TransactionConflictError from error
            case Failure.UNSTORABLE:
                raise UnstorableValueError("a value does not fit its column") from error
            case Failure.SCHEMA:
                raise SchemaOutdatedError from error
            case Failure.REFUSED:
                raise DatabaseUnavailableError(
                    "the database refuses the connection: check its name, user, password and permissions"
                ) from error
            case Failure.UNAVAILABLE:
                raise DatabaseUnavailableError from error
            case Failure.FULL:
                raise DatabaseFullError from error
            case Failure.OTHER:
                raise error

    @asynccontextmanager
    async def transaction(self, *, writing: bool, snapshot: bool = False) -> AsyncGenerator[AsyncConnection]:
        """A transaction that commits when the body returns and rolls back when it raises.

        What the body raises is passed on as it is: it may be a timeout, or the network, of somebody else.

        Raises:
            DatabaseUnavailableError: no connection; `CommitUnknownError` when it broke during the commit.
            TransactionConflictError: it lost against a concurrent transaction.
        """
        engines = self._here().engines
        engine = engines.writer if writing else engines.reader
        options = self.dialect.transaction_options(writing=writing, snapshot=snapshot)
        passing: list[BaseException] = []
        with self.translated(passing):
            async with engine.connect() as connection:
                if options:
                    await connection.execution_options(**options)
                transaction = await connection.begin()
                try:
                    yield connection
                except BaseException as error:
                    passing.append(error)
                    if isinstance(error, TimeoutError):
                        # Who does not answer is not asked to take it back: without its connection it will.
                        await connection.invalidate()
                    await transaction.rollback()
                    raise
                try:
                    await self._commit(transaction.commit(), writing)
                except CommitUnknownError:
                    await connection.invalidate()
                    raise

    async def _commit(self, commit: Coroutine[Any, Any, None], writing: bool) -> None:
        try:
            await commit
        except (SQLAlchemyError, OSError) as error:
            if writing and self.dialect.failure(error) is Failure.UNAVAILABLE:
                raise CommitUnknownError from error
            raise

    async def run(self, attempt: Callable[[], Awaitable[R]], *, retry: bool = True, patient: bool = True) -> R:
        """Run a whole transaction, again if it lost against others or its connection broke before the commit.

        It runs to its end even if the caller is cancelled: what was sent is not half sent. But for a caller that is
        gone it is not tried again. Without `patient`, it does not wait for a database that is away.
        """
        running = self._here().running
        gone = False
        begun = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(
            self._again(attempt, begun, repeatable=False, wanted=lambda: retry and not gone, patient=lambda: patient)
        )
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            gone = True
            raise

    async def retried(
        self,
        attempt: Callable[[], Awaitable[R]],
        *,
        repeatable: bool,
        patient: Callable[[], bool] = lambda: True,
        reading: bool = False,
    ) -> R:
        """Run something whole in the running task, again if it lost against others or its connection broke.

        With `repeatable`, also when it is not known whether it took place, since a second time does no harm. It is
        asked each time whether this is `patient` enough to wait for a database that is away, or leaves that to others.
        What only reads may be given up in the middle of it, and is when its time is up.
        """
        begun = asyncio.get_running_loop().time()

        async def limited() -> R:
            async with asyncio.timeout_at(begun + self.wait_seconds):
                return await attempt()

        once = limited if reading else attempt
        try:
            return await once()
        except Exception as error:  # noqa: BLE001 - the next attempt is told what to do about it
            first: Exception | None = error

        async def translated() -> R:
            nonlocal first
            with self.translated():
                if first is not None:
                    failed, first = first, None
                    raise failed
                return await once()

        return await self._again(translated, begun, repeatable=repeatable, wanted=lambda: True, patient=patient)

    async def _again(
        self,
        attempt: Callable[[], Awaitable[R]],
        begun: float,
        *,
        repeatable: bool,
        wanted: Callable[[], bool],
        patient: Callable[[], bool],
    ) -> R:
        recovery = self._here().recovery
        loop = asyncio.get_running_loop()
        tries = 0
        while True:
            try:
                return await attempt()
            except DatabaseUnavailableError as error:
                if isinstance(error, OverloadedError | DatabaseFullError) or not wanted():
                    raise
                if isinstance(error, CommitUnknownError) and not repeatable:
                    raise
                away = not isinstance(error, TransactionConflictError) and self._returns(error)
                if away and patient():
                    again = await recovery.back(tries, begun + recovery.seconds)
                else:
                    limit = IMPATIENT_SECONDS if away else REPAIR_SECONDS
                    if isinstance(error, TransactionConflictError):
                        limit = RETRY_SECONDS
                    pause = pause_of(tries)
                    again = loop.time() + pause < begun + min(limit, recovery.seconds)
                    if again:
                        await asyncio.sleep(pause)
                if not again or not wanted():
                    raise
            tries += 1

    def hot_path(self, partition: str, *, join: bool = True, claim_timeout: float | None = None) -> HotPath:
        """A way of the native store to a partition, for the running event loop; whoever asks closes it."""
        return self.dialect.hot_path(
            self.url,
            self._here().engines,
            partition,
            join=join,
            claim_timeout=claim_timeout,
            # What is sent again, perhaps on another connection, must find time for that.
            statement_seconds=self.wait_seconds / 4,
        )


def lock_key(partition: str, label: str) -> int:
    """The 64-bit key of a label's lock in a partition."""
    digest = blake2b(f"{partition}\x00{label}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
