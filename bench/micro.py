"""`python -m bench.micro`: one operation after the other against a server that runs already."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import rich_click as click
import uvloop

from bench import families
from bench.crew import Pace
from bench.drivers.calls import CallFailedError, Claim
from bench.drivers.meter import closed_loop
from bench.drivers.micro import MicroCalls
from bench.families import Bench, Result, Tally
from bench.processes import BenchError

ENQUEUED_AT_ONCE: Final = 500
LOOKED_UP_AT_ONCE: Final = 100

Step = Callable[[int, int], Awaitable[Any]]
"""One task, given its number and that of the client that does it."""


def worker_name(client: int) -> str:
    """The id of a client's worker, the same in every run: a server keeps all that it has heard of."""
    return f"bench-micro-{client}"


class Benchmark(ABC):
    """One benchmark: what is there before it, the task, and what must be true afterwards."""

    total_tasks = 10_000
    concurrency = 32

    def __init__(self, calls: MicroCalls) -> None:
        self.calls = calls
        self.extra: dict[str, Any] = {}

    async def prepare(self, total: int) -> None:  # noqa: B027 - most need nothing
        """Put in what the tasks need to find, which is not timed."""

    @abstractmethod
    async def step(self, number: int, client: int) -> Any:
        """Do one task."""

    async def check(self, tally: Tally) -> None:  # noqa: B027 - some leave nothing to look at
        """Count what is not as it must be, and leave the server as it was found."""


class Worker(Benchmark):
    """A worker's heartbeat."""

    def __init__(self, calls: MicroCalls) -> None:
        super().__init__(calls)
        self._sent: dict[int, int] = {}

    async def step(self, number: int, client: int) -> Any:
        self._sent[client] = number
        await self.calls.heartbeat(worker_name(client), number)

    async def check(self, tally: Tally) -> None:
        for client, number in self._sent.items():
            await _checked(tally, self.calls.worker(worker_name(client), number))


class DequeueEmpty(Benchmark):
    """A claim that finds nothing."""

    async def prepare(self, total: int) -> None:
        await _empty_queue(self.calls)

    async def step(self, number: int, client: int) -> Any:
        if claims := await self.calls.dequeue(worker_name(client)):
            raise CallFailedError(f"the queue was empty, and gave {claims}")


class Rollout(Benchmark):
    """A rollout's whole life without the queue: started, one span, its attempt ended."""

    def __init__(self, calls: MicroCalls) -> None:
        super().__init__(calls)
        self._claims: list[Claim] = []

    async def step(self, number: int, client: int) -> Any:
        claim = await self.calls.start()
        await self.calls.add_span(claim, 1)
        await self.calls.finish(claim)
        self._claims.append(claim)

    async def check(self, tally: Tally) -> None:
        await _check_finished(self.calls, tally, self._claims)


class Dequeue(Benchmark):
    """A claim, of which there are as many to be had as there are tasks."""

    finishes = False

    def __init__(self, calls: MicroCalls) -> None:
        super().__init__(calls)
        self._waiting: set[str] = set()
        self._claims: list[Claim] = []

    async def prepare(self, total: int) -> None:
        await _empty_queue(self.calls)
        for first in range(0, total, ENQUEUED_AT_ONCE):
            self._waiting.update(await self.calls.enqueue(min(ENQUEUED_AT_ONCE, total - first)))

    async def step(self, number: int, client: int) -> Any:
        [claim] = await self.calls.dequeue(worker_name(client)) or [None]
        if claim is None or claim.rollout_id not in self._waiting:
            raise CallFailedError(f"the queue gave {claim}, which is nothing that waits in it")
        self._waiting.remove(claim.rollout_id)
        self._claims.append(claim)
        if self.finishes:
            await self.calls.finish(claim)

    async def check(self, tally: Tally) -> None:
        unfinished = [] if self.finishes else self._claims
        if self._waiting:
            # Tasks failed: what they left in the queue would be in the way of the next run.
            unfinished = unfinished + await self._left(tally)
        ending = [partial(_finished, tally, self.calls, claim) for claim in unfinished]
        await closed_loop(self.concurrency, ending)
        await _check_finished(self.calls, tally, self._claims)

    async def _left(self, tally: Tally) -> list[Claim]:
        try:
            return await self.calls.dequeue(worker_name(0), len(self._waiting))
        except families.FAILURES as error:
            tally.fail(f"{type(error).__name__}: {error}")
            return []


class DequeueUpdateAttempt(Dequeue):
    """A claim and the end of its attempt."""

    finishes = True


class Metrics(Benchmark):
    """A scrape: all metrics of the server."""

    total_tasks = 100
    concurrency = 1

    async def prepare(self, total: int) -> None:
        body = await self.calls.scrape()
        series = sum(not line.startswith(b"#") for line in body.splitlines())
        self.extra |= {"bytes": len(body), "series": series}

    async def step(self, number: int, client: int) -> Any:
        await self.calls.scrape()


BENCHMARKS: Final[dict[str, type[Benchmark]]] = {
    "worker": Worker,
    "dequeue-empty": DequeueEmpty,
    "rollout": Rollout,
    "dequeue-update-attempt": DequeueUpdateAttempt,
    "dequeue-only": Dequeue,
    "metrics": Metrics,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    benchmark: str
    store_url: str
    total_tasks: int | None
    concurrency: int | None
    backend: str


@click.command(context_settings=families.CONTEXT)
@click.argument("benchmark", type=click.Choice(list(BENCHMARKS)))
@click.option("--store-url", required=True, metavar="URL", help="The server, http://127.0.0.1:4747 for example.")
@click.option("--total-tasks", type=click.IntRange(1), metavar="N", help="How many (10000; metrics: 100).")
@click.option("--concurrency", type=click.IntRange(1, 4096), metavar="N", help="How many at once (32; metrics: 1).")
@click.option("--backend", default="server", metavar="NAME", help="What to call the server's database (server).")
@families.summary_option
def main(summary_file: Path | None, **given: Any) -> int:
    """Make one kind of call over and over, and say how fast the server answers."""
    options = Options(**given)
    address = families.http_address("--store-url", options.store_url)
    bench = Bench("micro", summary_file)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return bench.finish([runner.run(run(options, address, bench))])


async def run(options: Options, address: str, bench: Bench) -> Result:
    """Measure one benchmark against the server at an address.

    Raises:
        BenchError: it cannot be done.
    """
    calls = MicroCalls(address)
    try:
        benchmark = BENCHMARKS[options.benchmark](calls)
        total = options.total_tasks or benchmark.total_tasks
        concurrency = min(options.concurrency or benchmark.concurrency, total)
        await calls.connect(concurrency)
        try:
            await benchmark.prepare(total)
        except families.FAILURES as error:
            raise BenchError(f"the server cannot be prepared for {options.benchmark}: {error}") from None
        with bench.progress(options.benchmark, total) as advance:
            tally, seconds = await _measured(benchmark, total, concurrency, advance)
        await benchmark.check(tally)
    finally:
        await calls.close()
    return Result(
        name=options.benchmark,
        parameters={"total_tasks": total, "concurrency": concurrency},
        backend=options.backend,
        tasks=total,
        seconds=seconds,
        tally=tally,
        extra={"concurrency": concurrency} | benchmark.extra,
    )


async def _measured(
    benchmark: Benchmark, total: int, concurrency: int, advance: Callable[[int], None]
) -> tuple[Tally, float]:
    """Do so many tasks with so many clients; what came of them, and the seconds that all took."""
    tally, pace, numbers = Tally(), Pace(advance), iter(range(total))

    async def client(place: int) -> None:
        for number in numbers:
            await tally.timed(benchmark.step(number, place))
            pace.step()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for place in range(concurrency):
            group.create_task(client(place))
    seconds = time.perf_counter() - started
    pace.flush()
    return tally, seconds


async def _empty_queue(calls: MicroCalls) -> None:
    """Make sure that nobody else's rollouts are claimed.

    Raises:
        BenchError: they would be.
    """
    if queued := await calls.queued():
        raise BenchError(f"{queued} rollouts wait in the queue of this server: they would be claimed")


async def _checked(tally: Tally, call: Awaitable[Any]) -> None:
    """Make a call that is no task but must succeed."""
    try:
        await call
    except families.FAILURES as error:
        tally.fail(f"{type(error).__name__}: {error}")


async def _finished(tally: Tally, calls: MicroCalls, claim: Claim) -> None:
    await _checked(tally, calls.finish(claim))


async def _check_finished(calls: MicroCalls, tally: Tally, claims: list[Claim]) -> None:
    """Take back the successes of rollouts that did not end as succeeded."""
    for first in range(0, len(claims), LOOKED_UP_AT_ONCE):
        asked = [claim.rollout_id for claim in claims[first : first + LOOKED_UP_AT_ONCE]]
        try:
            found = await calls.wait(asked)
        except families.FAILURES as error:
            tally.fail(f"{type(error).__name__}: {error}")
            continue
        wrong = [rollout_id for rollout_id in asked if found.get(rollout_id) != "succeeded"]
        tally.take_back(len(wrong), f"rollouts did not end as succeeded, {wrong[:3]} among them")


if __name__ == "__main__":
    families.launch(main, "bench.micro")
