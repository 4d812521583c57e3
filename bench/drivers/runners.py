"""A process with many runners: `python -m bench.drivers.runners`.

It reads its job as a line of JSON and says `ready`; the line `go` starts the runners, and `stop`, `stop now` or the end
of standard input ends them: each finishes the rollout that it has, unless it is to stop now. Then it says what they
did, as a line of JSON.

A runner makes the requests of upstream's `LitAgentRunner`, in the same order and number (see docs/benchmarks.md): it
claims a rollout, reads its resources, sends its spans as they end, and ends the attempt; a heartbeat goes out every ten
seconds beside that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, Self

import uvloop

from bench.drivers.rollouts import Requests, RolloutCalls, TurnedAwayError, Work, pause_after
from bench.families import Tally
from bench.presets import Exporter
from bench.traces import Trace, prepare, steps_of

GO: Final = "go"
STOP: Final = "stop"
STOP_NOW: Final = "stop now"

HEARTBEAT_SECONDS: Final = 10.0
JITTER_SECONDS: Final = 0.5
"""By how much a heartbeat comes earlier or later."""
POLL_JITTER: Final = 0.1
"""By which share of it a poll does."""
EXPORT_SECONDS: Final = 1.0
"""How often the exporter that sends spans together looks for any."""
FINISH_SECONDS: Final = 60.0
"""How long runners may take to finish what they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process of runners does.

    Attributes:
        first: the number of its first runner; they are unique among all processes.
        runners: how many it has.
        run: what the inputs of the algorithm's tasks begin with.
        poll_seconds: how long a runner waits after it found the queue empty.
    """

    base_url: str
    first: int
    runners: int
    run: str
    max_rounds: int
    sleep_seconds: float
    poll_seconds: float
    exporter: Exporter

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """What another process has written of one."""
        return cls(**given)


class Crew:
    """The runners of this process."""

    def __init__(self, job: Job, calls: RolloutCalls) -> None:
        self._job = job
        self._calls = calls
        self._stopping = asyncio.Event()
        self._patience = FINISH_SECONDS
        self._draw = Random(job.first)
        self.requests = Requests()
        self.rollouts = Tally()

    def stop(self, *, now: bool) -> None:
        """Have the runners end, once they have finished what they have unless it is to be now."""
        self._patience = 0.0 if now else FINISH_SECONDS
        self._stopping.set()

    async def run(self) -> None:
        """Run all runners until they are stopped."""
        numbers = range(self._job.first, self._job.first + self._job.runners)
        async with asyncio.TaskGroup() as group:
            runners = [group.create_task(self._runner(f"Worker-{number}")) for number in numbers]
            await self._stopping.wait()
            _, late = await asyncio.wait(runners, timeout=self._patience)
            for runner in late:
                runner.cancel()

    async def _runner(self, worker_id: str) -> None:
        beating = asyncio.create_task(self._heartbeats(worker_id))
        try:
            # They do not begin in step: each has been polling before the first rollout came.
            await self._pause(self._draw.uniform(0, self._job.poll_seconds))
            claim = partial(self._calls.claim, worker_id)
            refused = 0
            while not self._stopping.is_set():
                try:
                    work = await self.requests.make_once("dequeue", claim, kind_of=_claim_kind)
                except TurnedAwayError as error:
                    await self._pause(pause_after(error, refused))
                    refused += 1
                    continue
                refused = 0
                if work is None:
                    spread = self._job.poll_seconds * POLL_JITTER
                    await self._pause(self._job.poll_seconds + self._draw.uniform(-spread, spread))
                else:
                    await self._work(work)
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _heartbeats(self, worker_id: str) -> None:
        # The first one upstream's runner sends an interval after it has begun, when there is a snapshot to send.
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS + self._draw.uniform(-JITTER_SECONDS, JITTER_SECONDS))
            await self.requests.make("heartbeat", partial(self._calls.heartbeat, worker_id))

    async def _work(self, work: Work) -> None:
        started = time.perf_counter()
        number = self._task_of(work)
        if number is None:
            self.rollouts.fail(f"claimed a rollout that is not of this run: {work.rollout_id}")
            return
        make, calls, job = self.requests.make, self._calls, self._job
        await make("resources", partial(calls.resources, work.resources_id))
        trace = Trace(work.rollout_id, work.attempt.attempt_id, number, work.input)
        exporter = _Exporter(trace, self.requests, calls)
        async with contextlib.AsyncExitStack() as stack:
            if job.exporter == "batch":
                await stack.enter_async_context(exporter.every(EXPORT_SECONDS))
            for index, step in enumerate(steps_of(number, job.max_rounds, job.sleep_seconds)):
                begun = time.time()
                if step.sleep:
                    await asyncio.sleep(step.sleep)
                exporter.add(trace.span(index, step, begun, time.time()))
                if job.exporter == "simple":
                    await exporter.flush()
        await make("update", partial(calls.finish, work.claim))
        self.rollouts.succeed(time.perf_counter() - started)

    def _task_of(self, work: Work) -> int | None:
        if not isinstance(work.input, str):
            return None
        run, _, number = work.input.rpartition(" ")
        return int(number) if run == self._job.run and number.isdecimal() else None


class _Exporter:
    """Sends the spans of a rollout."""

    def __init__(self, trace: Trace, requests: Requests, calls: RolloutCalls) -> None:
        self._trace = trace
        self._requests = requests
        self._calls = calls
        self._ended: list[bytes] = []
        self._sending = asyncio.Lock()

    def add(self, span: bytes) -> None:
        """Have a span sent with the next flush."""
        self._ended.append(span)

    async def flush(self) -> None:
        """Return when all spans have been sent."""
        async with self._sending:
            spans, self._ended = self._ended, []
            if spans:
                body = self._trace.export(spans)
                await self._requests.make("spans", partial(self._calls.export, body))

    @contextlib.asynccontextmanager
    async def every(self, seconds: float) -> AsyncIterator[None]:
        """Flush every so many seconds while the block runs, and at its end."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                # Not to be cut short by the end of the block, which waits for it.
                await asyncio.shield(self.flush())

        flushing = asyncio.create_task(repeat())
        try:
            yield
        finally:
            flushing.cancel()
            await self.flush()


def _claim_kind(work: Work | None) -> str:
    """How often runners find the queue empty says nothing of the store, so that it is a kind of its own."""
    return "dequeue-empty" if work is None else "dequeue"


async def serve() -> None:
    """Do the job that standard input says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints must not get among the answers

    def say(what: str) -> None:
        answers.write(f"{what}\n")
        answers.flush()

    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    job = Job.from_json(json.loads(await lines.readline()))
    prepare()
    calls = RolloutCalls(job.base_url)
    try:
        crew = Crew(job, calls)
        say("ready")
        if (await lines.readline()).decode().strip() != GO:
            return
        used = time.process_time()
        stop = loop.create_task(lines.readline())
        stop.add_done_callback(lambda line: crew.stop(now=line.result().decode().strip() != STOP))
        await crew.run()
        done = {
            "rollouts": crew.rollouts.as_json(),
            "requests": crew.requests.as_json(),
            "cpu": time.process_time() - used,
        }
        say(json.dumps(done))
    finally:
        await calls.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
