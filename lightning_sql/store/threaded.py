"""A store that belongs to one event loop, for any number of threads."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from abc import update_abstractmethods
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar

from typing_extensions import override

from lightning_sql.errors import LightningError
from lightning_sql.loops import keep_for_ever
from lightning_sql.store.interface import LightningStore, StoreCapabilities

__all__ = ["ThreadedStore", "threaded"]

_CLOSED: Final = "the store was closed before this was done"

S = TypeVar("S", bound=type[LightningStore])


class _Home:
    """A thread with an event loop, which is all that happens there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="lightning-sql store", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            # Nobody shall wait for what is left.
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def stop(self) -> None:
        """Let the thread end."""
        if self.pid == os.getpid() and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)

    def end(self) -> None:
        """Let the thread end, and return when it has."""
        self.stop()
        self._thread.join()


def _forwarding(store: S) -> S:
    """Let every method that a store has not of its own be that of the store in the thread."""
    for name, member in vars(LightningStore).items():
        if iscoroutinefunction(member) and not name.startswith("_") and name not in vars(store):
            setattr(store, name, _forwarded(name, member))
    return update_abstractmethods(store)


def _forwarded(name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def call(self: ThreadedStore, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *args, **kwargs)

    vars(call).pop("__isabstractmethod__", None)
    return call


@_forwarding
class ThreadedStore(LightningStore):
    """All calls go to one thread, in which a store of its own answers them.

    Args:
        make: makes that store; it must not need a running event loop.
        forks: whether a forked process may use it too, in a thread of its own.
    """

    def __init__(self, make: Callable[[], LightningStore], *, forks: bool = False) -> None:
        self._forks = forks
        self._pid = os.getpid()
        self._store = make()
        self.recorder = self._store.recorder
        self._home: _Home | None = None
        self._starting = threading.Lock()
        _all.add(self)

    def leave_inherited(self) -> None:
        """Begin anew in a forked process."""
        self._starting = threading.Lock()  # the thread that held it is not in this process
        inherited, self._home = self._home, None
        if inherited is not None:
            keep_for_ever(inherited)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the store in the thread gives.

        Raises:
            LightningError: the process was forked; what is in memory is in the other one. Or the store was closed
                meanwhile.
        """
        called = self._called(name, *args, **kwargs)
        try:
            return await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if called.cancelled() and not (task is not None and task.cancelling()):
                raise LightningError(_CLOSED) from None
            raise

    def call_blocking(self, seconds: float, name: str, *args: Any, **kwargs: Any) -> Any:
        """As `call`, for a thread without an event loop.

        Raises:
            TimeoutError: it took longer than so many seconds, and is given up.
            LightningError: as `call` does.
        """
        called = self._called(name, *args, **kwargs)
        try:
            return called.result(seconds)
        except CancelledError:
            raise LightningError(_CLOSED) from None
        finally:
            called.cancel()

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._starting:
            loop = self._started().loop
            return asyncio.run_coroutine_threadsafe(getattr(self._store, name)(*args, **kwargs), loop)

    def _started(self) -> _Home:
        if self._pid != os.getpid() and not self._forks:
            raise LightningError("this store is in the memory of the process that this one was forked from")
        if self._home is None:
            self._home = _Home()
            weakref.finalize(self, self._home.stop).atexit = False
        return self._home

    @override
    async def close(self) -> None:
        home = self._taken_home()
        if home is not None:
            try:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._store.close(), home.loop))
            finally:
                home.end()

    def close_blocking(self, seconds: float) -> None:
        """As `close`, for a thread without an event loop."""
        home = self._taken_home()
        if home is not None:
            try:
                asyncio.run_coroutine_threadsafe(self._store.close(), home.loop).result(seconds)
            finally:
                home.end()

    def _taken_home(self) -> _Home | None:
        with self._starting:
            home, self._home = self._home, None
        return home

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {**self._store.capabilities, "thread_safe": True}


def threaded(make: Callable[[], LightningStore], *, forks: bool = False) -> ThreadedStore:
    """A `ThreadedStore`; its methods are made when it is declared, which a type checker cannot know."""
    return ThreadedStore(make, forks=forks)  # pyright: ignore[reportAbstractUsage]


_all: weakref.WeakSet[ThreadedStore] = weakref.WeakSet()


def _leave_inherited() -> None:
    for store in list(_all):
        store.leave_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_inherited)
