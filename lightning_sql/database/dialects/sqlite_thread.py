"""The threads that work on SQLite files: for each file one that writes, and a few that read.

They are shared by all event loops, stores and partitions of the process. A connection is opened and used
by one thread only, and closed by it or before the process is forked (see `sqlite_fork`).
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from sqlite3 import Cursor
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, Executable, NullPool, create_engine, event
from sqlalchemy.engine import URL

from lightning_sql.database.dialects.base import CommitUnknownError, Failure, FileLockedError
from lightning_sql.database.dialects.sqlite_fork import register, using
from lightning_sql.database.dialects.sqlite_log import WriteAheadLog
from lightning_sql.database.dialects.sqlite_reading import bounded
from lightning_sql.database.dialects.words import word

__all__ = ["BEGIN_READ", "BEGIN_WRITE", "READERS", "Threads", "configure", "open_threads"]

R = TypeVar("R")

READERS: Final = 4
JOINED_JOBS: Final = 32
"""How many jobs at most one transaction takes when they wait for the writer together."""
CACHED_STATEMENTS: Final = 512
LOCKED_SECONDS: Final = 3.0
"""How long a transaction waits for the lock of the file before those who want it are told, and ask again."""
FORGOTTEN_SECONDS: Final = 1.0
"""After so long in which nobody asked for it, it is not known whether the lock was held all the time."""
POLL_MILLISECONDS: Final = 2
"""How long SQLite itself waits for the lock before a writer asks again. Its own pauses grow to a tenth of
a second, in which a process that writes without a break would get the lock again and again."""

BEGIN_WRITE: Final = "BEGIN IMMEDIATE"
BEGIN_READ: Final = "BEGIN"

_Key: TypeAlias = tuple[Path, tuple[tuple[str, str], ...]]
_Classify: TypeAlias = Callable[[BaseException], Failure]


def configure(engine: Engine, pragmas: Mapping[str, str]) -> None:
    """Let the connections of an engine have these pragmas, and begin no transaction by themselves."""

    def connected(connection: Any, _record: object) -> None:
        # The driver's own transaction handling would begin too late, and never IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        for name, value in pragmas.items():
            cursor.execute(f"PRAGMA {word(name)} = {word(value)}")
        cursor.close()

    event.listen(engine, "connect", connected)


class _Job(NamedTuple):
    """Something to be done, and who waits for what comes of it."""

    run: Callable[[_Seat, Any], Any]
    """The method of a connection that does it."""
    work: Any
    """What that method takes."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


_Reads: TypeAlias = SimpleQueue[_Job | None]
"""What one reader is to read next; None ends it."""


class _Release(NamedTuple):
    """One user of the threads less; who waits gets the writer's thread if it ends with that, else None."""

    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[Any] | None


class _Answer(NamedTuple):
    future: asyncio.Future[Any]
    result: Any
    error: BaseException | None


def _settle(answers: Sequence[_Answer]) -> None:
    for future, result, error in answers:
        if future.done():  # whoever waited was cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _deliver(loop: asyncio.AbstractEventLoop, answers: Sequence[_Answer]) -> None:
    with suppress(RuntimeError):  # the loop was closed, and nobody waits any more
        loop.call_soon_threadsafe(_settle, answers)


def _new_job(run: Callable[[_Seat, Any], Any], work: Any) -> _Job:
    loop = asyncio.get_running_loop()
    return _Job(run, work, loop, loop.create_future())


class _JobError(Exception):
    """One of several jobs failed."""


class _Seat:
    """The connection of one thread: opened when first needed, and anew after it broke."""

    def __init__(self, file: Path, begin: str, pragmas: Mapping[str, str], classify: _Classify) -> None:
        self._begin = begin
        self._writes = begin == BEGIN_WRITE
        self._patience = min(int(pragmas["busy_timeout"]) / 1000, LOCKED_SECONDS)
        if self._writes:
            pragmas = {**pragmas, "busy_timeout": str(POLL_MILLISECONDS)}
        self._classify = classify
        self._engine = create_engine(
            URL.create("sqlite+pysqlite", database=str(file)),
            poolclass=NullPool,
            hide_parameters=True,  # errors and logs must not repeat what is stored
            # Closed before a fork by the thread that forks; SQLite itself does not mind which thread that is.
            connect_args={"cached_statements": CACHED_STATEMENTS, "check_same_thread": False},
        )
        configure(self._engine, pragmas)
        self._opened: tuple[Connection, Cursor] | None = None
        self._log = WriteAheadLog(file)
        self._locked_since = -math.inf
        self._last_locked = -math.inf
        """When others were found to hold the lock, first and last, whoever asked for it meanwhile."""
        register(self)

    def _open(self) -> tuple[Connection, Cursor]:
        if self._opened is None:
            connection = self._engine.connect()
            self._opened = connection, cast(Cursor, connection.connection.cursor())
        return self._opened

    def close(self) -> None:
        """Close the connection, which a later job would open again."""
        with using():
            self.close_now()

    def close_now(self) -> None:
        """As `close`, while nobody else can use it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            # Whoever keeps the error of a statement keeps this cursor, with which SQLite would only seem to close.
            with suppress(Exception):
                opened[1].close()
            with suppress(Exception):
                opened[0].close()

    def _begun(self) -> tuple[Connection, Cursor]:
        """The connection in a transaction, as soon as other processes let us.

        Raises:
            FileLockedError: they have not for long. Those who wait for this thread are not to wait once more each.
        """
        while True:
            try:
                opened = self._open()
                opened[1].execute(self._begin)
            except Exception as error:
                if self._check(error) is not Failure.CONFLICT:
                    raise
                now = time.monotonic()
                if now - self._last_locked > FORGOTTEN_SECONDS:
                    self._locked_since = now
                self._last_locked = now
                if now - self._locked_since > self._patience:
                    raise FileLockedError from error
            else:
                self._last_locked = -math.inf
                return opened

    def tend(self) -> None:
        """Between two transactions that write: see that the log does not grow for ever."""
        with using():
            if self._opened is not None and self._log.is_too_large():
                try:
                    self._log.empty(self._opened[1])
                except Exception as error:  # noqa: BLE001 - nobody asked for it, and the next transaction finds out
                    self._check(error)

    def hot(self, work: Callable[[Cursor], R]) -> R:
        """Run work on a cursor in a transaction."""
        _, cursor = self._begun()
        try:
            result = work(cursor)
        except BaseException as error:
            self._undo(cursor, error)
            raise
        try:
            cursor.execute("COMMIT")
        except Exception as error:
            self._undo(cursor, error)
            self._raise_unknown(error)
            raise
        return result

    def hot_alone(self, work: Callable[[Cursor], R]) -> R:
        """As `hot`; another name, by which jobs that must not join are told from those that may."""
        return self.hot(work)

    def cold(self, work: Callable[[Connection], R]) -> R:
        """Run work on the connection in a transaction."""
        connection, cursor = self._begun()
        transaction = connection.begin()  # SQLAlchemy's idea of it; nothing is sent
        try:
            result = work(connection)
        except BaseException as error:
            self._undo(cursor, error)
            transaction.close()
            raise
        try:
            transaction.commit()
        except Exception as error:
            self.close_now()
            self._raise_unknown(error)
            raise
        return result

    def fetch(self, statement: Executable) -> Sequence[Any]:
        """The rows of one statement, which needs no transaction around it to be of one state."""
        # As the driver gives them: a row of SQLAlchemy's takes its time.
        return self._fetched(statement, {}, lambda cursor: cursor.fetchall())

    def fetch_bounded(
        self, asked: tuple[Executable, Mapping[str, Any], int, Sequence[int]]
    ) -> tuple[Sequence[Any], bool]:
        """The rows of one statement until they have so many bytes, and whether that was before the end."""
        statement, values, most_bytes, heavy = asked
        return self._fetched(statement, values, lambda cursor: bounded(cursor, most_bytes, heavy))

    def fetch_text(self, asked: tuple[str, Sequence[Any], int, Sequence[int]]) -> tuple[Sequence[Any], bool]:
        """As `fetch_bounded`, for a statement in SQLite's own words."""
        sql, arguments, most_bytes, heavy = asked
        cursor: Cursor | None = None
        try:
            cursor = cast(Cursor, self._open()[0].connection.cursor())
            return bounded(cursor.execute(sql, arguments), most_bytes, heavy)
        except Exception as error:
            self._check(error)
            raise
        finally:
            if cursor is not None:
                cursor.close()  # a statement that was not read to its end would hold an old state of the file

    def _fetched(self, statement: Executable, values: Mapping[str, Any], take: Callable[[Cursor], R]) -> R:
        connection, _ = self._open()
        try:
            with connection.execute(statement, values) as result:
                return take(cast(Cursor, result.cursor))
        except Exception as error:
            self._check(error)
            raise
        finally:
            connection.rollback()

    def _undo(self, cursor: Cursor, error: BaseException) -> None:
        # After some errors SQLite has rolled back by itself.
        if cursor.connection.in_transaction:
            try:
                cursor.execute("ROLLBACK")
            except Exception:  # noqa: BLE001 - closing it does the same
                self.close_now()
        self._check(error)

    def _check(self, error: BaseException) -> Failure:
        """What an error means; a connection that may be broken is closed."""
        failure = self._classify(error)
        if failure is Failure.UNAVAILABLE:
            self.close_now()
        return failure

    def _raise_unknown(self, error: Exception) -> None:
        if self._writes and self._classify(error) is Failure.UNAVAILABLE:
            raise CommitUnknownError from error

    def answer(self, job: _Job) -> _Answer:
        """Run a job alone."""
        with using():
            return self._answer(job)

    def answer_joined(self, jobs: Sequence[_Job]) -> list[_Answer]:
        """Run hot jobs in one transaction; when one of them fails, each alone, so that only that one fails."""
        with using():
            return self._answer_joined(jobs)

    def _answer(self, job: _Job) -> _Answer:
        try:
            return _Answer(job.future, job.run(self, job.work), None)
        except StopIteration as error:  # which no future can hold
            return _Answer(job.future, None, RuntimeError(f"the work raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller
            return _Answer(job.future, None, error)

    def _answer_joined(self, jobs: Sequence[_Job]) -> list[_Answer]:
        if len(jobs) == 1:
            return [self._answer(jobs[0])]

        def work(cursor: Cursor) -> list[Any]:
            try:
                return [job.work(cursor) for job in jobs]
            except BaseException as error:
                raise _JobError from error

        try:
            results = self.hot(work)
        except _JobError:
            return [self._answer(job) for job in jobs]
        except Exception as error:  # noqa: BLE001 - the transaction itself failed, for all of them
            return [_Answer(job.future, None, error) for job in jobs]
        return [_Answer(job.future, result, None) for job, result in zip(jobs, results, strict=True)]


class Threads:
    """The threads of one file, made by `open_threads`."""

    def __init__(self, key: _Key, file: Path, pragmas: Mapping[str, str], classify: _Classify) -> None:
        self.users = 1
        self._key = key
        self._pid = os.getpid()
        self._file = file
        self._pragmas = pragmas
        self._classify = classify
        self._jobs: SimpleQueue[_Job | _Release] = SimpleQueue()
        self._reading = threading.Lock()
        """Guards what follows."""
        self._readers: dict[_Reads, threading.Thread] = {}
        self._idle: list[_Reads] = []
        """Who was busy last is last, and takes the next: what it reads again is still in its processor's cache."""
        self._unread: deque[_Job] = deque()
        self._writing = False
        self._writer = self._start(self._write, "writer")

    def _start(self, target: Callable[[], None], role: str) -> threading.Thread:
        # What an exiting process has not committed was not acknowledged, so nobody need wait for it.
        thread = threading.Thread(target=target, name=f"sqlite-{role} {self._file.name}", daemon=True)
        thread.start()
        return thread

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that the threads are in."""
        return self._pid != os.getpid()

    def connections(self) -> tuple[int, int]:
        """How many threads are at work, and how many are not; each has a connection."""
        at_work = self._writing + len(self._readers) - len(self._idle)
        return at_work, 1 + len(self._readers) - at_work

    def hot(self, work: Callable[[Cursor], R]) -> asyncio.Future[R]:
        """Write in a transaction, which waiting ones may share; a failure leaves nothing of this work, and no other."""
        return self._put(_Seat.hot, work)

    def hot_alone(self, work: Callable[[Cursor], R]) -> asyncio.Future[R]:
        """As `hot`, in a transaction of its own."""
        return self._put(_Seat.hot_alone, work)

    def cold(self, work: Callable[[Connection], R]) -> asyncio.Future[R]:
        """Write in a transaction of its own."""
        return self._put(_Seat.cold, work)

    def hot_read(self, work: Callable[[Cursor], R]) -> asyncio.Future[R]:
        """Read one state of the database, not older than this call."""
        return self._read(_Seat.hot, work)

    def cold_read(self, work: Callable[[Connection], R]) -> asyncio.Future[R]:
        """Read one state of the database, not older than this call."""
        return self._read(_Seat.cold, work)

    def fetch(self, statement: Executable) -> asyncio.Future[Sequence[Any]]:
        """The rows of a statement, as the driver gives them."""
        return self._read(_Seat.fetch, statement)

    def fetch_bounded(
        self, statement: Executable, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> asyncio.Future[tuple[Sequence[Any], bool]]:
        """The rows of a statement until they have so many bytes, and whether that was before the end."""
        return self._read(_Seat.fetch_bounded, (statement, values, most_bytes, heavy))

    def fetch_text(
        self, sql: str, arguments: Sequence[Any], most_bytes: int, heavy: Sequence[int]
    ) -> asyncio.Future[tuple[Sequence[Any], bool]]:
        """As `fetch_bounded`, for a statement in SQLite's own words."""
        # sql: compiled by SQLAlchemy, its values bound
        return self._read(_Seat.fetch_text, (sql, arguments, most_bytes, heavy))

    def _read(self, run: Callable[[_Seat, Any], Any], work: Any) -> asyncio.Future[Any]:
        job = _new_job(run, work)
        with self._reading:
            if self._idle:
                self._idle.pop().put(job)
            elif len(self._readers) < READERS:
                reads: _Reads = SimpleQueue()
                reads.put(job)
                self._readers[reads] = self._start(functools.partial(self._serve_reads, reads), "reader")
            else:
                self._unread.append(job)
        return job.future

    def _put(self, run: Callable[[_Seat, Any], Any], work: Any) -> asyncio.Future[Any]:
        job = _new_job(run, work)
        self._jobs.put(job)
        return job.future

    async def release(self) -> None:
        """Need the threads no longer. What was sent before is done then, and without a user they have ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[threading.Thread | None] = loop.create_future()
        self._jobs.put(_Release(loop, future))
        ended = await future
        if ended is not None:
            ended.join()

    def abandon(self) -> None:
        """Need the threads no longer, and do not wait; safe to call from anywhere, a garbage collection included."""
        if not self.is_inherited:
            self._jobs.put(_Release(None, None))

    def _write(self) -> None:
        seat = _Seat(self._file, BEGIN_WRITE, self._pragmas, self._classify)
        waiting: deque[_Job | _Release] = deque()
        while True:
            waiting.append(self._jobs.get())
            while not self._jobs.empty():
                waiting.append(self._jobs.get())
            self._writing = True
            while waiting:
                if not self._serve_writes(seat, waiting):
                    return
                seat.tend()
            self._writing = False

    def _serve_writes(self, seat: _Seat, waiting: deque[_Job | _Release]) -> bool:
        """Do what comes first, and with it what can join; False when that was the end."""
        first = waiting.popleft()
        if isinstance(first, _Release):
            return self._released(seat, first)
        if first.run is not _Seat.hot:
            _deliver(first.loop, [seat.answer(first)])
            return True
        jobs = [first]
        while waiting and len(jobs) < JOINED_JOBS:
            following = waiting[0]
            if isinstance(following, _Release) or following.run is not _Seat.hot:
                break
            jobs.append(following)
            waiting.popleft()
        by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
        for job, answer in zip(jobs, seat.answer_joined(jobs), strict=True):
            by_loop.setdefault(job.loop, []).append(answer)
        for loop, answers in by_loop.items():
            _deliver(loop, answers)
        return True

    def _released(self, seat: _Seat, release: _Release) -> bool:
        with _lock:
            self.users -= 1
            is_used = self.users > 0
            if not is_used:
                del _threads[self._key]
        if not is_used:
            for reads in self._readers:
                reads.put(None)
            for reader in self._readers.values():
                reader.join()
            seat.close()
        if release.loop is not None and release.future is not None:
            _deliver(release.loop, [_Answer(release.future, None if is_used else self._writer, None)])
        return is_used

    def _serve_reads(self, reads: _Reads) -> None:
        seat = _Seat(self._file, BEGIN_READ, {**self._pragmas, "query_only": "ON"}, self._classify)
        while self._serve_read(seat, reads):
            pass
        seat.close()

    def _serve_read(self, seat: _Seat, reads: _Reads) -> bool:
        job = reads.get()
        while job is not None:
            answer = seat.answer(job)
            loop = job.loop
            with self._reading:  # first, so that who asks again at once finds this thread free
                job = self._unread.popleft() if self._unread else None
                if job is None:
                    self._idle.append(reads)
            _deliver(loop, [answer])
            if job is None:
                return True
        return False


_lock = threading.Lock()
"""Guards who uses which threads."""
_threads: Final[dict[_Key, Threads]] = {}


def open_threads(file: Path, pragmas: Mapping[str, str], classify: _Classify) -> Threads:
    """The threads of a file, for one user more, who must `release` or `abandon` them.

    Args:
        file: the database; nothing is opened before there is work.
        pragmas: of every connection.
        classify: what an error of the driver means.
    """
    path = file.resolve()
    key = path, tuple(sorted(pragmas.items()))
    with _lock:
        threads = _threads.get(key)
        if threads is None:
            threads = _threads[key] = Threads(key, path, pragmas, classify)
        else:
            threads.users += 1
        return threads


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not in this process
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
