"""How a process that has SQLite files open can be forked.

SQLite remembers, for the whole process, which locks it holds on which files. A forked process would take its parent's
for its own, and what a thread was about to do to a file would stay half done there for ever. So before a fork every
connection is left alone and closed; in both processes they are opened again when they are needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["Closable", "register", "using"]


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
            if self._forking and not self._using:
                self._condition.notify_all()

    def shut(self) -> None:
        with self._condition:
            self._forking += 1
            while self._using:
                self._condition.wait()

    def open(self) -> None:
        with self._condition:
            self._forking -= 1
            self._condition.notify_all()


_gate = _Gate()
_registered: WeakSet[Closable] = WeakSet()
_registering: Final = threading.Lock()


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
    _registering.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
