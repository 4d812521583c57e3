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
        claimed: list[AttemptedRollout] = []
        latencies: list[float] = []

        async def claim(worker: int) -> None:
            call: Awaitable[Sequence[AttemptedRollout] | AttemptedRollout | None]
            if limit == 1:
                call = store.dequeue_rollout(f"worker-{worker}")
            else:
                call = store.dequeue_many_rollouts(limit=limit, worker_id=f"worker-{worker}")
            answer = await meter.timed(call, latencies)
            if isinstance(answer, AttemptedRollout):
                claimed.append(answer)
            elif answer:
                claimed.extend(answer)

        calls = [partial(claim, number % coroutines) for number in range(count // limit)]
        meter.record("claim", latencies, await closed_loop(coroutines, calls), each=limit)
        found = len({rollout.rollout_id for rollout in claimed})
        meter.check(found == len(claimed) == count, f"{count} claims brought {found} different rollouts")
        meter.check(
            all(rollout.status == "preparing" and rollout.attempt.sequence_id == 1 for rollout in claimed),
            "a claimed rollout is not preparing with its first attempt",
        )


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

        async def each(name: str, calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
            latencies: list[float] = []
            answers: list[Any] = []

            async def one(call: Callable[[], Awaitable[Any]]) -> None:
                answers.append(await meter.timed(call(), latencies))

            seconds = await closed_loop(coroutines, [partial(one, call) for call in calls])
            meter.record(name, latencies, seconds)
            meter.check(all(answer is not None for answer in answers), f"{name}: an answer is None")
            return [answer for answer in answers if answer is not None]

        await each("enqueue", [partial(store.enqueue_rollout, rollout_input())] * count)
        workers = [f"worker-{number % coroutines}" for number in range(count)]
        claimed = await each("dequeue", [partial(store.dequeue_rollout, worker) for worker in workers])
        meter.check(len({rollout.rollout_id for rollout in claimed}) == count, "a rollout was claimed twice")
        keys = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in claimed]
        records = [Span.model_validate(span(*key, 1)) for key in keys]
        await each("span", [partial(store.add_span, record) for record in records])
        ended = await each("update", [partial(store.update_attempt, *key, status="succeeded") for key in keys])
        meter.check(all(attempt.status == "succeeded" for attempt in ended), "an attempt did not end as succeeded")


JOBS: Final[dict[str, Callable[..., Awaitable[None]]]] = {
    "claims": claims,
    "raw_claims": raw_claims,
    "operations": operations,
    "commits": raw.commits,
    "raw_spans": raw.spans,
}
