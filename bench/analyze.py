"""`python -m bench.analyze`: what a Prometheus server has seen of a store within a span of time."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import families
from bench.processes import BenchError
from bench.prometheus import Labels, Prometheus, Vector, duration_of, instant_of
from bench.report import number

DEFAULT_SECONDS: Final = 600.0
QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the tables.

    Attributes:
        counter: the counter of calls, as Prometheus has it.
        histogram: the histogram of their seconds, without `_bucket`.
        labels: what a line of the table is for each combination of.
        error: the matcher of calls that failed.
    """

    title: str
    counter: str
    histogram: str
    labels: Labels
    error: str


SUBJECTS: Final = (
    Subject("requests", "agl_http_total", "agl_http_latency", ("path", "method"), 'status!~"[123].."'),
    Subject("store methods", "agl_store_total", "agl_store_latency", ("store_pubmeth",), 'status!="OK"'),
    Subject(
        "collections",
        "agl_collections_total",
        "agl_collections_latency",
        ("collection", "operation", "store_privmeth"),
        'status!="OK"',
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """What is known of one combination of labels.

    Attributes:
        calls: how many there were, as far as Prometheus can tell.
        errors: how many of them failed.
        quantiles: seconds, in the order of `QUANTILES`; NaN where there is none.
    """

    labels: Labels
    calls: float
    errors: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, in seconds since the epoch."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    @property
    def range(self) -> str:
        """The same, as PromQL writes a duration."""
        return f"{round(self.seconds * 1000)}ms"

    def __str__(self) -> str:
        start, end = (f"{datetime.fromtimestamp(instant, UTC):%Y-%m-%d %H:%M:%S}" for instant in (self.start, self.end))
        return f"{start} to {end} UTC"


def expressions(subject: Subject, window: Window) -> list[str]:
    """The expressions of a table: calls, errors, and each quantile."""
    by = ", ".join(subject.labels)
    counters = (subject.counter, f"{subject.counter}{{{subject.error}}}")
    sums = [f"sum by ({by}) ({_grown(counter, window)})" for counter in counters]
    buckets = f"sum by ({by}, le) ({_grown(f'{subject.histogram}_bucket', window)})"
    return [*sums, *(f"histogram_quantile({quantile}, {buckets})" for quantile in QUANTILES)]


def _grown(series: str, window: Window) -> str:
    """By how much counters have grown.

    `increase` knows only what came after a series was first scraped, by which time a short run may be over. So one that
    came up later than its target, and was not there at the start, counts whole. One that is as old as what is known of
    its target does not: most of it may be from before.
    """
    span = window.range
    scrapes = f"sum by (job, instance) (count_over_time(lightning_sql_build_info[{span}]))"
    late = f"count_over_time({series}[{span}]) < on (job, instance) group_left () {scrapes}"
    return f"{series} unless {series} offset {span} and {late} or increase({series}[{span}])"


async def lines_of(prometheus: Prometheus, subject: Subject, window: Window) -> list[Line]:
    """The lines of a table, the most called first; what was not called is left out.

    Raises:
        BenchError: Prometheus cannot say.
    """
    answers = [
        await prometheus.query(expression, window.end, subject.labels) for expression in expressions(subject, window)
    ]
    calls, errors, *quantiles = answers
    lines = [
        Line(labels, count, errors.get(labels, 0.0), tuple(_value(vector, labels) for vector in quantiles))
        for labels, count in calls.items()
        if count > 0
    ]
    return sorted(lines, key=lambda line: (-line.calls, line.labels))


def _value(vector: Vector, labels: Labels) -> float:
    return vector.get(labels, math.nan)


def table_of(subject: Subject, lines: Sequence[Line], window: Window) -> Table:
    """A table as it is printed."""
    table = Table(title=subject.title, title_justify="left")
    for label in subject.labels:
        table.add_column(label, overflow="fold")
    for heading in ("calls", "per second", "errors", "errors %", "P50 ms", "P95 ms", "P99 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        milliseconds = (None if math.isnan(value) else value * 1000 for value in line.quantiles)
        figures = (line.calls, line.calls / window.seconds, line.errors, line.errors / line.calls * 100, *milliseconds)
        table.add_row(*map(escape, line.labels), *map(number, figures), style="red" if line.errors else None)
    return table


def window_of(start: str | None, end: str | None, last: str | None) -> Window:
    """The span of time that the options name.

    Raises:
        BenchError: they name none.
    """
    if start is not None and last is not None:
        raise BenchError("give either --start or --last, not both")
    try:
        until = time.time() if end is None else instant_of(end)
        if start is not None:
            window = Window(instant_of(start), until)
        else:
            window = Window(until - (DEFAULT_SECONDS if last is None else duration_of(last)), until)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if window.seconds <= 0:
        raise BenchError("the span of time must end after its start")
    return window


@click.command(context_settings=families.CONTEXT)
@click.option("--prometheus-url", required=True, metavar="URL", help="Where Prometheus is, http://127.0.0.1:9090.")
@click.option("--start", metavar="TIME", help="ISO 8601 (UTC unless it says more), seconds since the epoch, or now.")
@click.option("--end", metavar="TIME", help="Likewise (now).")
@click.option("--last", metavar="DURATION", help="How much before the end, instead of a start (10m).")
def main(prometheus_url: str, start: str | None, end: str | None, last: str | None) -> int:
    """Print what a Prometheus server has seen of a store's requests, methods and collections."""
    window = window_of(start, end, last)
    prometheus = Prometheus(families.http_address("--prometheus-url", prometheus_url))
    console = Console(width=None if sys.stdout.isatty() else families.WIDTH)
    found = asyncio.run(_found(prometheus, window))
    if not any(found):
        raise BenchError(f"{prometheus.address} has seen no call of a store, {window}")
    console.print(f"{window}, as far as {prometheus.address} knows", highlight=False, markup=False)
    for subject, lines in zip(SUBJECTS, found, strict=True):
        console.print(table_of(subject, lines, window) if lines else f"{subject.title}: none", highlight=False)
    return 0


async def _found(prometheus: Prometheus, window: Window) -> list[list[Line]]:
    async with prometheus:
        return [await lines_of(prometheus, subject, window) for subject in SUBJECTS]


if __name__ == "__main__":
    families.launch(main, "bench.analyze")
