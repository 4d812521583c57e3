"""`python -m bench.compare`: this store beside the upstream server, PGQueuer and the bare database, in one run.

With `--presets` it runs the workloads of `bench.store` on this store and on the upstream server instead.
"""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import document, preset_runs
from bench.databases import data_folder, postgres
from bench.machine import Machine, after, describe
from bench.measure import measure, steps
from bench.peer import peer_python
from bench.plan import Plan
from bench.presets import EXPORTERS, Exporter
from bench.processes import ROOT, BenchError
from bench.report import show
from bench.results import Samples, figures_of
from bench.scale import FULL, QUICK, Scale
from bench.scenarios import Choice, chosen_kinds, whole_plan
from bench.servers import OURS, UPSTREAM, Kind, Places, Target

EXIT_FAILED_CALLS: Final = 1
EXIT_CANNOT_RUN: Final = 2
SCALE_HELP: Final = f"Of the presets: times as many tasks ({preset_runs.SCALE:g})."
WIDTH: Final = 150
"""Of what is written into a file or a pipe."""
DOCUMENT: Final = ROOT / "docs" / "performance.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    drivers: tuple[str, ...]
    targets: str
    rounds: int | None
    quick: bool
    only: tuple[str, ...]
    postgres_url: str | None
    data_dir: Path | None
    peer: bool
    peer_venv: Path
    json_file: Path | None
    docs: Path | None
    presets: bool = False
    tasks: float | None = None
    exporter: Exporter | None = None

    def __post_init__(self) -> None:
        """Find out whether the options go together.

        Raises:
            BenchError: some are for the presets and some are not.
        """
        for_presets = {"--scale": self.tasks, "--exporter": self.exporter}
        for_others = {"--quick": self.quick, "--rounds": self.rounds}
        wrong = [name for name, value in (for_others if self.presets else for_presets).items() if value]
        if wrong:
            raise BenchError(f"{', '.join(wrong)}: {'not with' if self.presets else 'only with'} --presets")

    def scale(self) -> Scale:
        """How much is measured."""
        scale = QUICK if self.quick else FULL
        return replace(scale, rounds=self.rounds) if self.rounds else scale

    def plan(self) -> Plan:
        """What is measured.

        Raises:
            BenchError: nothing is, or a target does not exist.
        """
        plan = whole_plan(Choice(self.kinds(), self.drivers, self.peer, self.scale())).only(self.only)
        if not plan.metrics:
            raise BenchError(f"no metric matches {', '.join(self.only)}")
        return plan

    def kinds(self) -> list[Kind]:
        """Which of our stores are measured.

        Raises:
            BenchError: one of them does not exist.
        """
        try:
            return chosen_kinds(self.targets)
        except ValueError as error:
            raise BenchError(f"--targets: {error}") from None

    def document(self) -> Path | None:
        """Where the document goes: a run of a part of it would leave out the rest, so that one is asked for."""
        if self.presets:
            whole = not self.only and self.peer and not self.exporter and set(preset_runs.OURS) <= set(self.kinds())
            return self.docs or (DOCUMENT if whole else None)
        whole = not self.quick and not self.only and self.peer and set(self.targets.split(",")) == set(OURS)
        return self.docs or (DOCUMENT if whole and set(self.drivers) == {"lean", UPSTREAM} else None)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--driver", "drivers", multiple=True, type=click.Choice(["lean", UPSTREAM]), help="Repeatable (both).")
@click.option("--targets", default=",".join(OURS), metavar="LIST", help=f"Of ours: {', '.join(OURS)} (all).")
@click.option("--rounds", type=click.IntRange(1), metavar="N", help="How often each is measured (3; quick: 1).")
@click.option("--quick", is_flag=True, help="Fewer calls, smaller databases: a look in under two minutes.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only the metrics with such names. Repeatable.")
@click.option("--postgres", "postgres_url", metavar="URL", help="A PostgreSQL to create databases on (one of its own).")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where databases go, on a disk (temporary folder).")
@click.option("--peer/--no-peer", default=True, help="Whether to measure the upstream server and PGQueuer too (yes).")
@click.option("--peer-venv", type=click.Path(path_type=Path), default=ROOT / ".bench-peer", help="Their environment.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures there.")
@click.option(
    "--presets", is_flag=True, help="The workloads of bench.store instead, on ours and on the upstream server."
)
@click.option("--scale", "tasks", type=click.FloatRange(0.0, min_open=True), metavar="X", help=SCALE_HELP)
@click.option("--exporter", type=click.Choice(EXPORTERS), help="How their runners send spans (both).")
@click.option(
    "--docs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the document there (docs/performance.md, if it is a whole run).",
)
def main(**given: Any) -> None:
    """Measure this store side by side with others, and say how many times faster it is."""
    given["drivers"] = tuple(dict.fromkeys(given["drivers"])) or ("lean", UPSTREAM)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    # Also where whoever started us has told us to ignore it, as a shell tells what it runs in the background.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        options = Options(**given)
        failed = run_presets(options, console) if options.presets else run(options, console)
    except BenchError as error:
        console.print(f"bench.compare: {error}", style="red", highlight=False, markup=False)
        sys.exit(EXIT_CANNOT_RUN)
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped")
        sys.exit(128 + signal.SIGINT)
    if failed:
        console.print(f"{failed} calls or checks failed: no figure of this run counts", style="bold red")
        sys.exit(EXIT_FAILED_CALLS)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _prepared(options: Options, console: Console, *, peer: bool, database: bool) -> Iterator[tuple[Places, Machine]]:
    """What targets are started with, and the machine that they run on, as it was before."""
    folder = data_folder(options.data_dir)
    with contextlib.ExitStack() as stack:
        python = None
        if peer:
            with console.status(f"the upstream server's environment, {options.peer_venv}"):
                python = peer_python(options.peer_venv.resolve())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-bench-", dir=folder)))
        engine = stack.enter_context(postgres(options.postgres_url, folder)) if database else None
        machine = describe(work, engine)
        console.print(*machine.lines(), f"databases below {folder}", sep="\n", highlight=False)
        yield Places(work, engine, python), machine


def run(options: Options, console: Console) -> int:
    """Measure, print and write; returns how many calls failed.

    Raises:
        BenchError: it cannot be done.
    """
    plan = options.plan()
    scale = options.scale()
    needs_peer = options.peer or UPSTREAM in options.drivers
    needs_postgres = any(target.kind == "postgres" for one in plan.works for target in plan.targets_of(one))
    with _prepared(options, console, peer=needs_peer, database=needs_postgres) as (places, before):
        started = time.monotonic()
        samples = _measured(plan, scale, places, console)
        machine = after(before, places.folder)
    figures = figures_of(plan.metrics, samples)
    show(console, figures, samples, time.monotonic() - started)
    if options.json_file is not None:
        written = {figure.name: figure.as_json() for figure in figures}
        options.json_file.write_text(json.dumps(written, indent=1) + "\n")
    if (path := options.document()) is not None and not samples.failed:
        document.write(path, machine, figures, samples, scale.rounds)
        console.print(f"written: {path}", highlight=False)
    return samples.failed


def run_presets(options: Options, console: Console) -> int:
    """Run the presets, print and write; returns how many of them did not succeed in every way.

    Raises:
        BenchError: it cannot be done.
    """
    scale = options.tasks or preset_runs.SCALE
    workloads = preset_runs.chosen(options.only, scale, [options.exporter] if options.exporter else EXPORTERS)
    kinds: list[Kind] = [kind for kind in preset_runs.OURS if kind in options.kinds()]
    peers: list[Kind] = ["upstream"] if options.peer else []
    targets = [Target(kind) for kind in (*peers, *kinds)]
    if not targets:
        raise BenchError(f"--targets: the presets are for {', '.join(preset_runs.OURS)}")
    with _prepared(options, console, peer=options.peer, database="postgres" in kinds) as (places, before):
        started = time.monotonic()
        total = sum(workload.total_tasks for _, workload in workloads) * len(targets)
        with _progress(console, total) as progress:
            found = preset_runs.run_presets(workloads, targets, places, progress)
        machine = after(before, places.folder)
    preset_runs.show(console, found)
    console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    if options.json_file is not None:
        written = {f"{one.name}.{one.workload.exporter}": one.as_json() for one in found}
        options.json_file.write_text(json.dumps(written, indent=1) + "\n")
    failed = len(preset_runs.failures(found))
    if (path := options.document()) is not None and not failed:
        document.write_presets(path, preset_runs.lines(found, machine, scale))
        console.print(f"written: {path}", highlight=False)
    return failed


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar while the block runs: call what it yields with what is being done, and how much more was."""
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, advance=done, description=what or None)


def _measured(plan: Plan, scale: Scale, places: Places, console: Console) -> Samples:
    with _progress(console, steps(plan, scale.rounds)) as progress:
        return measure(plan, scale, places, progress)


if __name__ == "__main__":
    main()
