"""Counting and timing of storage operations, for whoever passes a tracker (CONTRACT.md section 10)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from lightning_sql.metrics import COLLECTION_CALLS, COLLECTION_LATENCY, Labels, Metric, Recorder, status_of

__all__ = ["MetricsTracker", "RecordingTracker", "StoreMethod", "TrackedCollection", "store_method"]


class MetricsTracker(Protocol):
    """The part of a metrics backend that collections call. Metric names have dots."""

    async def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""
        ...

    async def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Record one observation, in seconds."""
        ...


StoreMethod = tuple[str, str]
"""The public and the private name of the store method on whose behalf a collection works."""

store_method: Final[ContextVar[StoreMethod]] = ContextVar("store_method", default=("unknown", "unknown"))


class RecordingTracker:
    """A metrics backend for collections that hands everything to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""
        metric = _BY_NAME[name]
        self._recorder.count(metric, _values(metric, labels), amount)

    async def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Record one observation, in seconds."""
        metric = _BY_NAME[name]
        self._recorder.observe(metric, _values(metric, labels), value)


_BY_NAME: Final = {metric.name: metric for metric in (COLLECTION_CALLS, COLLECTION_LATENCY)}


def _values(metric: Metric, labels: Mapping[str, str] | None) -> Labels:
    return tuple((labels or {}).get(name, "") for name in metric.labels)


class TrackedCollection:
    """Base of everything that stores: it knows its tracker and its name in the metrics."""

    def __init__(self, tracker: MetricsTracker | None = None, name: str | None = None) -> None:
        self._tracker = tracker
        self._name = name

    @property
    def tracker(self) -> MetricsTracker | None:
        """The metrics backend, or None."""
        return self._tracker

    @property
    def collection_name(self) -> str:
        """The value of the metric label `collection`."""
        return self._name or type(self).__name__

    @property
    def extra_tracking_labels(self) -> Mapping[str, str]:
        """Further metric labels of this collection."""
        return {}

    @asynccontextmanager
    async def tracking_context(self, operation: str, collection: str) -> AsyncGenerator[None]:
        """Count and time the body as one operation on a collection; costs nothing without a tracker."""
        tracker = self._tracker
        if tracker is None:
            yield
            return
        started, status = time.perf_counter(), status_of(None)
        try:
            yield
        except BaseException as error:
            status = status_of(error)
            raise
        finally:
            public, private = store_method.get()
            labels = {
                "store_pubmeth": public,
                "store_privmeth": private,
                "operation": operation,
                "collection": collection,
                "status": status,
                **self.extra_tracking_labels,
            }
            await tracker.inc_counter(COLLECTION_CALLS.name, labels=labels)
            await tracker.observe_histogram(COLLECTION_LATENCY.name, value=time.perf_counter() - started, labels=labels)
