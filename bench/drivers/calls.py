"""The calls that every driver can make, each of which checks its own answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CallFailedError(Exception):
    """A call was refused, or its answer is not what it must be."""


class NotAvailableError(Exception):
    """The server does not know the route, or this installation not the feature."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that was claimed, and the attempt that came with it."""

    rollout_id: str
    attempt_id: str


class Calls(Protocol):
    """A client of a store. Every method raises `CallFailedError` when the answer is wrong."""

    async def enqueue(self, count: int = 1) -> list[str]:
        """Enqueue rollouts; returns their ids."""
        ...

    async def dequeue(self, worker_id: str, limit: int = 1) -> list[Claim]:
        """Claim up to so many rollouts."""
        ...

    async def next_id(self, claim: Claim) -> int:
        """The next sequence id of a rollout."""
        ...

    async def add_span(self, claim: Claim, number: int) -> None:
        """Add a span that is not there yet."""
        ...

    async def add_many_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        """Add spans in whatever way this client has for many, one request each if it must."""
        ...

    async def prepare_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        """Add spans in the fastest way that the server knows: they are only there to be read."""
        ...

    async def finish(self, claim: Claim) -> None:
        """End the attempt as succeeded."""
        ...

    async def wait(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        """The status of each of the rollouts that is finished, without waiting."""
        ...

    async def page(self, status: str, limit: int) -> tuple[int, int]:
        """The newest rollouts of a status: how many are on the page, and how many there are."""
        ...

    async def spans(self, rollout_id: str) -> int:
        """Read all spans of a rollout; returns how many."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class OwnCalls(Calls, Protocol):
    """What only a server of ours knows. Raises `NotAvailableError` when it does not."""

    async def bulk(self, claim: Claim, numbers: Sequence[int], size: int, *, lines: bool) -> None:
        """Add spans in one request, as one document or as a line each."""
        ...

    async def plain_page(self, status: str, limit: int) -> int:
        """The newest rollouts of a status, without the total: how many are on the page."""
        ...
