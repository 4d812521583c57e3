"""Undoing: every write says how it is taken back, so that a failure leaves no trace."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, Self, TypeVar

from pydantic import BaseModel

__all__ = ["Container", "Undo", "snapshot_of", "undone_on_error"]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
S = TypeVar("S")


Undo = Callable[[], None]


@contextmanager
def undone_on_error(journal: list[Undo]) -> Generator[None]:
    """Undo what the body added to the journal if it raises."""
    mark = len(journal)
    try:
        yield
    except BaseException:
        while len(journal) > mark:
            journal.pop()()
        raise


class Container(Generic[S]):
    """State that several views share: one outside any transaction, one for each open transaction."""

    _state: S
    _journal: list[Undo] | None
    _lock: asyncio.Lock

    def bound(self, journal: list[Undo]) -> Self:
        """The same state inside a transaction, which keeps the journal."""
        view = copy.copy(self)
        view._journal = journal
        return view

    @asynccontextmanager
    async def _writing(self) -> AsyncGenerator[list[Undo]]:
        if self._journal is not None:
            with undone_on_error(self._journal):
                yield self._journal
            return
        async with self._lock:
            journal: list[Undo] = []
            with undone_on_error(journal):
                yield journal


def snapshot_of(value: Q) -> Q:
    """A copy that does not change when the value does."""
    return value if isinstance(value, str | int | float | None) else copy.deepcopy(value)
