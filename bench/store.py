"""`python -m bench.store`: an algorithm and its runners against a server that is running."""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import rich_click as click
import uvloop
from rich.table import Table

from bench import families
from bench.algorithm import Algorithm, GaveUpError, check
from bench.cpu import tree_seconds
from bench.drivers.meter import quantile
from bench.drivers.rollouts import Requests, RolloutCalls
from bench.families import Tally
from bench.fleet import Fleet, fleet, jobs_of
from bench.ideal import sleeps_allow
from bench.presets import EXPORTERS, MODES, PRESETS, Workload, preset
from bench.processes import START_SECONDS, BenchError
from bench.report import number

PROCESSES: Final = min(os.cpu_count() or 1, 4)
POLLS_PER_SECOND: Final = 200
"""How often all runners together ask for a rollout while the queue is empty, unless they are told otherwise."""
POLL_SECONDS: Final = (0.5, 5.0)
"""The least and the most that one waits then; the most is what upstream's runner does."""
STALE_SECONDS: Final = 120.0
SHOWN_STALE: Final = 5
RUNNER_CALLS: Final = ("dequeue", "resources", "spans", "update", "heartbeat")
"""The kinds of calls whose latencies are those of the store under this load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a workload is run, beside what it is.

    Attributes:
        processes: how many the runners are spread over.
        poll_seconds: how long a runner waits after it found the queue empty; None for what follows from how many
            there are.
        stale_seconds: how long nothing at all may finish before what is unfinished counts as stale.
        watched: process ids by what they are, whose CPU time is measured.
    """

    processes: int = PROCESSES
    poll_seconds: float | None = None
    stale_seconds: float = STALE_SECONDS
    watched: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a workload came to.

    Attributes:
        seconds: from the first enqueue until all rollouts are known to be finished.
        tally: of tasks; the latencies are those of rollouts, from their claim to the end of their attempt.
        requests: all calls, by kind.
        stale: rollouts that did not finish.
        wrong_spans: spans that are missing, or should not be there.
        cpu: seconds by whom, of the run without its checks.
    """

    workload: Workload
    seconds: float
    tally: Tally
    requests: Requests
    stale: int
    wrong_spans: int
    cpu: dict[str, float]

    @property
    def per_second(self) -> float:
        """Rollouts a second that succeeded, with all their spans."""
        return self.tally.succeeded / self.seconds if self.seconds > 0 else 0.0

    @property
    def complete(self) -> bool:
        """Whether every task succeeded, and no call failed."""
        return self.tally.succeeded == self.workload.total_tasks and not self.tally.failed and not self.requests.failed

    def result(self, name: str, backend: str) -> families.Result:
        """What is shown and written of it."""
        runners = [self.requests.tallies[kind] for kind in RUNNER_CALLS if kind in self.requests.tallies]
        made = sum(tally.succeeded + tally.failed for tally in runners)
        extra: dict[str, Any] = {
            "ceiling": self.workload.ceiling,
            "share of it": self.per_second / self.workload.ceiling,
            "sleeps allow": sleeps_allow(self.workload),
            "requests/s": made / self.seconds if self.seconds > 0 else 0.0,
            "stale": self.stale,
            "wrong spans": self.wrong_spans,
            "failed calls": self.requests.failed,
            "repeated calls": self.requests.repeated,
            "turned away": self.requests.turned_away,
        }
        extra |= {f"{who} CPU s": seconds for who, seconds in self.cpu.items()}
        return families.Result(
            name=name,
            parameters=self.workload.parameters(),
            backend=backend,
            tasks=self.workload.total_tasks,
            seconds=self.seconds,
            tally=self.tally,
            extra=extra,
        )

    def calls(self) -> dict[str, dict[str, float]]:
        """Of each kind of call: how many, and P50, P95 and P99 in milliseconds."""
        found: dict[str, dict[str, float]] = {}
        for kind, tally in sorted(self.requests.tallies.items()):
            ordered = sorted(tally.latencies)
            shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
            found[kind] = {"calls": tally.succeeded, "failed": tally.failed} | (
                {name: quantile(ordered, share) * 1000 for name, share in shares.items()} if ordered else {}
            )
        return found


def run_workload(
    base_url: str, workload: Workload, settings: Settings, advance: Callable[[int], None] = lambda _: None
) -> Run:
    """Run a workload against a server whose queue is empty.

    Args:
        advance: told how many more rollouts are finished.

    Raises:
        BenchError: the server cannot be used, or a process of runners broke.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lightning-store-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(base_url.rstrip("/"), workload, settings, advance, Path(folder)))


async def _run(
    base_url: str, workload: Workload, settings: Settings, advance: Callable[[int], None], folder: Path
) -> Run:
    run = uuid.uuid4().hex[:8]
    calls = RolloutCalls(base_url)
    try:
        await _empty_queue(calls, base_url)
        jobs = jobs_of(
            workload.n_runners,
            settings.processes,
            base_url=base_url,
            run=run,
            max_rounds=workload.max_rounds,
            sleep_seconds=workload.sleep_seconds,
            poll_seconds=settings.poll_seconds or _poll_seconds(workload.n_runners),
            exporter=workload.exporter,
        )
        with fleet(jobs, folder) as runners:
            await runners.hear(START_SECONDS)
            algorithm = Algorithm(calls, workload, run, advance, settings.stale_seconds)
            return await _measured(algorithm, runners, calls, workload, settings, run)
    finally:
        await calls.close()


def _poll_seconds(runners: int) -> float:
    least, most = POLL_SECONDS
    return min(max(runners / POLLS_PER_SECOND, least), most)


async def _empty_queue(calls: RolloutCalls, base_url: str) -> None:
    try:
        queued = await calls.queued()
    except aiohttp.ClientConnectionError:
        raise BenchError(f"nobody answers at {base_url}") from None
    except families.FAILURES as error:
        raise BenchError(f"{base_url} is no server that can be used: {error}") from None
    if queued:
        raise BenchError(f"{queued} rollouts are in the queue of {base_url}: the runners would take them")


async def _measured(
    algorithm: Algorithm, runners: Fleet, calls: RolloutCalls, workload: Workload, settings: Settings, run: str
) -> Run:
    tally = Tally()
    before = {who: tree_seconds(pid) for who, pid in settings.watched.items()}
    used = time.process_time()
    runners.begin()
    started = time.perf_counter()
    gave_up = await _until_done(algorithm, runners)
    seconds = time.perf_counter() - started
    cpu = {who: tree_seconds(pid) - before[who] for who, pid in settings.watched.items()}
    driver = time.process_time() - used
    requests = algorithm.requests
    for report in await runners.stop(now=gave_up is not None):
        requests.add_json(report["requests"])
        done = Tally.from_json(report["rollouts"])
        tally.latencies.extend(done.latencies)
        for failure in done.failures:
            tally.fail(failure)
        driver += report["cpu"]
    if gave_up is not None:
        tally.fail(gave_up, times=0)
    wrong = await check(calls, algorithm, workload, run, tally)
    if stale := algorithm.stale:
        tally.fail(await _said_of_stale(algorithm, calls, stale), times=len(stale))
    for failed in (kind for kind in requests.tallies.values() if kind.failed):
        # In words only: what fails is counted in tasks, and as calls beside them.
        tally.fail(failed.failures[0], times=0)
    return Run(
        workload=workload,
        seconds=seconds,
        tally=tally,
        requests=requests,
        stale=len(stale),
        wrong_spans=wrong,
        cpu=cpu | {"driver": driver},
    )


async def _until_done(algorithm: Algorithm, runners: Fleet) -> str | None:
    """Let the algorithm work; why it gave up, if it did."""
    working = asyncio.create_task(algorithm.run())
    watching = asyncio.create_task(runners.watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        working.result()
    except GaveUpError as error:
        return str(error)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    return None


async def _said_of_stale(algorithm: Algorithm, calls: RolloutCalls, stale: list[str]) -> str:
    shown = stale[:SHOWN_STALE]
    statuses: dict[str, str] = {}
    with contextlib.suppress(*families.FAILURES):
        statuses = await calls.statuses(shown)
    named = (f"task {algorithm.tasks[one]} ({one}, {statuses.get(one, 'unknown')})" for one in shown)
    more = f" and {len(stale) - len(shown)} more" if len(stale) > len(shown) else ""
    return f"stale: {', '.join(named)}{more}"


def show_calls(bench: families.Bench, runs: Mapping[str, Run]) -> None:
    """Print how long each kind of call took."""
    table = Table(title="Calls", title_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("call", no_wrap=True)
    for heading in ("calls", "failed", "P50 ms", "P95 ms", "P99 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, run in runs.items():
        for kind, values in run.calls().items():
            counts = (f"{values[count]:,}" for count in ("calls", "failed"))
            table.add_row(name, kind, *counts, *(number(values.get(share)) for share in ("p50", "p95", "p99")))
    bench.console.print(table)


COUNT: Final = click.IntRange(1)


@click.command(context_settings=families.CONTEXT)
@click.option(
    "--preset", "name", type=click.Choice(list(PRESETS)), help="Start from one; what else is given changes it."
)
@click.option("--mode", type=click.Choice(MODES), help="How the algorithm enqueues (batch).")
@click.option("--total-tasks", type=COUNT, metavar="N", help="Rollouts, all together (1024).")
@click.option("--batch-size", type=COUNT, metavar="N", help="Of modes batch and batch_partial (128).")
@click.option("--remaining-tasks", type=COUNT, metavar="N", help="Unfinished when the next batch comes (512).")
@click.option("--concurrency", type=COUNT, metavar="N", help="Tasks at once in mode single (32).")
@click.option("--n-runners", type=COUNT, metavar="N", help="Runners, all together (32).")
@click.option("--max-rounds", type=COUNT, metavar="N", help="A rollout has from one to so many rounds (10).")
@click.option("--sleep-seconds", type=click.FloatRange(0.0), metavar="S", help="Of a round, on average (1.0).")
@click.option(
    "--exporter", type=click.Choice(EXPORTERS), help="How runners send spans: together, or each alone (batch)."
)
@click.option("--store-url", required=True, metavar="URL", help="The server, http://127.0.0.1:4747 for example.")
@click.option("--backend", default="server", metavar="NAME", help="What to call the server's database (server).")
@click.option("--scale", type=click.FloatRange(0.0, min_open=True), metavar="X", help="Times as many tasks (1.0).")
@click.option("--processes", type=COUNT, metavar="N", default=PROCESSES, help=f"Of the runners ({PROCESSES}).")
@click.option(
    "--poll-seconds",
    type=click.FloatRange(0.0, min_open=True),
    metavar="S",
    help="A runner waits after it found the queue empty (0.5 to 5.0, the more the more runners).",
)
@click.option(
    "--stale-seconds",
    type=click.FloatRange(0.0, min_open=True),
    default=STALE_SECONDS,
    metavar="S",
    help="Without a rollout that finishes before the unfinished ones count as stale (120).",
)
@families.summary_option
def main(
    name: str | None,
    scale: float | None,
    store_url: str,
    backend: str,
    processes: int,
    poll_seconds: float | None,
    stale_seconds: float,
    summary_file: Path | None,
    **given: Any,
) -> int:
    """Run an algorithm and its runners against a server, and check that everything they did is there."""
    workload = _workload(name, given).scaled(scale or 1.0)
    settings = Settings(processes=processes, poll_seconds=poll_seconds, stale_seconds=stale_seconds)
    bench = families.Bench("store", summary_file)
    title = name or workload.mode
    with bench.progress(title, workload.total_tasks) as advance:
        run = run_workload(store_url, workload, settings, advance)
    show_calls(bench, {title: run})
    status = bench.finish([run.result(title, backend)])
    return status if run.complete else families.EXIT_FAILED_TASKS


def _workload(name: str | None, given: Mapping[str, Any]) -> Workload:
    changes = {option: value for option, value in given.items() if value is not None}
    if name is not None:
        return replace(preset(name), **changes)
    default = Workload(
        mode="batch",
        total_tasks=1024,
        batch_size=128,
        remaining_tasks=512,
        concurrency=32,
        n_runners=32,
        max_rounds=10,
        sleep_seconds=1.0,
    )
    return replace(default, **changes)


if __name__ == "__main__":
    families.launch(main, "bench.store")
