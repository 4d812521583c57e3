"""`lightning-sql demo`: a small training run, simulated, to watch a store at work.

An algorithm enqueues rollouts; runners claim them, write spans and finish them. Some fail and are
tried again, some hang until the watchdog takes them away. What the runners saw is then compared
with what the store says.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_api.client import LightningClient
from lightning_sql.errors import LightningError
from lightning_sql.records import (
    ROLLOUT_FINISHED,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    OtelResource,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    Span,
    TraceStatus,
)
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore

__all__ = ["Demo", "DemoOptions", "Report", "report_table", "run_demo", "show"]

STEP_SECONDS: Final = 0.03
"""How long a simulated model call takes, on average."""
TIMEOUT_SECONDS: Final = 1.0
"""After which a simulated rollout counts as hung."""
MAX_ATTEMPTS: Final = 3
REFRESH_SECONDS: Final = 0.5
SWEEP_SECONDS: Final = 0.5

FAILS: Final = 0.25
HANGS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to simulate."""

    rollouts: int = 200
    runners: int = 8
    seed: int = 0
    url: str | None = None
    """A running server to aim at; None is a store of the demo's own on a temporary SQLite file."""
    token: str | None = None


@dataclass(slots=True)
class Seen:
    """What the demo has seen so far."""

    claims: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(rollout id, attempt number) of every claim, by all runners."""
    spans: int = 0
    statuses: Counter[str] = field(default_factory=Counter[str])
    busy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened, as the store tells it, and whether that agrees with what the runners saw."""

    statuses: dict[str, int]
    attempts: int
    retries: int
    timeouts: int
    spans: int
    mean_reward: float
    seconds: float
    checks: dict[str, bool]

    @property
    def sound(self) -> bool:
        """Whether every check passed."""
        return all(self.checks.values())


class Demo:
    """One simulated run against a store."""

    def __init__(self, store: LightningStore, options: DemoOptions) -> None:
        self.store = store
        self.options = options
        self.seen = Seen()
        self.rollout_ids: list[str] = []
        self._done = asyncio.Event()

    async def run(self) -> Report:
        """Enqueue, work, wait until all is finished, and report.

        Raises:
            LightningError: the store does not answer.
        """
        begun = time.monotonic()
        await self._enqueue()
        workers = [self._runner(number) for number in range(self.options.runners)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in [*workers, self._sweeper()]]
            await self._watch()
            self._done.set()
            for task in tasks:
                # A runner that simulates a hang need not be waited for.
                task.cancel()
        return await self._report(time.monotonic() - begun)

    async def _enqueue(self) -> None:
        await self.store.add_resources({"prompt": PromptTemplate(template="Solve: {task}", engine="f-string")})
        config = RolloutConfig(
            timeout_seconds=TIMEOUT_SECONDS, max_attempts=MAX_ATTEMPTS, retry_condition=["failed", "timeout"]
        )
        requests = [
            EnqueueRolloutRequest(input={"task": f"{number} + {number}"}, mode="train", config=config)
            for number in range(self.options.rollouts)
        ]
        rollouts = await self.store.enqueue_many_rollouts(requests)
        self.rollout_ids = [rollout.rollout_id for rollout in rollouts]

    async def _runner(self, number: int) -> None:
        chance = random.Random(f"{self.options.seed}-{number}")
        mine = set(self.rollout_ids)
        worker_id = f"demo-runner-{number + 1}"
        while not self._done.is_set():
            claimed = await self.store.dequeue_rollout(worker_id=worker_id)
            if claimed is None:
                await asyncio.sleep(STEP_SECONDS)
            elif claimed.rollout_id in mine:
                self.seen.claims.append((claimed.rollout_id, claimed.attempt.sequence_id))
                self.seen.busy += 1
                try:
                    await self._work(claimed, chance)
                finally:
                    self.seen.busy -= 1

    async def _work(self, claimed: AttemptedRollout, chance: random.Random) -> None:
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        for step in range(chance.randint(2, 5)):
            await asyncio.sleep(STEP_SECONDS * chance.uniform(0.5, 1.5))
            sequence_id = await self.store.get_next_span_sequence_id(rollout_id, attempt_id)
            await self._span(claimed, sequence_id, "model call", {"gen_ai.usage.output_tokens": 20 * (step + 1)})
        if chance.random() < HANGS:
            await asyncio.sleep(2 * TIMEOUT_SECONDS)  # by now the watchdog has given the rollout to somebody else
            return
        failed = chance.random() < FAILS
        if not failed:
            sequence_id = await self.store.get_next_span_sequence_id(rollout_id, attempt_id)
            await self._span(claimed, sequence_id, "reward", {"reward": round(chance.random(), 3)})
        await self.store.update_attempt(rollout_id, attempt_id, status="failed" if failed else "succeeded")

    async def _span(
        self, claimed: AttemptedRollout, sequence_id: int, name: str, attributes: dict[str, str | float]
    ) -> None:
        now = time.time()
        stored = await self.store.add_span(
            Span(
                rollout_id=claimed.rollout_id,
                attempt_id=claimed.attempt.attempt_id,
                sequence_id=sequence_id,
                trace_id=f"{random.getrandbits(128):032x}",
                span_id=f"{random.getrandbits(64):016x}",
                parent_id=None,
                name=name,
                status=TraceStatus(status_code="OK"),
                attributes=dict(attributes),
                events=[],
                links=[],
                start_time=now - STEP_SECONDS,
                end_time=now,
                context=None,
                parent=None,
                resource=OtelResource(attributes={"service.name": "lightning-sql demo"}, schema_url=""),
            )
        )
        self.seen.spans += stored is not None

    async def _sweeper(self) -> None:
        while not self._done.is_set():
            await asyncio.sleep(SWEEP_SECONDS)
            await self.store.sweep()

    async def _watch(self) -> None:
        while True:
            self.seen.statuses = Counter(rollout.status for rollout in await self._rollouts())
            if all(status in ROLLOUT_FINISHED for status in self.seen.statuses):
                return
            await asyncio.sleep(REFRESH_SECONDS)

    async def _rollouts(self) -> Sequence[Rollout]:
        return (await self.store.query_rollouts(rollout_id_in=self.rollout_ids)).items

    async def _report(self, seconds: float) -> Report:
        rollouts = await self._rollouts()
        attempts: list[Attempt] = []
        numbers: dict[str, list[int]] = {}
        rewards: list[float] = []
        spans = 0
        for rollout in rollouts:
            of_rollout = (await self.store.query_attempts(rollout.rollout_id)).items
            attempts += of_rollout
            numbers[rollout.rollout_id] = [attempt.sequence_id for attempt in of_rollout]
            stored = (await self.store.query_spans(rollout.rollout_id)).items
            spans += len(stored)
            rewards += [float(value) for span in stored if isinstance(value := span.attributes.get("reward"), float)]
        known = {(rollout_id, number) for rollout_id, found in numbers.items() for number in found}
        return Report(
            statuses=dict(Counter(rollout.status for rollout in rollouts)),
            attempts=len(attempts),
            retries=len(attempts) - len(rollouts),
            timeouts=sum(attempt.status == "timeout" for attempt in attempts),
            spans=spans,
            mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
            seconds=seconds,
            checks={
                "every rollout is there and finished": len(rollouts) == len(self.rollout_ids)
                and all(rollout.status in ROLLOUT_FINISHED for rollout in rollouts),
                "no attempt was given to two runners": len(self.seen.claims) == len(set(self.seen.claims)),
                "every claim is in the store, and nothing else": known == set(self.seen.claims),
                "attempts are numbered without gap": all(
                    found == list(range(1, len(found) + 1)) for found in numbers.values()
                ),
                "every span that was acknowledged is stored": spans == self.seen.spans,
            },
        )


@asynccontextmanager
async def _store_of(options: DemoOptions) -> AsyncGenerator[LightningStore]:
    if options.url is not None:
        async with LightningClient(options.url, token=options.token) as client:
            await client.ping()
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="lightning-sql-demo-") as folder:
        database_url = f"sqlite:///{Path(folder) / 'demo.db'}"
        async with await open_store(database_url, scan_debounce_seconds=SWEEP_SECONDS) as store:
            yield store


def _state_line(demo: Demo) -> str:
    seen, runners = demo.seen, demo.options.runners
    retries = sum(number > 1 for _, number in seen.claims)
    statuses = "  ".join(f"{status} {count}" for status, count in sorted(seen.statuses.items()))
    work = f"runners busy {seen.busy}/{runners}  claims {len(seen.claims)}  retries {retries}  spans {seen.spans}"
    return f"{work}  {statuses}"


def _plain_line(demo: Demo) -> str:
    return f"{_finished(demo)}/{demo.options.rollouts} finished  {_state_line(demo)}"


def _finished(demo: Demo) -> int:
    return sum(count for status, count in demo.seen.statuses.items() if status in ROLLOUT_FINISHED)


async def show(demo: Demo, console: Console) -> Report:
    """Run a demo with its progress on a console: live on a terminal, otherwise a line now and then."""
    run = asyncio.create_task(demo.run())
    try:
        if not console.is_terminal:
            printed = -1
            while not run.done():
                if _finished(demo) // 20 > printed // 20:
                    printed = _finished(demo)
                    console.print(_plain_line(demo), soft_wrap=True)
                await asyncio.wait([run], timeout=REFRESH_SECONDS)
            report = await run
            console.print(_plain_line(demo), soft_wrap=True)
            return report
        progress = Progress(
            TextColumn("rollouts"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        bar = progress.add_task("rollouts", total=demo.options.rollouts)
        with Live(console=console, refresh_per_second=10, transient=True) as live:
            while not run.done():
                progress.update(bar, completed=_finished(demo))
                live.update(Group(progress, _state_line(demo)))
                await asyncio.wait([run], timeout=REFRESH_SECONDS)
        return await run
    finally:
        run.cancel()
        await asyncio.wait([run])


def report_table(report: Report) -> Table:
    """The closing table."""
    table = Table(title="What happened", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for status, count in sorted(report.statuses.items()):
        table.add_row(f"rollouts {status}", str(count))
    table.add_row("attempts", str(report.attempts))
    table.add_row("of these retries", str(report.retries))
    table.add_row("of these taken from a hung runner", str(report.timeouts))
    table.add_row("spans", str(report.spans))
    table.add_row("mean reward", f"{report.mean_reward:.3f}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    table.add_row("rollouts per second", f"{sum(report.statuses.values()) / report.seconds:.1f}")
    table.add_section()
    for check, passed in report.checks.items():
        table.add_row(check, "yes" if passed else "NO")
    return table


async def _demonstrate(options: DemoOptions, console: Console) -> Report:
    async with _store_of(options) as store:
        where = "an SQLite file of its own" if options.url is None else options.url
        console.print(f"{options.runners} runners, {options.rollouts} rollouts, on {where}", highlight=False)
        report = await show(Demo(store, options), console)
    console.print(report_table(report))
    return report


def run_demo(options: DemoOptions, console: Console | None = None) -> Report:
    """Run the demo on a console.

    Raises:
        LightningError: the store does not answer.
    """
    try:
        return asyncio.run(_demonstrate(options, Console() if console is None else console))
    except* LightningError as errors:
        first = errors.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        problem = first
    raise problem
