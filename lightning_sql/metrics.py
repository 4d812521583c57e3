"""What is counted and timed: the metrics' names and labels (CONTRACT.md section 10), and who takes them down.

Names have dots, as in the protocol; where they are shown to Prometheus, these are underscores.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

__all__ = [
    "BATCH_CALLS",
    "BUILD_INFO",
    "CALLS_IN_FLIGHT",
    "CALLS_WAITING",
    "CLAIMS",
    "COLLECTION_CALLS",
    "COLLECTION_LATENCY",
    "DATABASE_LATENCY",
    "DEADLINES_DUE",
    "ENQUEUED",
    "HTTP_CALLS",
    "HTTP_LATENCY",
    "METRICS",
    "NOTIFICATION_LAG",
    "POOL_CONNECTIONS",
    "QUEUE_DEPTH",
    "QUEUE_OLDEST",
    "RETRIES",
    "ROLLOUTS_DURATION",
    "ROLLOUTS_FINISHED",
    "RUNNING_ATTEMPTS",
    "SAMPLED_TIME",
    "SPANS",
    "STORE_CALLS",
    "STORE_LATENCY",
    "Labels",
    "Metric",
    "Recorder",
    "status_of",
]

Kind: TypeAlias = Literal["counter", "histogram", "gauge"]
Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in the order in which it declares them."""

SECONDS: Final = (
    *(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2.5, 5)),
    100.0,
    300.0,
)
"""Upper bounds of latencies: three to a decade, from a microsecond to five minutes."""
_COUNTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric; no two are equal, so that they are quickly found in a dictionary."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""
    together: Literal["sum", "latest"] = "latest"
    """What the gauges of several processes are: parts of one whole, or each the whole."""


HTTP_CALLS: Final = Metric("agl.http.total", "counter", "Answered requests.", ("path", "method", "status"))
HTTP_LATENCY: Final = Metric(
    "agl.http.latency", "histogram", "Seconds from request to answer.", ("path", "method", "status"), SECONDS
)
STORE_CALLS: Final = Metric(
    "agl.store.total", "counter", "Calls of store methods.", ("method", "store_pubmeth", "status")
)
STORE_LATENCY: Final = Metric(
    "agl.store.latency", "histogram", "Seconds a store method took.", ("method", "store_pubmeth", "status"), SECONDS
)
_COLLECTION_LABELS: Final = ("store_pubmeth", "store_privmeth", "operation", "collection", "status")
COLLECTION_CALLS: Final = Metric("agl.collections.total", "counter", "Operations on collections.", _COLLECTION_LABELS)
COLLECTION_LATENCY: Final = Metric(
    "agl.collections.latency", "histogram", "Seconds an operation on a collection took.", _COLLECTION_LABELS, SECONDS
)
ROLLOUTS_FINISHED: Final = Metric("agl.rollouts.total", "counter", "Rollouts that finished.", ("status", "mode"))
ROLLOUTS_DURATION: Final = Metric(
    "agl.rollouts.duration", "histogram", "Seconds from a rollout's start to its end.", ("status", "mode"), SECONDS
)

QUEUE_DEPTH: Final = Metric("lightning_sql.queue.depth", "gauge", "Rollouts in the queue.")
QUEUE_OLDEST: Final = Metric(
    "lightning_sql.queue.oldest_seconds", "gauge", "Seconds since the oldest queued rollout was enqueued."
)
RUNNING_ATTEMPTS: Final = Metric("lightning_sql.attempts.running", "gauge", "Rollouts that somebody works on.")
DEADLINES_DUE: Final = Metric("lightning_sql.deadlines.due", "gauge", "Rollouts that the watchdog has to look at.")
ENQUEUED: Final = Metric("lightning_sql.enqueued", "counter", "Rollouts that were enqueued.")
CLAIMS: Final = Metric("lightning_sql.claims", "counter", "Rollouts that were claimed.")
RETRIES: Final = Metric("lightning_sql.retries", "counter", "Claims of rollouts that had an attempt before.")
SPANS: Final = Metric("lightning_sql.spans", "counter", "Spans that were stored.")
BATCH_CALLS: Final = Metric(
    "lightning_sql.batch.calls", "histogram", "Calls that went to the database together.", ("statement",), _COUNTS
)
POOL_CONNECTIONS: Final = Metric(
    "lightning_sql.pool.connections", "gauge", "Connections to the database.", ("state",), together="sum"
)
CALLS_WAITING: Final = Metric(
    "lightning_sql.calls.waiting",
    "gauge",
    "Calls that wait to be sent to the database.",
    ("statement",),
    together="sum",
)
CALLS_IN_FLIGHT: Final = Metric(
    "lightning_sql.calls.in_flight", "gauge", "Requests that are worked on.", together="sum"
)
DATABASE_LATENCY: Final = Metric(
    "lightning_sql.database.latency_seconds", "gauge", "Seconds until the database answered when last asked."
)
NOTIFICATION_LAG: Final = Metric(
    "lightning_sql.notification.lag",
    "histogram",
    "Seconds from a rollout's end until those who wait for it are told.",
    (),
    SECONDS,
)
SAMPLED_TIME: Final = Metric(
    "lightning_sql.sampled_time_seconds", "gauge", "When the queue was last looked at, in seconds since the epoch."
)
BUILD_INFO: Final = Metric("lightning_sql.build_info", "gauge", "1, for the release that runs.", ("version",))

METRICS: Final = (
    HTTP_CALLS,
    HTTP_LATENCY,
    STORE_CALLS,
    STORE_LATENCY,
    COLLECTION_CALLS,
    COLLECTION_LATENCY,
    ROLLOUTS_FINISHED,
    ROLLOUTS_DURATION,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    RUNNING_ATTEMPTS,
    DEADLINES_DUE,
    ENQUEUED,
    CLAIMS,
    RETRIES,
    SPANS,
    BATCH_CALLS,
    POOL_CONNECTIONS,
    CALLS_WAITING,
    CALLS_IN_FLIGHT,
    DATABASE_LATENCY,
    NOTIFICATION_LAG,
    SAMPLED_TIME,
    BUILD_INFO,
)


class Recorder(Protocol):
    """Takes down what happens, in a few microseconds, without ever failing or waiting."""

    def expect(self, metric: Metric, labels: Labels) -> None:
        """Make something known before it happens.

        Else its first time would not show: what comes up with 1 has not grown.
        """
        ...

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter."""
        ...

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        ...

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        ...


def status_of(error: BaseException | None) -> str:
    """The label `status` of what ended with an error, or without one."""
    if error is None:
        return "OK"
    return "499" if isinstance(error, asyncio.CancelledError) else type(error).__name__
