"""The presets on our server and on upstream's, in turn and with the same driver, and what is written of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.document import table_row
from bench.ideal import sleeps_allow
from bench.machine import Machine
from bench.plan import rotated
from bench.presets import PRESETS, PUBLISHED, SLEEP_BOUND, SLEEP_SHARE, TIMES_UPSTREAM, Exporter, Workload
from bench.processes import BenchError
from bench.report import number, times
from bench.servers import UPSTREAM, Endpoint, Kind, Places, Target
from bench.store import Run, Settings, run_workload

SCALE: Final = 0.05
"""With which all presets, on three servers and with both exporters, take less than half an hour on two cores."""
OURS: Final[tuple[Kind, ...]] = ("sqlite", "postgres")
JUDGED: Final = "postgres"
"""The one whose figures the aims are for."""
_EXPORTED: Final[dict[Exporter, str]] = {
    "simple": "Each span in a request of its own, as upstream's `OtelTracer` sends them",
    "batch": "The spans of a second in one request, as upstream's `AgentOpsTracer` sends them",
}
_NAMES: Final = {"sqlite": "SQLite", "postgres": "PostgreSQL", UPSTREAM: "upstream"}

Progress = Callable[[str, int], None]
"""Told what is being done, and how many more rollouts are finished."""


@dataclass(frozen=True, slots=True)
class PresetRuns:
    """One preset on each of the servers.

    Attributes:
        workload: as it was run, scaled.
        runs: by the server; those that were measured.
    """

    name: str
    workload: Workload
    runs: Mapping[Kind, Run]

    def rate(self, kind: Kind) -> float | None:
        """Rollouts a second on a server, None when it was not measured."""
        run = self.runs.get(kind)
        return run.per_second if run else None

    def ratio(self, kind: Kind) -> float | None:
        """How many times the upstream server's rate a server reaches."""
        ours, theirs = self.rate(kind), self.rate(UPSTREAM)
        return ours / theirs if ours is not None and theirs else None

    def share(self, kind: Kind) -> float | None:
        """Which part of its ceiling a server reaches."""
        rate = self.rate(kind)
        return None if rate is None else rate / self.workload.ceiling

    @property
    def aim(self) -> str:
        """What it is to reach, in words."""
        if self.name in SLEEP_BOUND:
            return f"{SLEEP_SHARE:g} of ceiling"
        return f"{TIMES_UPSTREAM:g}× upstream"

    @property
    def reached(self) -> bool | None:
        """Whether it does; None when that was not measured."""
        if self.name in SLEEP_BOUND:
            share = self.share(JUDGED)
            return None if share is None else share >= SLEEP_SHARE
        ratio = self.ratio(JUDGED)
        return None if ratio is None else ratio >= TIMES_UPSTREAM

    @property
    def is_held_by_sleeps(self) -> bool:
        """Whether nothing but its sleeps holds it: no server could be much faster."""
        rate = self.rate(JUDGED)
        return rate is not None and rate >= SLEEP_SHARE * sleeps_allow(self.workload)

    def as_json(self) -> dict[str, Any]:
        """What is written of it."""
        return {
            "parameters": self.workload.parameters(),
            "ceiling": self.workload.ceiling,
            "published": PUBLISHED.get(self.name),
            "reached": self.reached,
            "runs": {kind: _run_as_json(run) for kind, run in self.runs.items()},
        }


def _run_as_json(run: Run) -> dict[str, Any]:
    return {
        "per_second": run.per_second,
        "seconds": run.seconds,
        "tasks": run.workload.total_tasks,
        "succeeded": run.tally.succeeded,
        "failed_calls": run.requests.failed,
        "turned_away": run.requests.turned_away,
        "stale": run.stale,
        "wrong_spans": run.wrong_spans,
        "sleeps_allow": sleeps_allow(run.workload),
        "cpu": run.cpu,
        "calls": run.calls(),
        "failures": run.tally.failures,
    }


def run_presets(
    workloads: Sequence[tuple[str, Workload]], targets: Sequence[Target], places: Places, progress: Progress
) -> list[PresetRuns]:
    """Run workloads on targets, each on a server of its own that has nothing in it; they take turns in going first.

    Raises:
        BenchError: a server or a driver broke.
    """
    return list(_runs(workloads, targets, places, progress))


def _runs(
    workloads: Sequence[tuple[str, Workload]], targets: Sequence[Target], places: Places, progress: Progress
) -> Iterator[PresetRuns]:
    for turn, (name, workload) in enumerate(workloads):
        runs: dict[Kind, Run] = {}
        for target in rotated(targets, turn):
            progress(f"{name} on {target}, exporter {workload.exporter}", 0)
            with places.open(target) as endpoint:
                if not isinstance(endpoint, Endpoint) or endpoint.base_url is None:
                    raise BenchError(f"{target} cannot be measured")
                settings = Settings(watched=endpoint.watched or {})
                runs[target.kind] = run_workload(endpoint.base_url, workload, settings, lambda done: progress("", done))
        yield PresetRuns(name, workload, {target.kind: runs[target.kind] for target in targets})


def failures(found: Sequence[PresetRuns]) -> list[str]:
    """What went wrong in words: nothing, if every task succeeded with all its spans."""
    return [
        f"{one.name} ({one.workload.exporter}) on {kind}: {run.tally.succeeded} of {run.workload.total_tasks} tasks "
        f"succeeded, {run.requests.failed} calls failed; {'; '.join(run.tally.failures)}"
        for one in found
        for kind, run in one.runs.items()
        if not run.complete
    ]


def show(console: Console, found: Sequence[PresetRuns]) -> None:
    """Print how fast each server was."""
    for exporter, some in _by_exporter(found):
        for title, (headings, cells) in ((_RATES, _rates(some)), (_COSTS, _costs(some))):
            table = Table(title=f"{title}, exporter {exporter}", title_justify="left", row_styles=["", "dim"])
            for heading in headings:
                table.add_column(heading, no_wrap=True, justify="left" if heading == "preset" else "right")
            for line in cells:
                table.add_row(*line)
            console.print(table)
    for failure in failures(found):
        console.print(failure, style="red", highlight=False, markup=False)


_RATES: Final = "Presets, rollouts a second"
_COSTS: Final = "CPU milliseconds of a rollout, and the calls"


def _by_exporter(found: Sequence[PresetRuns]) -> list[tuple[Exporter, list[PresetRuns]]]:
    groups: dict[Exporter, list[PresetRuns]] = {}
    for one in found:
        groups.setdefault(one.workload.exporter, []).append(one)
    return list(groups.items())


def _kinds(found: Sequence[PresetRuns]) -> list[Kind]:
    return list(dict.fromkeys(kind for one in found for kind in one.runs))


def _rates(found: Sequence[PresetRuns]) -> tuple[list[str], list[list[str]]]:
    kinds = _kinds(found)
    headings = ["preset", "tasks", *(_NAMES.get(kind, kind) for kind in kinds)]
    headings += ["ceiling", "sleeps allow", "published", "MongoDB", "aim", "reached"]
    cells: list[list[str]] = []
    for one in found:
        line = [one.name, f"{one.workload.total_tasks:,}"]
        for kind in kinds:
            ratio = one.ratio(kind) if kind != UPSTREAM else None
            line.append(number(one.rate(kind)) + (f", {times(ratio)}" if ratio is not None else ""))
        published = PUBLISHED.get(one.name, (None, None))
        allowed = number(sleeps_allow(one.workload))
        line += [number(one.workload.ceiling), allowed, *(number(value) for value in published), one.aim]
        held = not one.reached and one.is_held_by_sleeps
        line.append("–" if one.reached is None else "yes" if one.reached else "its sleeps" if held else "no")
        cells.append(line)
    return headings, cells


def _costs(found: Sequence[PresetRuns]) -> tuple[list[str], list[list[str]]]:
    headings = ["preset", "server", "server CPU", "database CPU", "driver CPU"]
    headings += ["claim P50 / P99 ms", "spans P50 / P99 ms", "end P50 / P99 ms", "turned away"]
    cells: list[list[str]] = []
    for one in found:
        for kind, run in one.runs.items():
            done = max(run.tally.succeeded, 1)
            spent = (run.cpu[who] * 1000 / done if who in run.cpu else None for who in ("server", "database", "driver"))
            calls = run.calls()
            quantiles = (calls.get(call, {}) for call in ("dequeue", "spans", "update"))
            line = [one.name, _NAMES.get(kind, kind), *(number(value) for value in spent)]
            line += [f"{number(values.get('p50'))} / {number(values.get('p99'))}" for values in quantiles]
            cells.append([*line, f"{run.requests.turned_away:,}"])
    return headings, cells


def lines(found: Sequence[PresetRuns], machine: Machine, scale: float) -> list[str]:
    """The part of the document."""
    made = sum(
        tally.succeeded + tally.failed
        for one in found
        for run in one.runs.values()
        for tally in run.requests.tallies.values()
    )
    text = [
        "## Presets",
        "",
        (
            f"Written by `python -m bench.compare --presets`: the field's workloads with {scale:g} times their tasks, "
            "an algorithm and its runners, on a fresh server each, one after the other with the same driver "
            "([what they do](benchmarks.md#an-algorithm-and-its-runners)). Rollouts a second, from the first enqueue "
            "until all are known to be finished, and how many times the upstream server's, in memory, of the same run. "
            "The ceiling is runners ÷ (rounds × sleep). What the sleeps allow is how fast these very rollouts would be "
            "if no call took any time; a batch that waits for the one before, and the longest rollout at the end, are "
            "in it. Where an aim is not reached but nine tenths of that are, it says that its sleeps hold it. "
            "Published are the upstream project's own figures of its server, in memory and on MongoDB, on "
            f"machines of 32 to 64 cores. {made:,} calls, none of which failed; every rollout succeeded, with all its "
            "spans. Calls that were turned away (503) were made again later, as the upstream client does."
        ),
        "",
        *(f"- {line}" for line in machine.lines()),
        "",
    ]
    for exporter, some in _by_exporter(found):
        text += [f"### {_EXPORTED[exporter]}", ""]
        for headings, cells in (_rates(some), _costs(some)):
            text += [table_row(headings), "|---|" + "--:|" * (len(headings) - 1)]
            text += [*(table_row(line) for line in cells), ""]
    return text


def chosen(patterns: Sequence[str], scale: float, exporters: Sequence[Exporter]) -> list[tuple[str, Workload]]:
    """The presets whose names match one of the patterns, all if there is none, with each exporter.

    Raises:
        BenchError: none does.
    """
    found = [
        (name, replace(workload.scaled(scale), exporter=exporter))
        for exporter in exporters
        for name, workload in PRESETS.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not found:
        raise BenchError(f"no preset matches {', '.join(patterns)}")
    return found
