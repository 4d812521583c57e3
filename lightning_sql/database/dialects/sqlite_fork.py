"""How a process that has SQLite files open can be forked.

SQLite remembers, for the whole process, which locks it holds on which files. A forked process would take its parent's
for its own, and what a thread was about to do to a file would stay half done there for ever. So before a fork every
connection is left alone and closed; in both processes they are opened again when they are needed. A transaction that
goes on over several turns of an event loop is not waited for, since that may be the loop which forks: it is taken back,
and those who are in it are told that it lost.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast
from weakref import WeakSet

from typing_extensions import override

__all__ = ["Closable", "ForkableConnection", "ForkedError", "register", "using"]


class Closable(Protocol):
    """What has a connection, and opens it anew when it needs one."""

    def close_now(self) -> None:
        """Close the connection, in whatever thread; nobody uses it."""
        ...


class _Gate:
    """Lets any number of threads use connections, but none while the process is forked."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._using = 0
        self._forking = 0

    def enter(self) -> None:
        with self._condition:
            while self._forking:
                self._condition.wait()
            self._using += 1

    def leave(self) -> None:
        with self._condition:
            self._using -= 1
            if self._forking:
                self._condition.notify_all()

    def shut(self) -> None:
        with self._condition:
            self._forking += 1
            while True:
                # One of these may hold the lock of a file, for which somebody waits who uses another.
                for connection in _forkable_ones():
                    connection.close_unless_in_use()
                if not self._using:
                    return
                self._condition.wait()

    def open(self) -> None:
        with self._condition:
            self._forking -= 1
            self._condition.notify_all()


class ForkedError(sqlite3.OperationalError):
    """The process was forked; a transaction that was open has lost, as if others had been at it."""

    def __init__(self) -> None:
        super().__init__("the process was forked, which ends every transaction")
        self.sqlite_errorcode = sqlite3.SQLITE_BUSY
        self.sqlite_errorname = "SQLITE_BUSY"


class ForkableConnection(sqlite3.Connection):
    """A connection of the driver's own kind that may be closed between any two calls, since the process is forked.

    Raises:
        ForkedError: that has happened.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._calling = threading.Lock()
        self._closed = False
        self._lost = False
        """Whether it was closed by a fork."""
        self._cursors: WeakSet[_ForkableCursor] = WeakSet()
        # Closed by the thread that forks; SQLite itself does not mind which thread that is.
        with using():
            super().__init__(*args, **kwargs | {"check_same_thread": False})
            with _registering:
                _forkable.add(self)

    def close_unless_in_use(self) -> None:
        """Take a transaction back and close the connection, unless somebody is in the middle of a call."""
        if self._calling.acquire(blocking=False):
            try:
                if self._closed:
                    return
                self._closed = self._lost = True
                # As long as one of them has a statement, SQLite would only seem to close the connection.
                for cursor in list(self._cursors):
                    cursor.let_go()
                super().close()
            finally:
                self._calling.release()

    @contextmanager
    def in_use(self, *, ends: bool = False) -> Generator[bool]:
        """A call; while it lasts, the process is not forked. Whether the connection is still there.

        With `ends`, the call is one of which a connection that was closed has no more need.
        """
        with using(), self._calling:
            if self._lost and not ends:
                raise ForkedError
            yield not self._lost

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "isolation_level":
            super().__setattr__(name, value)
            return
        with self.in_use():  # setting it ends a transaction
            super().__setattr__(name, value)

    @override
    def create_function(self, *args: Any, **kwargs: Any) -> None:
        with self.in_use():
            super().create_function(*args, **kwargs)

    @override
    def cursor(self, factory: Any = None) -> Any:
        with self.in_use():
            cursor = super().cursor(_ForkableCursor)
            self._cursors.add(cursor)
            return cursor

    @override
    def commit(self) -> None:
        with self.in_use():
            super().commit()

    @override
    def rollback(self) -> None:
        with self.in_use(ends=True) as is_open:
            if is_open:
                super().rollback()

    @override
    def close(self) -> None:
        with self.in_use(ends=True):
            self._closed = True
            super().close()


class _ForkableCursor(sqlite3.Cursor):
    @property
    @override
    def connection(self) -> ForkableConnection:
        return cast(ForkableConnection, super().connection)

    def let_go(self) -> None:
        super().close()

    @override
    def execute(self, *args: Any) -> Any:
        with self.connection.in_use():
            return super().execute(*args)

    @override
    def executemany(self, *args: Any) -> Any:
        with self.connection.in_use():
            return super().executemany(*args)

    @override
    def fetchone(self) -> Any:
        with self.connection.in_use():
            return super().fetchone()

    @override
    def fetchmany(self, *args: Any, **kwargs: Any) -> Any:
        with self.connection.in_use():
            return super().fetchmany(*args, **kwargs)

    @override
    def fetchall(self) -> Any:
        with self.connection.in_use():
            return super().fetchall()

    @override
    def close(self) -> None:
        with self.connection.in_use(ends=True) as is_open:
            if is_open:
                super().close()


_gate = _Gate()
_registered: WeakSet[Closable] = WeakSet()
_forkable: WeakSet[ForkableConnection] = WeakSet()
_registering: Final = threading.Lock()


def _forkable_ones() -> Iterable[ForkableConnection]:
    with _registering:
        return list(_forkable)


def register(holder: Closable) -> None:
    """Have a connection closed before the process is forked; it is used in `using` only."""
    with _registering:
        _registered.add(holder)


@contextmanager
def using() -> Generator[None]:
    """A block that uses a connection: while it lasts, the process is not forked, and while that lasts, it waits."""
    gate = _gate
    gate.enter()
    try:
        yield
    finally:
        gate.leave()


def _before() -> None:
    _gate.shut()
    _registering.acquire()
    for holder in _registered:
        holder.close_now()


def _after_in_parent() -> None:
    _registering.release()
    _gate.open()


def _after_in_child() -> None:
    global _gate
    # The threads that waited at it are not in this process.
    _gate = _Gate()
    _registered.clear()
    _forkable.clear()
    _registering.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
