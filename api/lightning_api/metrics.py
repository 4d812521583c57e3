"""Metrics for Prometheus: the recorder behind the service, and what a scrape is answered."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from lightning_api.metric_files import MetricFiles
from lightning_api.metric_memory import MemoryMetrics
from lightning_sql import __version__
from lightning_sql.errors import ConfigurationError, LightningError
from lightning_sql.metrics import (
    BUILD_INFO,
    HTTP_CALLS,
    HTTP_LATENCY,
    METRICS,
    ROLLOUTS_DURATION,
    ROLLOUTS_FINISHED,
    STORE_CALLS,
    STORE_LATENCY,
    Labels,
    Metric,
)
from lightning_sql.records import ROLLOUT_FINISHED
from lightning_sql.store.measured import PUBLIC_METHODS

__all__ = ["DIRECTORY_VARIABLE", "METRICS_PATH", "PrometheusRecorder", "exposition_of", "metrics_directory"]

DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PATH: Final = "/v1/prometheus"

_MODES: Final = ("train", "val", "test", "unknown")

_FINE: Final = 2.0**24
"""Observations are multiples of one part of so many: then their sums are exact, up to 17 years of seconds, and the same
in whatever order several processes are added up. Else one would now and then be smaller than before by its last digit,
and Prometheus would take it for a process that has begun anew."""

_Made: TypeAlias = Counter | Gauge | Histogram

# When a series began is of no use, and makes as many series again.
disable_created_metrics()


def metrics_directory() -> Path | None:
    """Where the processes of a server that has several put their metrics; None while there is only one."""
    value = os.environ.get(DIRECTORY_VARIABLE)
    return Path(value) if value else None


class _FileMetrics:
    """The metrics of one process of several, in files that all of them see: objects of the Prometheus client."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._made = {metric: _make(metric, self._registry) for metric in METRICS}
        self._children: dict[Metric, dict[Labels, Any]] = {metric: {} for metric in METRICS}

    def expect(self, metric: Metric, labels: Labels) -> None:
        if labels not in self._children[metric]:
            self._child(metric, labels)

    def count(self, metric: Metric, labels: Labels, amount: float) -> None:
        child = self._children[metric].get(labels)
        (self._child(metric, labels) if child is None else child).inc(amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation, rounded to a multiple of 60 ns."""
        child = self._children[metric].get(labels)
        (self._child(metric, labels) if child is None else child).observe(round(value * _FINE) / _FINE)

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        child = self._children[metric].get(labels)
        (self._child(metric, labels) if child is None else child).set(value)

    def _child(self, metric: Metric, labels: Labels) -> Any:
        made = self._made[metric]
        child = made.labels(*labels) if metric.labels else made
        self._children[metric][labels] = child
        return child


class PrometheusRecorder:
    """Takes down everything for Prometheus: in this process, or in files where `PROMETHEUS_MULTIPROC_DIR` says so."""

    def __init__(self) -> None:
        self._kept: MemoryMetrics | _FileMetrics
        if metrics_directory() is None:
            self._kept = MemoryMetrics()
            self._registry = CollectorRegistry()
            self._registry.register(self._kept)
        else:
            self._kept = _FileMetrics()
        for metric in METRICS:
            if metric.kind != "histogram" and not metric.labels:
                self.expect(metric, ())
        self._expect_store()
        self.set(BUILD_INFO, (__version__,), 1.0)

    def expect(self, metric: Metric, labels: Labels) -> None:
        """Make something known before it happens."""
        self._kept.expect(metric, labels)

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter."""
        self._kept.count(metric, labels, amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        self._kept.observe(metric, labels, value)

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        self._kept.set(metric, labels, value)

    def expect_route(self, path: str, method: str, success: int, failures: Iterable[int]) -> None:
        """Make a route known, with the statuses that it may answer."""
        for status in (success, *failures):
            self.expect(HTTP_CALLS, (path, method, str(status)))
        self.expect(HTTP_LATENCY, (path, method, str(success)))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """What a scrape is answered, and its content type. It takes its time, in which others can work."""
        directory = metrics_directory()
        return exposition_of(self._registry if directory is None else directory, accept)

    def _expect_store(self) -> None:
        failures = [error.__name__ for error in _subclasses(LightningError)]
        for method in PUBLIC_METHODS:
            for status in ("OK", "499", *failures):
                self.expect(STORE_CALLS, (method, method, status))
            self.expect(STORE_LATENCY, (method, method, "OK"))
        for status in sorted(ROLLOUT_FINISHED):
            for mode in _MODES:
                self.expect(ROLLOUTS_FINISHED, (status, mode))
                self.expect(ROLLOUTS_DURATION, (status, mode))


def exposition_of(source: CollectorRegistry | Path, accept: str) -> tuple[bytes, str]:
    """A registry, or the directory that the processes of a server share, as Prometheus reads it; and its content type.

    Raises:
        ConfigurationError: there is no such directory.
        OverloadedError: its files have been changing for seconds.
    """
    registry = source
    if isinstance(registry, Path):
        if not registry.is_dir():
            raise ConfigurationError(f"{DIRECTORY_VARIABLE} is not a directory")
        directory, registry = registry, CollectorRegistry()
        registry.register(MetricFiles(directory))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _make(metric: Metric, registry: CollectorRegistry) -> _Made:
    name = metric.name.replace(".", "_")
    match metric.kind:
        case "counter":
            return Counter(name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return Histogram(name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
        case "gauge":
            mode = "livesum" if metric.together == "sum" else "mostrecent"
            return Gauge(name, metric.help, metric.labels, registry=registry, multiprocess_mode=mode)


def _subclasses(error: type[LightningError]) -> Iterable[type[LightningError]]:
    for subclass in error.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
