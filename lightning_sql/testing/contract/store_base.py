"""What the parts of the store's contract share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

import pytest

from lightning_sql.records import Attempt, AttemptedRollout, Rollout, RolloutConfig, Worker
from lightning_sql.store.interface import LightningStore

__all__ = [
    "PATIENCE",
    "Advance",
    "StoreFixtures",
    "attempt_of",
    "attempted",
    "contents",
    "drain",
    "inputs",
    "retrying",
    "rollout_of",
    "worker_of",
]

PATIENCE = 60.0
"""Seconds after which a call that should end counts as hung."""

Advance: TypeAlias = Callable[[float], Awaitable[None]]
"""Makes the store's time pass by at least so many seconds."""


@pytest.mark.asyncio
class StoreFixtures:
    """Needs the fixture `store`, an empty store that looks for overdue attempts before each call (debounce 0)."""

    @pytest.fixture
    def advance(self) -> Advance:
        """Real time; override it where the store can be given a clock."""
        return asyncio.sleep


def retrying(max_attempts: int = 3, **limits: float) -> RolloutConfig:
    """A config under which every way to lose is a reason to retry."""
    return RolloutConfig(max_attempts=max_attempts, retry_condition=["failed", "timeout", "unresponsive"], **limits)


def inputs(rollouts: Iterable[Rollout]) -> list[Any]:
    """The input of each rollout."""
    return [rollout.input for rollout in rollouts]


def attempted(rollout: Rollout | None) -> AttemptedRollout:
    """A rollout that must have been attempted."""
    assert isinstance(rollout, AttemptedRollout)
    return rollout


async def rollout_of(store: LightningStore, rollout_id: str) -> Rollout:
    """A rollout that must exist."""
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout


async def attempt_of(store: LightningStore, rollout_id: str, sequence_id: int = -1) -> Attempt:
    """An attempt that must exist: by its number, or the latest."""
    if sequence_id < 0:
        latest = await store.get_latest_attempt(rollout_id)
        assert latest is not None
        return latest
    [found] = [attempt for attempt in await store.query_attempts(rollout_id) if attempt.sequence_id == sequence_id]
    return found


async def worker_of(store: LightningStore, worker_id: str) -> Worker:
    """A worker that must exist."""
    worker = await store.get_worker_by_id(worker_id)
    assert worker is not None
    return worker


async def drain(store: LightningStore) -> list[AttemptedRollout]:
    """Claim one rollout after the other until the queue is empty."""
    claimed: list[AttemptedRollout] = []
    while (rollout := await store.dequeue_rollout()) is not None:
        claimed.append(rollout)
    return claimed


async def contents(store: LightningStore, *rollout_ids: str) -> dict[str, Sequence[Any]]:
    """Everything that a store says it has, with the attempts and spans of some rollouts; changes nothing."""
    return {
        "rollouts": (await store.query_rollouts()).items,
        "attempts": [item for id_ in rollout_ids for item in (await store.query_attempts(id_)).items],
        "spans": [item for id_ in rollout_ids for item in (await store.query_spans(id_)).items],
        "resources": (await store.query_resources()).items,
        "workers": (await store.query_workers()).items,
    }
