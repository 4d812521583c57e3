"""`lightning-sql demo`: a small training run, simulated, to watch a store at work.

An algorithm enqueues rollouts; runners claim them, write spans and finish them. Some fail and are
tried again, some hang until the watchdog takes them away. What the runners saw is then compared
with what the store says.

What each attempt does follows from the seed, the rollout's number and the attempt's, not from which
runner gets it or how fast the machine is.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_api.client import LightningClient
from lightning_api.client_transport import displayed_address
from lightning_sql.errors import ConfigurationError, LightningError, RecordNotFoundError
from lightning_sql.records import (
    ATTEMPT_ACTIVE,
    ROLLOUT_ACTIVE,
    ROLLOUT_FINISHED,
    ROLLOUT_QUEUED,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    OtelResource,
    Rollout,
    RolloutConfig,
    Span,
    TraceStatus,
)
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore

__all__ = ["MAX_ATTEMPTS", "Demo", "DemoOptions", "Report", "Script", "report_table", "run_demo", "script_of", "show"]

MAX_ATTEMPTS: Final = 3
REFRESH_SECONDS: Final = 0.5
SWEEP_SECONDS: Final = 0.5

FAILS: Final = 0.25
"""The share of attempts that fail."""
HANGS: Final = 0.02
"""The share of rollouts whose first attempt hangs; at least one does."""

SpanKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to simulate."""

    rollouts: int = 200
    runners: int = 8
    seed: int = 0
    url: str | None = None
    """A running server to aim at; None is a store of the demo's own on a temporary SQLite file."""
    token: str | None = field(default=None, repr=False)
    step_seconds: float = 0.03
    """How long a simulated model call takes, on average."""
    timeout_seconds: float = 3.0
    """After which an attempt counts as hung; far longer than one takes, even on a slow machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a simulated attempt does."""

    pauses: tuple[float, ...]
    """Seconds before each model call; every call leaves a span."""
    ending: Literal["succeeded", "failed", "hangs"]
    reward: float
    """Given, in one more span, if the attempt succeeds."""


@cache
def _hanging(seed: int, rollouts: int) -> frozenset[int]:
    return frozenset(random.Random(seed).sample(range(rollouts), ceil(rollouts * HANGS)))


def script_of(options: DemoOptions, number: int, attempt: int) -> Script:
    """What attempt `attempt` (from 1) of rollout `number` (from 0) does."""
    chance = random.Random(f"{options.seed}/{number}/{attempt}")
    pauses = tuple(options.step_seconds * chance.uniform(0.5, 1.5) for _ in range(chance.randint(1, 3)))
    fails, reward = chance.random() < FAILS, round(chance.random(), 3)
    hangs = attempt == 1 and number in _hanging(options.seed, options.rollouts)
    return Script(pauses=pauses, ending="hangs" if hangs else "failed" if fails else "succeeded", reward=reward)


@dataclass(slots=True)
class Seen:
    """What the demo has seen so far."""

    begun: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """How long it took, once all is finished."""

    claims: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(rollout id, attempt number) of every claim, by all runners."""
    sent: set[SpanKey] = field(default_factory=set[SpanKey])
    acknowledged: set[SpanKey] = field(default_factory=set[SpanKey])
    """The spans that the store said it has."""
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
        self.numbers: dict[str, int] = {}
        """The number of each rollout, by its id, in the order in which they were enqueued."""
        self._done = asyncio.Event()

    async def run(self) -> Report:
        """Enqueue, work, wait until all is finished, and report.

        Raises:
            ConfigurationError: the store's queue has rollouts of others, which the runners would take.
            LightningError: the store does not answer.
        """
        await self._refuse_a_queue_of_others()
        self.seen.begun = time.monotonic()
        await self._enqueue()
        async with asyncio.TaskGroup() as group:
            for number in range(self.options.runners):
                group.create_task(self._runner(f"demo-runner-{number + 1}"))
            sweeper = group.create_task(self._sweeper())
            await self._watch()
            seconds = self.seen.seconds = time.monotonic() - self.seen.begun
            # The runners end what they are at, so that what they saw is whole.
            self._done.set()
            sweeper.cancel()
        return await self._report(seconds)

    async def withdraw(self) -> None:
        """Cancel what is not finished: nothing of an interrupted run stays in a queue that others use, too."""
        unfinished = await self.store.query_rollouts(
            rollout_id_in=list(self.numbers), status_in=[*ROLLOUT_QUEUED, *ROLLOUT_ACTIVE]
        )
        for rollout in unfinished.items:
            await self.store.update_rollout(rollout.rollout_id, status="cancelled")

    async def _refuse_a_queue_of_others(self) -> None:
        waiting = (await self.store.query_rollouts(status_in=[*ROLLOUT_QUEUED], limit=1)).total
        if waiting:
            raise ConfigurationError(
                f"the queue holds {waiting} rollouts that the demo's runners would take: "
                "aim it at a server with an empty queue, or with a --partition of its own"
            )

    async def _enqueue(self) -> None:
        config = RolloutConfig(
            timeout_seconds=self.options.timeout_seconds,
            max_attempts=MAX_ATTEMPTS,
            retry_condition=["failed", "timeout"],
        )
        requests = [
            EnqueueRolloutRequest(input={"task": f"{number} + {number}"}, mode="train", config=config)
            for number in range(self.options.rollouts)
        ]
        rollouts = await self.store.enqueue_many_rollouts(requests)
        self.numbers = {rollout.rollout_id: number for number, rollout in enumerate(rollouts)}

    async def _runner(self, worker_id: str) -> None:
        while not self._done.is_set():
            claimed = await self.store.dequeue_rollout(worker_id=worker_id)
            if claimed is None:
                await asyncio.sleep(self.options.step_seconds)
                continue
            if claimed.rollout_id not in self.numbers:
                await self.store.update_rollout(claimed.rollout_id, status="requeuing")
                raise ConfigurationError(
                    "somebody else began to use this queue: the demo gave back the rollout that it got, and ends"
                )
            self.seen.claims.append((claimed.rollout_id, claimed.attempt.sequence_id))
            self.seen.busy += 1
            try:
                await self._work(claimed)
            finally:
                self.seen.busy -= 1

    async def _work(self, claimed: AttemptedRollout) -> None:
        rollout_id, attempt = claimed.rollout_id, claimed.attempt
        script = script_of(self.options, self.numbers[rollout_id], attempt.sequence_id)
        for step, pause in enumerate(script.pauses):
            await asyncio.sleep(pause)
            await self._span(attempt, "model call", {"gen_ai.usage.output_tokens": 20 * (step + 1)})
        if script.ending == "hangs":
            await self._hang(attempt)
            return
        if script.ending == "succeeded":
            await self._span(attempt, "reward", {"reward": script.reward})
        await self.store.update_attempt(rollout_id, attempt.attempt_id, status=script.ending)

    async def _hang(self, attempt: Attempt) -> None:
        """Give no sign of life until the watchdog has given the rollout up."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            known = (await self.store.query_attempts(attempt.rollout_id)).items
            if not any(other.attempt_id == attempt.attempt_id and other.status in ATTEMPT_ACTIVE for other in known):
                return

    async def _span(self, attempt: Attempt, name: str, attributes: dict[str, str | float]) -> None:
        sequence_id = await self.store.get_next_span_sequence_id(attempt.rollout_id, attempt.attempt_id)
        now = time.time()
        span = Span(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt.attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{random.getrandbits(128):032x}",
            span_id=f"{random.getrandbits(64):016x}",
            parent_id=None,
            name=name,
            status=TraceStatus(status_code="OK"),
            attributes=dict(attributes),
            events=[],
            links=[],
            start_time=now - self.options.step_seconds,
            end_time=now,
            context=None,
            parent=None,
            resource=OtelResource(attributes={"service.name": "lightning-sql demo"}, schema_url=""),
        )
        self.seen.sent.add(_key(span))
        if await self.store.add_span(span) is not None:
            self.seen.acknowledged.add(_key(span))

    async def _sweeper(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.store.sweep()

    async def _watch(self) -> None:
        while True:
            self.seen.statuses = Counter(rollout.status for rollout in await self._rollouts())
            if all(status in ROLLOUT_FINISHED for status in self.seen.statuses):
                return
            await asyncio.sleep(REFRESH_SECONDS)

    async def _rollouts(self) -> Sequence[Rollout]:
        return (await self.store.query_rollouts(rollout_id_in=list(self.numbers))).items

    async def _report(self, seconds: float) -> Report:
        rollouts = await self._rollouts()
        attempts: list[Attempt] = []
        numbers: dict[str, list[int]] = {}
        rewards: list[float] = []
        spans: list[SpanKey] = []
        for rollout in rollouts:
            of_rollout = (await self.store.query_attempts(rollout.rollout_id)).items
            attempts += of_rollout
            numbers[rollout.rollout_id] = [attempt.sequence_id for attempt in of_rollout]
            stored = (await self.store.query_spans(rollout.rollout_id)).items
            spans += [_key(span) for span in stored]
            rewards += [float(value) for span in stored if isinstance(value := span.attributes.get("reward"), float)]
        known = {(rollout_id, number) for rollout_id, found in numbers.items() for number in found}
        return Report(
            statuses=dict(Counter(rollout.status for rollout in rollouts)),
            attempts=len(attempts),
            retries=len(attempts) - len(rollouts),
            timeouts=sum(attempt.status == "timeout" for attempt in attempts),
            spans=len(spans),
            mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
            seconds=seconds,
            checks={
                "every rollout is there and finished": len(rollouts) == len(self.numbers)
                and all(rollout.status in ROLLOUT_FINISHED for rollout in rollouts),
                "no rollout was claimed twice for one attempt": len(self.seen.claims) == len(set(self.seen.claims)),
                "every claim is in the store, and nothing else": known == set(self.seen.claims),
                "attempts are numbered without gap": all(
                    found == list(range(1, len(found) + 1)) for found in numbers.values()
                ),
                # A span whose acknowledgement was lost may be stored; one that nobody sent may not.
                "every acknowledged span is stored, and once": self.seen.acknowledged <= set(spans) <= self.seen.sent
                and len(spans) == len(set(spans)),
            },
        )


def _key(span: Span) -> SpanKey:
    return span.rollout_id, span.attempt_id, span.span_id


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigurationError("--url must be the address of a server, such as http://127.0.0.1:4747")
    return url


@asynccontextmanager
async def _store_of(options: DemoOptions) -> AsyncGenerator[LightningStore]:
    if options.url is not None:
        async with LightningClient(_checked_url(options.url), token=options.token) as client:
            try:
                await client.ping()
            except (RecordNotFoundError, ValueError):
                where = displayed_address(options.url)
                raise ConfigurationError(f"what answers at {where} is no lightning-sql server") from None
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="lightning-sql-demo-") as folder:
        database_url = f"sqlite:///{Path(folder) / 'demo.db'}"
        async with await open_store(database_url, scan_debounce_seconds=SWEEP_SECONDS) as store:
            yield store


def _state(demo: Demo) -> tuple[str, str]:
    """What the runners do, and what has become of the rollouts."""
    seen, runners = demo.seen, demo.options.runners
    retries = sum(number > 1 for _, number in seen.claims)
    seconds = time.monotonic() - seen.begun if seen.seconds is None else seen.seconds
    rate = _finished(demo) / max(seconds, 1e-9)
    work = f"runners {seen.busy} busy, {runners - seen.busy} idle  retries {retries}  spans {len(seen.acknowledged)}"
    statuses = "  ".join(f"{status} {count}" for status, count in sorted(seen.statuses.items()))
    return f"{work}  {rate:.1f} rollouts/s", statuses


def _plain_line(demo: Demo) -> str:
    return "  ".join([f"{_finished(demo)}/{demo.options.rollouts} finished", *filter(None, _state(demo))])


def _finished(demo: Demo) -> int:
    return sum(count for status, count in demo.seen.statuses.items() if status in ROLLOUT_FINISHED)


async def show(demo: Demo, console: Console) -> Report:
    """Run a demo with its progress on a console: live on a terminal, otherwise a line for each tenth of it.

    Raises:
        LightningError: as `Demo.run` does, alone or in an exception group.
    """
    run = asyncio.create_task(demo.run())
    try:
        return await (_show_live if console.is_terminal else _show_lines)(run, demo, console)
    finally:
        run.cancel()
        await asyncio.wait([run])


async def _show_lines(run: asyncio.Task[Report], demo: Demo, console: Console) -> Report:
    tenth = 0
    while not run.done():
        await asyncio.wait([run], timeout=REFRESH_SECONDS)
        # The last tenth is everything, which only the end of the run can tell.
        if not run.done() and tenth < (now := min(10 * _finished(demo) // demo.options.rollouts, 9)):
            tenth = now
            console.print(_plain_line(demo), soft_wrap=True, highlight=False)
    report = await run
    console.print(_plain_line(demo), soft_wrap=True, highlight=False)
    return report


async def _show_live(run: asyncio.Task[Report], demo: Demo, console: Console) -> Report:
    progress = Progress(
        TextColumn("rollouts"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    bar = progress.add_task("rollouts", total=demo.options.rollouts)
    with Live(console=console, refresh_per_second=10, transient=True) as live:
        while not run.done():
            progress.update(bar, completed=_finished(demo))
            live.update(Group(progress, *_state(demo)))
            await asyncio.wait([run], timeout=REFRESH_SECONDS)
    return await run


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
        where = "an SQLite file of its own" if options.url is None else displayed_address(options.url)
        console.print(f"{options.runners} runners, {options.rollouts} rollouts, on {where}", highlight=False)
        demo = Demo(store, options)
        try:
            report = await show(demo, console)
        except BaseException:
            if options.url is not None:
                with suppress(LightningError):
                    await demo.withdraw()
            raise
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
