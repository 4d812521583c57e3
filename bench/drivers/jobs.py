"""The jobs that measure a server through its clients. Each checks what it did once the clock has stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from bench.drivers.calls import Calls, Claim, OwnCalls
from bench.drivers.meter import FAILURES, Meter, closed_loop
from bench.payloads import LARGE_SPAN_BYTES, SPAN_BYTES

SPANS_PER_CYCLE: Final = 8
REQUESTS_PER_CYCLE: Final = SPANS_PER_CYCLE + 3
WAITED: Final = 100
"""How many rollouts one look-up asks for, and how many ids a check asks for at once."""


async def cycle(calls: Calls, meter: Meter, *, runners: int, seconds: float) -> None:
    """Runners that enqueue a rollout, claim one, add its spans and end it, over and over, for so many seconds.

    The rate counts the requests that were answered within that time, so that it does not depend on how
    far the runners were when it ended; they finish what they have before the checks.
    """
    claims: list[Claim] = []
    cycles: list[float] = []
    answered = 0
    deadline = 0.0

    async def once(worker: str) -> None:
        nonlocal answered

        async def step(call: Awaitable[Any]) -> Any:
            nonlocal answered
            answer = await call
            answered += time.perf_counter() <= deadline
            meter.calls += 1
            return answer

        await step(calls.enqueue())
        claimed = await step(calls.dequeue(worker))
        if len(claimed) != 1:
            meter.fail(f"{worker} claimed {len(claimed)} rollouts although there was one for it")
            return
        claims.append(claimed[0])
        for number in range(1, SPANS_PER_CYCLE + 1):
            await step(calls.add_span(claimed[0], number))
        await step(calls.finish(claimed[0]))

    async def runner(number: int) -> None:
        ended = 0.0
        while ended < deadline:
            started = time.perf_counter()
            try:
                await once(f"worker-{number}")
            except FAILURES as error:
                meter.fail(f"{type(error).__name__}: {error}")
            ended = time.perf_counter()
            cycles.append(ended - started)

    with meter.cpu() as used:
        deadline = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(runners):
                group.create_task(runner(number))
    meter.record("cycle", cycles, seconds)
    meter.values["cycle.rate"] = answered / REQUESTS_PER_CYCLE / seconds
    meter.record_cpu("cycle", used, len(cycles))
    await _check_finished(calls, meter, claims)
    for claim in claims[:: max(len(claims) // 3, 1)]:
        found = await calls.spans(claim.rollout_id)
        meter.check(found == SPANS_PER_CYCLE, f"{claim} has {found} spans")


async def singles(
    calls: Calls, meter: Meter, *, clients: int, count: int, waits: int = 0, only_claims: bool = False
) -> None:
    """Each operation on its own: so many times by so many clients, each time on the rollouts of the time before."""
    if only_claims:
        enqueued = await calls.enqueue(count)
    else:
        enqueued = [ids[0] for ids in await _each(meter, "enqueue", clients, [calls.enqueue] * count)]
    meter.check(len(set(enqueued)) == count, f"{len(set(enqueued))} different ids for {count} rollouts")
    claim_calls = [partial(calls.dequeue, f"worker-{number % clients}") for number in range(count)]
    claimed = await _each(meter, "dequeue", clients, claim_calls)
    claims = [claim for batch in claimed for claim in batch]
    meter.check(len(claims) == count, f"{count} claims brought {len(claims)} rollouts")
    if not only_claims:
        numbers = await _each(meter, "next", clients, [partial(calls.next_id, claim) for claim in claims])
        meter.check(set(numbers) == {1}, "the first sequence id of a rollout is not 1")
        await _each(meter, "span", clients, [partial(calls.add_span, claim, 2) for claim in claims])
    await _each(meter, "update", clients, [partial(calls.finish, claim) for claim in claims])
    await _check_finished(calls, meter, claims)
    if waits:
        asked = [claim.rollout_id for claim in claims[:WAITED]]
        for finished in await _each(meter, "wait", 1, [partial(calls.wait, asked)] * waits):
            meter.check(len(finished) == len(asked), f"{len(finished)} of {len(asked)} rollouts are finished")


async def many_spans(
    calls: Calls, meter: Meter, *, clients: int, requests: int, spans: int = 100, form: str = "own"
) -> None:
    """Batches of spans: `own` is the client's own way for many, `json` and `lines` are our bulk route."""
    claims = await _claims(calls, clients)

    async def add(claim: Claim, batch: int) -> None:
        numbers = range(batch * spans + 1, (batch + 1) * spans + 1)
        if form == "own":
            await calls.add_many_spans(claim, numbers, SPAN_BYTES)
        else:
            await _own(calls).bulk(claim, numbers, SPAN_BYTES, lines=form == "lines")

    async def client(claim: Claim) -> None:
        for batch in range(requests):
            await meter.timed(add(claim, batch), latencies)

    latencies: list[float] = []
    started = time.perf_counter()
    with meter.cpu() as used:
        async with asyncio.TaskGroup() as group:
            for claim in claims:
                group.create_task(client(claim))
    meter.record("spans", latencies, time.perf_counter() - started, each=spans)
    meter.record_cpu("spans", used, len(latencies))
    for claim in claims:
        found = await calls.spans(claim.rollout_id)
        meter.check(found == requests * spans, f"{claim} has {found} of {requests * spans} spans")
        await calls.finish(claim)


async def page(calls: Calls, meter: Meter, *, requests: int, at_least: int = 100, total: bool = True) -> None:
    """The newest hundred of the succeeded rollouts, of which there are at least so many, by one client."""
    read: Callable[[], Awaitable[Any]]
    read = partial(calls.page, "succeeded", 100) if total else partial(_own(calls).plain_page, "succeeded", 100)
    await read()
    for answer in await _each(meter, "page", 1, [read] * requests):
        rows, found = answer if total else (answer, at_least)
        meter.check(rows == 100 and found >= at_least, f"a page of {rows}, of {found} where there are {at_least}")


async def read_spans(calls: Calls, meter: Meter, *, requests: int, spans: int = 1000) -> None:
    """All the spans of a rollout in one answer, by one client."""
    [claim] = await _claims(calls, 1)
    await calls.prepare_spans(claim, range(1, spans + 1), LARGE_SPAN_BYTES)
    await calls.finish(claim)
    await calls.spans(claim.rollout_id)
    for found in await _each(meter, "read", 1, [partial(calls.spans, claim.rollout_id)] * requests, each=spans):
        meter.check(found == spans, f"{found} of {spans} spans came back")


async def warm_up(calls: Calls, meter: Meter, *, runners: int = 16, seconds: float = 1.0) -> None:
    """What a server does before it is measured: some cycles, from several connections at once."""
    await cycle(calls, meter, runners=runners, seconds=seconds)
    meter.values.clear()


async def _each(
    meter: Meter, name: str, clients: int, calls: Sequence[Callable[[], Awaitable[Any]]], each: int = 1
) -> list[Any]:
    """Make the calls with so many clients and record them; returns the answers of those that succeeded."""
    latencies: list[float] = []
    answers: list[Any] = []

    async def one(call: Callable[[], Awaitable[Any]]) -> None:
        if (answer := await meter.timed(call(), latencies)) is not None:
            answers.append(answer)

    seconds = await closed_loop(clients, [partial(one, call) for call in calls])
    meter.record(name, latencies, seconds, each)
    return answers


async def _claims(calls: Calls, count: int) -> list[Claim]:
    await calls.enqueue(count)
    return await calls.dequeue("worker-many", count)


async def _check_finished(calls: Calls, meter: Meter, claims: Sequence[Claim]) -> None:
    """That nothing was claimed twice, and that all of it ended as it was told to."""
    ids = [claim.rollout_id for claim in claims]
    meter.check(len(set(ids)) == len(ids), f"{len(ids) - len(set(ids))} rollouts were claimed twice")
    for first in range(0, len(ids), WAITED):
        asked = ids[first : first + WAITED]
        found = await calls.wait(asked)
        wrong = [rollout_id for rollout_id in asked if found.get(rollout_id) != "succeeded"]
        meter.check(not wrong, f"{len(wrong)} rollouts did not end as succeeded, {wrong[:3]} among them")


def _own(calls: Any) -> OwnCalls:
    return calls


JOBS: Final[dict[str, Callable[..., Awaitable[None]]]] = {
    "cycle": cycle,
    "singles": singles,
    "many_spans": many_spans,
    "page": page,
    "read_spans": read_spans,
    "warm_up": warm_up,
}
