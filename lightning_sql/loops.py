"""What a process has for each of its event loops, and for no other process: engines, and what stands on them."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar, cast
from weakref import WeakSet

__all__ = ["PerLoop", "keep_for_ever"]

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One of something for each event loop, made when it is first asked for.

    What an event loop left behind that was closed is let go when another one asks. A forked process begins with
    nothing.

    Args:
        make: makes one for the running event loop.
        close: what to do before the running event loop is closed, where that is done properly, as `asyncio.run` does.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._found: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None] | None]] = {}
        _all.add(self)

    def here(self) -> T:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._found.get(loop)
        if found is not None:
            return found[0]
        for other in list(self._found):
            if other.is_closed():
                self._found.pop(other, None)
        made = self._make()
        self._found[loop] = made, None if self._close is None else _begun(self._closing(self._close))
        return made

    def get(self) -> T | None:
        """That of the running event loop, if it was made."""
        found = self._found.get(asyncio.get_running_loop())
        return None if found is None else found[0]

    async def forget(self) -> None:
        """Let go of that of the running event loop; the next who asks gets a new one."""
        _, closing = self._found.pop(asyncio.get_running_loop(), (None, None))
        # Not from within itself: then it is what closes this.
        if closing is not None and not cast(Any, closing).ag_running:
            await closing.aclose()

    async def _closing(self, close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if asyncio.get_running_loop() in self._found:
                await close()

    def leave_inherited(self) -> None:
        """Begin anew in a forked process."""
        inherited, self._found = self._found, {}
        if inherited:
            keep_for_ever(inherited)


def _begun(generator: AsyncGenerator[None]) -> AsyncGenerator[None]:
    """An asynchronous generator at its first `yield`, where the event loop knows of it and will finish it."""
    try:
        generator.__anext__().__await__().send(None)
    except StopIteration:
        return generator
    raise AssertionError("the generator waits before it yields")


_all: WeakSet[PerLoop[Any]] = WeakSet()


def keep_for_ever(inherited: object) -> None:
    """Let nothing of this be tidied up, not even when the interpreter ends.

    Its connections are those of the process that was forked. Who closes one takes its file out of what both processes'
    event loops look at, and the other one waits for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _leave_inherited() -> None:
    for per_loop in list(_all):
        per_loop.leave_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_inherited)
