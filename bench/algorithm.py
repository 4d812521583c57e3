"""The algorithm of a workload: enqueues tasks, waits until they are finished, looks at what is stored of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import msgspec

from bench.drivers.rollouts import Requests, RolloutCalls, StoredSpan
from bench.families import Tally
from bench.presets import Workload
from bench.traces import LAST_REWARD, REWARD_ATTRIBUTE, REWARD_NAME, TASK_ATTRIBUTE, Step, span_id, steps_of

T = TypeVar("T")

ENQUEUED_AT_ONCE: Final = 1024
"""How many rollouts one request enqueues at most."""
LOOKED_AT: Final = 1024
"""How many ids one look asks for at most."""
LOOK_SECONDS: Final = 0.2
"""The shortest pause between two looks."""
LOOK_SHARE: Final = 5
"""How many times as long as the last look took the pause is, so that looking is no load of its own."""
LONGEST_PAUSE: Final = 5.0
FAILED_CALLS: Final = 20
"""Calls of the algorithm that failed, after which it gives up."""
CHECKS_AT_ONCE: Final = 16


def _batched(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


class GaveUpError(Exception):
    """The algorithm cannot go on; the message says why."""


class Algorithm:
    """Gets the tasks of a workload done, in its mode.

    Args:
        run: what the input of every task begins with.
        advance: told how many more are finished.
        stale_seconds: how long nothing at all may finish before what is unfinished counts as stale.

    Attributes:
        tasks: the number of each rollout's task, in the order in which they were enqueued.
        ended: the status with which each of those that are finished has ended.
    """

    def __init__(
        self, calls: RolloutCalls, workload: Workload, run: str, advance: Callable[[int], None], stale_seconds: float
    ) -> None:
        self._calls = calls
        self._workload = workload
        self._run = run
        self._advance = advance
        self._stale_seconds = stale_seconds
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()
        self.requests = Requests()
        self.tasks: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    @property
    def stale(self) -> list[str]:
        """The rollouts that are not finished."""
        return list(self._pending)

    async def run(self) -> None:
        """Enqueue all tasks and wait until they are finished.

        Raises:
            GaveUpError: nothing moved for too long, or the server cannot be used.
        """
        modes = {"batch": self._batches, "batch_partial": self._batches, "single": self._singles}
        working = asyncio.create_task(modes[self._workload.mode]())
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait([working, looking], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, looking):
                if task.done():
                    task.result()
        finally:
            for task in (working, looking):
                task.cancel()
            await asyncio.gather(working, looking, return_exceptions=True)

    async def _batches(self) -> None:
        size = self._workload.batch_size
        assert size is not None
        left = self._workload.remaining_tasks if self._workload.mode == "batch_partial" else 0
        for batch in _batched(range(self._workload.total_tasks), size):
            await self._until(left or 0)
            await self._add_resources()
            for part in _batched(batch, ENQUEUED_AT_ONCE):
                await self._enqueue(part)
        await self._until(0)

    async def _until(self, left: int) -> None:
        """Return when no more than so many are unfinished."""
        while len(self._pending) > left:
            self._moved.clear()
            await self._moved.wait()

    async def _singles(self) -> None:
        await self._add_resources()
        numbers = iter(range(self._workload.total_tasks))

        async def loop() -> None:
            for number in numbers:
                [finished] = await self._enqueue([number])
                await finished

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workload.concurrency or 1):
                    group.create_task(loop())
        except* GaveUpError as errors:
            raise errors.exceptions[0] from None

    async def _add_resources(self) -> None:
        if await self.requests.make("add-resources", self._calls.add_resources) is None:
            raise GaveUpError(f"no resources can be added: {self._failures('add-resources')}")

    async def _enqueue(self, numbers: Sequence[int]) -> list[asyncio.Future[None]]:
        """Enqueue tasks; returns what is done when each is finished."""
        inputs = [f"{self._run} {number}" for number in numbers]
        call = partial(self._calls.enqueue_inputs, inputs)
        rollout_ids = await self.requests.make("enqueue", call, harmless=False)
        if rollout_ids is None:
            raise GaveUpError(f"rollouts cannot be enqueued: {self._failures('enqueue')}")
        loop = asyncio.get_running_loop()
        waited = {rollout_id: loop.create_future() for rollout_id in rollout_ids}
        self.tasks.update(zip(rollout_ids, numbers, strict=True))
        self._pending |= waited
        return list(waited.values())

    async def _look(self) -> None:
        """Look for finished ones over and over, among the oldest, which are the first to be finished."""
        window = max(LOOKED_AT, self._workload.concurrency or 0)
        moved = time.monotonic()
        while True:
            started = time.monotonic()
            asked = list(islice(self._pending, window))
            found = 0
            for part in _batched(asked, LOOKED_AT):
                found += await self._ask(part)
            now = time.monotonic()
            if found or not asked:
                moved = now
            elif now - moved > self._stale_seconds:
                raise GaveUpError(f"no rollout has finished for {self._stale_seconds:g} s")
            if self.requests.failed >= FAILED_CALLS:
                raise GaveUpError(f"{self.requests.failed} calls failed: {self._failures('wait')}")
            if not asked or found < len(asked):
                await asyncio.sleep(min(max(LOOK_SECONDS, LOOK_SHARE * (now - started)), LONGEST_PAUSE))

    async def _ask(self, rollout_ids: Sequence[str]) -> int:
        statuses = await self.requests.make("wait", partial(self._calls.wait, rollout_ids)) or {}
        for rollout_id, status in statuses.items():
            self.ended[rollout_id] = status
            finished = self._pending.pop(rollout_id)
            if not finished.cancelled():
                finished.set_result(None)
        if statuses:
            self._moved.set()
            self._advance(len(statuses))
        return len(statuses)

    def _failures(self, kind: str) -> str:
        return "; ".join(self.requests.tallies[kind].failures[:1])


async def check(calls: RolloutCalls, algorithm: Algorithm, workload: Workload, run: str, tally: Tally) -> int:
    """Find out whether each rollout succeeded and all its spans are there; counts tasks in the tally.

    Returns:
        How many spans are missing, or should not be there.
    """
    wrong_spans = 0
    ended = iter(algorithm.ended.items())

    async def checker() -> None:
        nonlocal wrong_spans
        for rollout_id, status in ended:
            number = algorithm.tasks[rollout_id]
            steps = steps_of(number, workload.max_rounds, workload.sleep_seconds)
            spans = await algorithm.requests.make("check", partial(calls.stored_spans, rollout_id)) or []
            lost, wrong = compare(steps, spans, f"{run} {number}")
            wrong_spans += lost
            if status != "succeeded":
                tally.fail(f"task {number} ({rollout_id}) ended as {status}")
            elif wrong is not None:
                tally.fail(f"task {number} ({rollout_id}): {wrong}")
            else:
                tally.succeed()

    async with asyncio.TaskGroup() as group:
        for _ in range(CHECKS_AT_ONCE):
            group.create_task(checker())
    return wrong_spans


def compare(steps: Sequence[Step], spans: Sequence[StoredSpan], task: str) -> tuple[int, str | None]:
    """What is stored of a rollout beside what its agent sent.

    Returns:
        How many spans are missing or too many, and what is wrong in words, None when nothing is.
    """
    wanted = Counter((span_id(number).hex(), step.name) for number, step in enumerate(steps))
    found = Counter((span.span_id, span.name) for span in spans)
    wrong = (wanted - found).total() + (found - wanted).total()
    if wrong:
        return (
            wrong,
            f"{(wanted & found).total()} of {len(steps)} spans are there, and {(found - wanted).total()} others",
        )
    if len({span.attempt_id for span in spans}) != 1:
        return 0, "its spans are not all of one attempt"
    if len({span.sequence_id for span in spans}) != len(spans):
        return 0, "two of its spans have the same sequence id"
    by_id = {span.span_id: span for span in spans}
    named = next(number for number, step in enumerate(steps) if step.task)
    if _attributes(by_id[span_id(named).hex()]).get(TASK_ATTRIBUTE) != task:
        return 0, "the span that names its task does not"
    return 0, _wrong_reward(span for span in spans if span.name == REWARD_NAME)


def _wrong_reward(rewards: Iterable[StoredSpan]) -> str | None:
    last = _attributes(max(rewards, key=lambda span: span.sequence_id)).get(REWARD_ATTRIBUTE)
    low, high = LAST_REWARD
    right = isinstance(last, float) and low <= last <= high
    return None if right else f"its last reward is {last}"


def _attributes(span: StoredSpan) -> dict[str, object]:
    return msgspec.json.decode(span.attributes)
