"""`python -m bench.quick`: every family of benchmarks once, with few tasks, on databases of its own.

It says whether everything succeeded, and nothing more: the figures of so short a run say little.
"""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import rich_click as click
from rich.console import Console
from rich.table import Table

from bench import families
from bench.databases import data_folder, postgres
from bench.presets import PRESETS
from bench.processes import BenchError, started
from bench.report import number
from bench.servers import Endpoint, Kind, Places, Target

TASKS: Final = 300
"""Of a preset, at least, so that most of its runners have something to do; it is run with a part of its own tasks."""
SCALE: Final = 0.02
CONTENDED: Final = 1000
"""Tasks of a collection benchmark."""
SERVED_TASKS: Final = 500
"""Tasks of a single operation."""
STEP_SECONDS: Final = 240.0
"""After which one benchmark has hung."""
TRACKED: Final = ("--tracker", "prometheus")
"""Options of the servers, so that there are metrics to read."""
SERVED: Final[tuple[Kind, ...]] = ("sqlite", "postgres")
COLLECTIONS: Final = ("insert", "dequeue", "inc")
BACKENDS: Final = ("memory", "sqlite", "postgres")
MICRO: Final = ("worker", "dequeue-empty", "rollout", "dequeue-update-attempt", "dequeue-only", "metrics")


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark.

    Attributes:
        name: `FAMILY.BENCHMARK.BACKEND`.
        arguments: of its family's command, without where to measure.
        server: which server it is for, None if it needs none.
    """

    name: str
    arguments: tuple[str, ...]
    server: Kind | None = None

    @property
    def module(self) -> str:
        """The command of its family."""
        return f"bench.{self.name.partition('.')[0]}"


def every_step() -> list[Step]:
    """Every benchmark of every family."""
    steps = [
        Step(
            f"collections.{benchmark}.{backend}",
            (benchmark, "--backend", backend, "--total-tasks", str(CONTENDED), "--concurrency", "32"),
        )
        for backend in BACKENDS
        for benchmark in COLLECTIONS
    ]
    for server in SERVED:
        for benchmark in MICRO:
            tasks = () if benchmark == "metrics" else ("--total-tasks", str(SERVED_TASKS))
            steps.append(Step(f"micro.{benchmark}.{server}", (benchmark, *tasks), server))
        for name, workload in PRESETS.items():
            scale = max(SCALE, TASKS / workload.total_tasks) if name not in ("minimal", "heavy-traces") else SCALE
            steps.append(Step(f"store.{name}.{server}", ("--preset", name, "--scale", f"{scale:.4g}"), server))
    return steps


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a benchmark.

    Attributes:
        summaries: the lines that it wrote.
        said: what it printed, if it did not succeed.
    """

    step: Step
    seconds: float
    status: int
    summaries: Sequence[dict[str, Any]]
    said: str

    @property
    def right(self) -> bool:
        """Whether every task of it succeeded."""
        counted = all(one["succeeded"] == one["tasks"] and not one["failed"] for one in self.summaries)
        stale = sum(one.get("extra", {}).get("stale", 0) for one in self.summaries)
        return self.status == 0 and bool(self.summaries) and counted and not stale


def do(step: Step, more: Sequence[str], folder: Path) -> Done:
    """Run a benchmark's command."""
    file = folder / f"{step.name}.jsonl"
    command = [sys.executable, "-m", step.module, *step.arguments, *more, "--summary-file", str(file)]
    begun = time.monotonic()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(command, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=STEP_SECONDS)
            status = process.returncode
        except subprocess.TimeoutExpired:
            said, status = f"it did not end within {STEP_SECONDS:.0f} s".encode(), -1
    summaries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Done(step, time.monotonic() - begun, status, summaries, said.decode(errors="replace"))


@contextlib.contextmanager
def _served(places: Places, server: Kind | None) -> Iterator[list[str]]:
    """A server of a kind, and the options that say where it is."""
    if server is None:
        yield []
        return
    with places.open(Target(server)) as endpoint:
        if not isinstance(endpoint, Endpoint) or endpoint.base_url is None:
            raise BenchError(f"{server} cannot be measured")
        yield ["--store-url", endpoint.base_url, "--backend", server]


def do_all(steps: Sequence[Step], places: Places, advance: Callable[[str, int], None]) -> list[Done]:
    """Run benchmarks, those for a server one after the other on the same one."""
    done: list[Done] = []
    servers: list[Kind | None] = list(dict.fromkeys(step.server for step in steps))
    for server in servers:
        with _served(places, server) as where:
            for step in (step for step in steps if step.server == server):
                advance(step.name, 0)
                more = list(where)
                if server is None and "postgres" in step.arguments and places.postgres_url:
                    more += ["--database-url", places.postgres_url]
                done.append(do(step, more, places.folder))
                advance(step.name, 1)
    return done


def show(console: Console, done: Sequence[Done]) -> None:
    """Print what came of each, and what those that did not succeed said."""
    table = Table(title="Every family and preset, in short", title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    for heading in ("tasks", "succeeded", "stale", "per second", "P50 ms", "P99 ms", "took s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in done:
        for summary in one.summaries or [{}]:
            stale = summary.get("extra", {}).get("stale")
            latencies = (summary.get("p50"), summary.get("p99"))
            table.add_row(
                one.step.name,
                *(number(summary.get(name)) for name in ("tasks", "succeeded")),
                number(stale),
                number(summary.get("per_second")),
                *(number(None if value is None else value * 1000) for value in latencies),
                number(one.seconds),
                style=None if one.right else "red",
            )
    console.print(table)
    for one in (one for one in done if not one.right):
        console.print(f"{one.step.name} did not succeed:\n{one.said}", style="red", highlight=False, markup=False)


@click.command(context_settings=families.CONTEXT)
@click.option("--only", multiple=True, metavar="GLOB", help="Only the benchmarks with such names. Repeatable.")
@click.option("--postgres", "postgres_url", metavar="URL", help="A PostgreSQL to create databases on (one of its own).")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where databases go, on a disk (temporary folder).")
@families.summary_option
def main(only: tuple[str, ...], postgres_url: str | None, data_dir: Path | None, summary_file: Path | None) -> int:
    """Run every family of benchmarks once, with few tasks, and say whether all of them succeeded."""
    steps = [step for step in every_step() if not only or any(fnmatchcase(step.name, glob) for glob in only)]
    if not steps:
        raise BenchError(f"no benchmark matches {', '.join(only)}")
    bench = families.Bench("quick", summary_file)
    folder = data_folder(data_dir)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-bench-", dir=folder)))
        needed = any("postgres" in (step.server, *step.arguments) for step in steps)
        engine = stack.enter_context(postgres(postgres_url, folder)) if needed else None
        with bench.progress("", len(steps)) as advance:
            done = do_all(steps, Places(work, engine, None, TRACKED), lambda _, more: advance(more))
    show(bench.console, done)
    wrong = sum(not one.right for one in done)
    bench.console.print(f"{len(done)} benchmarks in {time.monotonic() - begun:.0f} s, {wrong} did not succeed")
    if summary_file is not None:
        with summary_file.open("a") as file:
            file.writelines(json.dumps(summary) + "\n" for one in done for summary in one.summaries)
    return families.EXIT_FAILED_TASKS if wrong else 0


if __name__ == "__main__":
    families.launch(main, "bench.quick")
