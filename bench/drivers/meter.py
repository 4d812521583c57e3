"""What a job measured: latencies, CPU, and calls that failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import aiohttp

from bench.cpu import tree_seconds
from bench.drivers.calls import CallFailedError

T = TypeVar("T")

FAILURES: Final = (
    CallFailedError,
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
)
"""What a call can end with, in either client, other than its answer."""
TOO_MANY: Final = 50
"""Failures after which a job gives up."""


class GaveUpError(Exception):
    """Too many calls failed."""


class Meter:
    """The values of one job.

    Args:
        watched: process ids by what they are, `server` and `database`; the CPU of their trees is measured.
    """

    def __init__(self, watched: Mapping[str, int]) -> None:
        self.values: dict[str, float] = {}
        self.failures: list[str] = []
        self.failed = 0
        self.calls = 0
        self._watched = watched

    def fail(self, what: str) -> None:
        """Count a failure.

        Raises:
            GaveUpError: there were too many.
        """
        self.failed += 1
        if len(self.failures) < 5:
            self.failures.append(what[:500])
        if self.failed >= TOO_MANY:
            raise GaveUpError

    async def timed(self, call: Awaitable[T], latencies: list[float]) -> T | None:
        """Await a call and note how long it took; None when it failed, which is counted."""
        self.calls += 1
        started = time.perf_counter()
        try:
            answer = await call
        except FAILURES as error:
            self.fail(f"{type(error).__name__}: {error}")
            return None
        latencies.append(time.perf_counter() - started)
        return answer

    def check(self, right: bool, what: str) -> None:
        """Count a failure unless something that must hold does."""
        if not right:
            self.fail(what)

    def record(self, name: str, latencies: Sequence[float], seconds: float, each: int = 1) -> None:
        """Note the rate, and the median and 99th percentile in milliseconds, of calls that did `each` things.

        The median rate is what one client would reach if every call took the median.
        """
        if not latencies or seconds <= 0:
            return
        self.values[f"{name}.rate"] = len(latencies) * each / seconds
        ordered = sorted(latencies)
        self.values[f"{name}.p50"] = quantile(ordered, 0.5) * 1000
        self.values[f"{name}.p99"] = quantile(ordered, 0.99) * 1000
        self.values[f"{name}.median_rate"] = each / quantile(ordered, 0.5)

    @contextmanager
    def cpu(self) -> Iterator[dict[str, float]]:
        """CPU seconds of the watched trees, and of this process, in the dictionary once the block has ended."""
        before = self._cpu_seconds()
        used: dict[str, float] = {}
        yield used
        used.update({name: seconds - before[name] for name, seconds in self._cpu_seconds().items()})

    def record_cpu(self, name: str, used: Mapping[str, float], times: int) -> None:
        """Note the CPU milliseconds that each of so many took: by whom, and server and database together."""
        if times and self._watched:
            self.values |= {f"{name}.{who}_cpu": seconds / times * 1000 for who, seconds in used.items()}
            self.values[f"{name}.cpu"] = sum(used[who] for who in self._watched) / times * 1000

    def _cpu_seconds(self) -> dict[str, float]:
        seconds = {name: tree_seconds(pid) for name, pid in self._watched.items()}
        return seconds | {"driver": time.process_time()}


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of values that are in order, between two of them by linear interpolation."""
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


async def closed_loop(clients: int, calls: Sequence[Callable[[], Awaitable[Any]]]) -> float:
    """Make the calls with so many clients, each of which makes its next one when it has its answer.

    Returns:
        The seconds that all of them took together.
    """
    remaining = iter(calls)

    async def client() -> None:
        for call in remaining:
            await call()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return time.perf_counter() - started
