"""The store itself, without a server: records in, records out."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from bench.drivers import raw
from bench.drivers.calls import NotAvailableError
from bench.drivers.meter import Meter, closed_loop
from bench.payloads import rollout_input, span
from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, Span
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore


@asynccontextmanager
async def _store(database_url: str, *, join: bool, partition: str) -> AsyncIterator[LightningStore]:
    if "join" not in inspect.signature(open_store).parameters:
        raise NotAvailableError("this release's open_store() has no `join`")
    opening: Any = open_store
    async with await opening(database_url, partition=partition, join=join) as store:
        yield store


async def _enqueue(store: LightningStore, database_url: str, count: int) -> None:
    """Queue so many rollouts, and let the database know how many there are, as it does after a while by itself."""
    requests = [EnqueueRolloutRequest(input=rollout_input())] * count
    for first in range(0, count, 1000):
        await store.enqueue_many_rollouts(requests[first : first + 1000])
    await raw.analyze(database_url)


async def claims(database_url: str, meter: Meter, *, coroutines: int, count: int, join: bool, limit: int = 1) -> None:
    """Claim `count` queued rollouts, `limit` at a time, from so many coroutines."""
    async with _store(database_url, join=join, partition=uuid.uuid4().hex) as store:
        await _enqueue(store, database_url, count)
        # Only what is checked is kept: a heap that grows is what a garbage collector is slow at.
        found: set[str] = set()
        wrong = 0
        latencies: list[float] = []

        async def claim(worker: int) -> None:
            call: Awaitable[Sequence[AttemptedRollout] | AttemptedRollout | None]
            if limit == 1:
                call = store.dequeue_rollout(f"worker-{worker}")
            else:
                call = store.dequeue_many_rollouts(limit=limit, worker_id=f"worker-{worker}")
            answer = await meter.timed(call, latencies) or []
            for rollout in [answer] if isinstance(answer, AttemptedRollout) else answer:
                nonlocal wrong
                wrong += (
                    rollout.status != "preparing" or rollout.attempt.sequence_id != 1 or rollout.rollout_id in found
                )
                found.add(rollout.rollout_id)

        calls = [partial(claim, number % coroutines) for number in range(count // limit)]
        meter.record("claim", latencies, await closed_loop(coroutines, calls), each=limit)
        meter.check(len(found) == count, f"{count} claims brought {len(found)} different rollouts")
        meter.check(not wrong, f"{wrong} rollouts came twice, or are not preparing with their first attempt")


async def raw_claims(database_url: str, meter: Meter, *, connections: int, count: int) -> None:
    """The same claims by one hand-written statement each, records left out."""
    partition = uuid.uuid4().hex
    async with _store(database_url, join=True, partition=partition) as store:
        await _enqueue(store, database_url, count)
        await raw.claims(database_url, meter, partition, connections=connections, count=count)
        meter.check(await store.dequeue_rollout() is None, "rollouts are left in the queue")


async def operations(database_url: str, meter: Meter, *, coroutines: int, count: int, join: bool) -> None:
    """Each hot operation so many times from so many coroutines."""
    async with _store(database_url, join=join, partition=uuid.uuid4().hex) as store:

        async def each(name: str, calls: Sequence[Callable[[], Awaitable[Any]]], check: Callable[[Any], bool]) -> None:
            latencies: list[float] = []
            wrong = 0

            async def one(call: Callable[[], Awaitable[Any]]) -> None:
                nonlocal wrong
                wrong += not check(await meter.timed(call(), latencies))

            seconds = await closed_loop(coroutines, [partial(one, call) for call in calls])
            meter.record(name, latencies, seconds)
            meter.check(not wrong, f"{name}: {wrong} answers are not what they should be")

        # Only what is needed again is kept: a heap that grows is what a garbage collector is slow at.
        claimed: dict[str, str] = {}

        def is_new(rollout: AttemptedRollout | None) -> bool:
            if rollout is None or rollout.rollout_id in claimed:
                return False
            claimed[rollout.rollout_id] = rollout.attempt.attempt_id
            return True

        await each(
            "enqueue", [partial(store.enqueue_rollout, rollout_input())] * count, lambda answer: answer is not None
        )
        workers = [f"worker-{number % coroutines}" for number in range(count)]
        await each("dequeue", [partial(store.dequeue_rollout, worker) for worker in workers], is_new)
        records = [Span.model_validate(span(*key, 1)) for key in claimed.items()]
        await each("span", [partial(store.add_span, record) for record in records], lambda answer: answer is not None)
        await each(
            "update",
            [partial(store.update_attempt, *key, status="succeeded") for key in claimed.items()],
            lambda attempt: attempt is not None and attempt.status == "succeeded",
        )


JOBS: Final[dict[str, Callable[..., Awaitable[None]]]] = {
    "claims": claims,
    "raw_claims": raw_claims,
    "operations": operations,
    "commits": raw.commits,
    "raw_spans": raw.spans,
}
