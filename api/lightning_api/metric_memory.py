"""Metrics of a process that is alone: kept as plain numbers, and put into Prometheus's words when they are asked for.

What happens in every request must cost next to nothing. The objects of the Prometheus client take a lock for each
number; here everything is written by the event loop's thread, and a scrape takes copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]
from typing_extensions import override

from lightning_sql.metrics import METRICS, Labels, Metric

__all__ = ["MemoryMetrics"]


class MemoryMetrics(Collector):
    """The metrics of this process, each by its labels."""

    def __init__(self) -> None:
        self._values: Final[dict[Metric, dict[Labels, float]]] = {
            metric: {} for metric in METRICS if metric.kind != "histogram"
        }
        self._observed: Final[dict[Metric, dict[Labels, list[float]]]] = {
            metric: {} for metric in METRICS if metric.kind == "histogram"
        }
        """How many observations there were up to each bound, above the one before, and above all; last their sum."""

    def expect(self, metric: Metric, labels: Labels) -> None:
        """Make something known before it happens."""
        if metric.kind == "histogram":
            self._observations(metric, labels)
        else:
            self._values[metric].setdefault(labels, 0.0)

    def count(self, metric: Metric, labels: Labels, amount: float) -> None:
        """Add to a counter."""
        values = self._values[metric]
        values[labels] = values.get(labels, 0.0) + amount

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add one observation to a histogram."""
        observed = self._observed[metric].get(labels)
        if observed is None:
            observed = self._observations(metric, labels)
        observed[bisect_left(metric.buckets, value)] += 1
        observed[-1] += value

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        self._values[metric][labels] = value

    def _observations(self, metric: Metric, labels: Labels) -> list[float]:
        return self._observed[metric].setdefault(labels, [0.0] * (len(metric.buckets) + 2))

    @override
    def collect(self) -> Iterable[Family]:
        """All of them as they are now, in any thread."""
        for metric in METRICS:
            yield self._histogram(metric) if metric.kind == "histogram" else self._family(metric)

    def _family(self, metric: Metric) -> Family:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(_shown(metric), metric.help, labels=metric.labels)
        for labels, value in list(self._values[metric].items()):
            family.add_metric(labels, value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(_shown(metric), metric.help, labels=metric.labels)
        bounds = [*(floatToGoString(bound) for bound in metric.buckets), "+Inf"]
        for labels, observed in list(self._observed[metric].items()):
            # A copy is made at once, so that the counts and their sum are of one moment.
            *counts, total = observed.copy()
            family.add_metric(labels, list(zip(bounds, _summed(counts), strict=True)), total)
        return family


def _shown(metric: Metric) -> str:
    return metric.name.replace(".", "_")


def _summed(counts: Iterable[float]) -> Iterator[float]:
    total = 0.0
    for count in counts:
        total += count
        yield total
