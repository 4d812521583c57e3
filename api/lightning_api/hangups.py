"""Giving up what nobody waits for any more: a client that hung up takes its request back, if it was not sent yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_api.calls import Call

__all__ = ["LOOK_SECONDS", "Hangups"]

LOOK_SECONDS: Final = 0.5
"""How often it is looked for requests that take long. Of a shorter one nobody asks whether its client is there."""


class Hangups:
    """Cancels requests that take long when their clients hang up.

    A request costs an entry in a dictionary; somebody watches over it only if it is still there at the second look.
    """

    def __init__(self) -> None:
        self._open: dict[Call, asyncio.Task[object]] = {}
        self._before: frozenset[Call] = frozenset()
        self._watchers: dict[Call, asyncio.Task[None]] = {}
        self._left: set[Call] = set()

    def begin(self, call: Call, task: asyncio.Task[object]) -> None:
        """A request is worked on in this task."""
        self._open[call] = task

    def end(self, call: Call) -> None:
        """It no longer is."""
        del self._open[call]
        if self._watchers:
            watcher = self._watchers.pop(call, None)
            if watcher is not None:
                watcher.cancel()
                self._left.discard(call)

    def left(self, call: Call) -> bool:
        """Whether its task was cancelled from here."""
        return call in self._left

    async def look(self) -> None:
        """Look for requests that take long, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                for call in self._before.intersection(self._open) - self._watchers.keys():
                    if call.is_read:  # else the client is still sending
                        self._watchers[call] = asyncio.create_task(self._watch(call), name="lightning-sql hangup")
                self._before = frozenset(self._open)
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()

    async def _watch(self, call: Call) -> None:
        await call.client_gone()
        task = self._open.get(call)
        if task is not None:
            self._left.add(call)
            task.cancel()
