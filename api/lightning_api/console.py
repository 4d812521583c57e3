"""Metrics for people without Prometheus: kept in memory, and looked at over the last minute."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_sql.metrics import (
    CLAIMS,
    ENQUEUED,
    HTTP_CALLS,
    HTTP_LATENCY,
    METRICS,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    RETRIES,
    RUNNING_ATTEMPTS,
    SPANS,
    STORE_CALLS,
    STORE_LATENCY,
    Labels,
    Metric,
)

__all__ = ["WINDOW_SECONDS", "ConsoleRecorder", "Row", "View", "quantile", "shown_seconds"]

WINDOW_SECONDS: Final = 60.0
"""What rates and quantiles are of."""

_QUANTILES: Final = (0.5, 0.95, 0.99)

_COUNTED: Final = (HTTP_CALLS, STORE_CALLS, ENQUEUED, CLAIMS, RETRIES, SPANS)
_TIMED: Final = (HTTP_LATENCY, STORE_LATENCY)

_Numbers: TypeAlias = dict[Labels, float]
_Buckets: TypeAlias = dict[Labels, list[int]]
"""How many observations fell into each bucket, the last of which has no bound."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """Everything counted up to some time."""

    at: float
    counts: Mapping[Metric, _Numbers]
    observations: Mapping[Metric, _Buckets]


@dataclass(frozen=True, slots=True)
class Row:
    """What calls of one kind came to."""

    name: str
    per_second: float
    failed_per_second: float
    quantiles: tuple[float | None, ...]
    """P50, P95 and P99, in seconds."""


@dataclass(frozen=True, slots=True)
class View:
    """What happened lately, and how things stand."""

    requests: Sequence[Row]
    """By route, those with most calls first."""
    methods: Sequence[Row]
    """By store method, likewise."""
    all_requests: Row
    rates: Mapping[str, float]
    """Of what is done to the queue, each second."""
    gauges: Mapping[Metric, float]

    def line(self) -> str:
        """It in one line."""
        total = self.all_requests
        p50, p95, p99 = map(shown_seconds, total.quantiles)
        requests = f"{total.per_second:.1f} requests/s, {total.failed_per_second:.1f} failed"
        return "  ".join([requests, f"P50 {p50} P95 {p95} P99 {p99}", self.queue(), self.work()])

    def queue(self) -> str:
        """How the queue stands."""
        waiting, running = self.gauges.get(QUEUE_DEPTH, 0.0), self.gauges.get(RUNNING_ATTEMPTS, 0.0)
        return f"queue {waiting:.0f}, oldest {self.gauges.get(QUEUE_OLDEST, 0.0):.0f} s, running {running:.0f}"

    def work(self) -> str:
        """What is done to the queue."""
        return "  ".join(f"{name} {rate:.1f}/s" for name, rate in self.rates.items())


class ConsoleRecorder:
    """Keeps counts and latencies of this process in memory.

    Args:
        clock: seconds of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[Metric, _Numbers] = {metric: {} for metric in METRICS}
        self._observations: dict[Metric, _Buckets] = {metric: {} for metric in METRICS}
        self._gauges: dict[Metric, _Numbers] = {metric: {} for metric in METRICS}
        self._moments = deque([self._moment()])

    def expect(self, metric: Metric, labels: Labels) -> None:
        """Nothing: a table has no use for what has not happened."""

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter."""
        counts = self._counts[metric]
        counts[labels] = counts.get(labels, 0.0) + amount

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        series = self._observations[metric]
        buckets = series.get(labels)
        if buckets is None:
            buckets = series[labels] = [0] * (len(metric.buckets) + 1)
        buckets[bisect_left(metric.buckets, value)] += 1

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        self._gauges[metric][labels] = value

    def view(self) -> View:
        """What happened since the view of a minute ago, or the first. For one thread at a time, which may be any."""
        now, moments = self._moment(), self._moments
        while len(moments) > 1 and moments[1].at <= now.at - WINDOW_SECONDS:
            moments.popleft()
        then = moments[0]
        moments.append(now)
        between = _Between(then, now)
        rates = {"enqueued": ENQUEUED, "claims": CLAIMS, "retries": RETRIES, "spans": SPANS}
        return View(
            requests=between.rows(HTTP_CALLS, HTTP_LATENCY, _route, _request_failed),
            methods=between.rows(STORE_CALLS, STORE_LATENCY, _method, _method_failed),
            all_requests=next(iter(between.rows(HTTP_CALLS, HTTP_LATENCY, _any, _request_failed)), _NOTHING),
            rates={name: between.rate(metric) for name, metric in rates.items()},
            gauges={metric: sum(values.copy().values()) for metric, values in self._gauges.items()},
        )

    def _moment(self) -> _Moment:
        # Each copy is made in one step, whatever the thread that counts does.
        return _Moment(
            self._clock(),
            {metric: self._counts[metric].copy() for metric in _COUNTED},
            {
                metric: {labels: buckets.copy() for labels, buckets in self._observations[metric].copy().items()}
                for metric in _TIMED
            },
        )


class _Between:
    """What happened between two moments."""

    def __init__(self, then: _Moment, now: _Moment) -> None:
        self._then = then
        self._now = now
        self._seconds = max(now.at - then.at, 1e-3)

    def rate(self, metric: Metric) -> float:
        """How much was added to a counter, each second."""
        return sum(self._added(metric).values()) / self._seconds

    def rows(
        self, calls: Metric, latency: Metric, name_of: Callable[[Labels], str], failed: Callable[[Labels], bool]
    ) -> list[Row]:
        """What a counter and its histogram say, by what their labels are called."""
        number: dict[str, float] = defaultdict(float)
        failures: dict[str, float] = defaultdict(float)
        buckets: dict[str, list[int]] = {}
        for labels, added in self._added(calls).items():
            name = name_of(labels)
            number[name] += added
            failures[name] += added if failed(labels) else 0.0
        before = self._then.observations[latency]
        for labels, counted in self._now.observations[latency].items():
            old = before.get(labels, [0] * len(counted))
            new = [count - was for count, was in zip(counted, old, strict=True)]
            name = name_of(labels)
            buckets[name] = [a + b for a, b in zip(buckets.get(name, [0] * len(new)), new, strict=True)]
        rows = [
            Row(
                name,
                count / self._seconds,
                failures[name] / self._seconds,
                tuple(quantile(latency.buckets, buckets.get(name, ()), share) for share in _QUANTILES),
            )
            for name, count in number.items()
            if count
        ]
        return sorted(rows, key=lambda row: (-row.per_second, row.name))

    def _added(self, metric: Metric) -> _Numbers:
        before = self._then.counts[metric]
        return {labels: count - before.get(labels, 0.0) for labels, count in self._now.counts[metric].items()}


def quantile(bounds: Sequence[float], buckets: Iterable[int], share: float) -> float | None:
    """The value that a share of all observations does not exceed, as far as their buckets tell; None without any.

    Args:
        bounds: the buckets' upper bounds.
        buckets: how many fell into each, the last of which has no bound.
        share: between 0 and 1.
    """
    counted = list(buckets)
    rank, below = share * sum(counted), 0
    for index, count in enumerate(counted):
        if count and below + count >= rank:
            if index == len(bounds):
                return bounds[-1]
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (rank - below) / count
        below += count
    return None


def shown_seconds(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


_NOTHING: Final = Row("", 0.0, 0.0, (None,) * len(_QUANTILES))


def _any(_labels: Labels) -> str:
    return ""


def _route(labels: Labels) -> str:
    path, method, _status = labels
    return f"{method} {path}"


def _request_failed(labels: Labels) -> bool:
    return labels[2] >= "4"


def _method(labels: Labels) -> str:
    return labels[0]


def _method_failed(labels: Labels) -> bool:
    return labels[2] != "OK"
