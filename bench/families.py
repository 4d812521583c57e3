"""What the bench families share: counting calls, showing progress, a table, and a line in a file of summaries.

A family is a command of its own, `bench.collections`, `bench.micro` or `bench.store`:

    @click.command(context_settings=families.CONTEXT)
    @families.summary_option
    def main(summary_file: Path | None) -> int:
        bench = families.Bench("store", summary_file)
        with bench.progress("minimal", total=4096) as advance:
            tally = Tally()
            await tally.timed(store.enqueue_rollout(...))   # or tally.succeed(seconds), tally.fail("why")
            advance(1)
        return bench.finish([Result(name="minimal", parameters={"batch_size": 256}, backend="sqlite",
                                    tasks=4096, seconds=12.5, tally=tally)])

    if __name__ == "__main__":
        families.launch(main, "bench.store")
"""

# rich_click leaves out a type parameter of click's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from yarl import URL

from bench import machine
from bench.drivers.meter import FAILURES as CALL_FAILURES
from bench.drivers.meter import quantile
from bench.processes import BenchError
from bench.report import number
from lightning_sql.errors import LightningError

__all__ = [
    "CONTEXT",
    "EXIT_CANNOT_RUN",
    "EXIT_FAILED_TASKS",
    "FAILURES",
    "Bench",
    "Result",
    "Tally",
    "http_address",
    "launch",
    "summary_option",
]

T = TypeVar("T")

EXIT_FAILED_TASKS: Final = 1
EXIT_CANNOT_RUN: Final = 2
WIDTH: Final = 150
"""Of what is written into a file or a pipe."""
WORDS_KEPT: Final = 5
"""How many failures are kept in words; all of them are counted."""

FAILURES: Final = (*CALL_FAILURES, LightningError)
"""What a call can end with other than its answer, of a client as of a store."""

CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The context settings of every family's command."""

summary_option: Final = click.option(
    "--summary-file", type=click.Path(path_type=Path), metavar="FILE", help="Append a line of JSON for each result."
)


@dataclass(slots=True)
class Tally:
    """The calls of one kind: how many succeeded and failed, and how long those that succeeded took.

    Attributes:
        latencies: seconds of each call that was timed, in no particular order.
        failures: the first few failures in words.
    """

    succeeded: int = 0
    failed: int = 0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    failures: list[str] = field(default_factory=list)

    def succeed(self, seconds: float | None = None) -> None:
        """Count a success, and how long it took unless it was not timed."""
        self.succeeded += 1
        if seconds is not None:
            self.latencies.append(seconds)

    def fail(self, what: str, times: int = 1) -> None:
        """Count a failure, or so many of one kind."""
        self.failed += times
        if len(self.failures) < WORDS_KEPT:
            self.failures.append(what[:500])

    def check(self, right: bool, what: str) -> None:
        """Count a failure unless something that must hold does."""
        if not right:
            self.fail(what)

    def take_back(self, times: int, what: str) -> None:
        """Count so many successes as failures after all."""
        if times:
            self.succeeded -= times
            self.fail(f"{times} {what}", times)

    async def timed(self, call: Awaitable[T], right: Callable[[T], bool] | None = None) -> T | None:
        """Await a call, time it and count it.

        Args:
            call: what to wait for.
            right: whether the answer is what it must be; every answer is when it is not given.

        Returns:
            The answer, None when the call failed.
        """
        started = time.perf_counter()
        try:
            answer = await call
        except FAILURES as error:
            self.fail(f"{type(error).__name__}: {error}")
            return None
        seconds = time.perf_counter() - started
        if right is not None and not right(answer):
            self.fail(f"not the right answer: {answer!r}")
            return None
        self.succeed(seconds)
        return answer

    def add(self, other: Tally) -> None:
        """Count what another tally has counted too."""
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.latencies.extend(other.latencies)
        self.failures = (self.failures + other.failures)[:WORDS_KEPT]

    @classmethod
    def sum(cls, tallies: Iterable[Tally]) -> Tally:
        """One tally of them all."""
        total = cls()
        for tally in tallies:
            total.add(tally)
        return total

    def as_json(self) -> dict[str, Any]:
        """What another process makes the same tally of with `from_json`."""
        samples = b64encode(self.latencies.tobytes()).decode()
        return {
            "succeeded": self.succeeded,
            "failed": self.failed,
            "latencies": samples,
            "failures": self.failures,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Tally:
        """The tally that another process of this machine has written with `as_json`."""
        latencies = array("d", b64decode(given["latencies"]))
        return cls(given["succeeded"], given["failed"], latencies, list(given["failures"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one benchmark came to.

    Attributes:
        name: of the benchmark within its family.
        parameters: what it was run with; JSON values.
        backend: `memory`, `sqlite`, `postgres`, or what is known of it.
        tasks: how many should have succeeded.
        seconds: of wall time, from the common start to the last end.
        tally: which tasks succeeded and failed, and the latencies.
        extra: further figures, JSON values; printed below the table.
    """

    name: str
    parameters: Mapping[str, Any]
    backend: str
    tasks: int
    seconds: float
    tally: Tally
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every task succeeded, and nothing failed."""
        return self.tally.succeeded == self.tasks and self.tally.failed == 0

    @property
    def per_second(self) -> float:
        """Tasks that succeeded, a second."""
        return self.tally.succeeded / self.seconds if self.seconds > 0 else 0.0

    def quantiles(self) -> tuple[float, float, float] | tuple[None, None, None]:
        """P50, P95 and P99 of the latencies in seconds, exactly; None when no call was timed."""
        if not self.tally.latencies:
            return None, None, None
        ordered = sorted(self.tally.latencies)
        return quantile(ordered, 0.50), quantile(ordered, 0.95), quantile(ordered, 0.99)


class Bench:
    """One run of a family: what it shows and what it writes.

    Args:
        family: `collections`, `micro` or `store`.
        summary_file: where a line of JSON for each result is appended, None for nowhere.

    Raises:
        BenchError: the summary file cannot be written.
    """

    def __init__(self, family: str, summary_file: Path | None) -> None:
        self.console: Final = Console(width=None if sys.stdout.isatty() else WIDTH)
        self._family = family
        self._summary_file = summary_file
        if summary_file is not None:
            # Found out now rather than when all has been measured.
            self._append("")

    @contextlib.contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar on the terminal while the block runs; call what it yields with how many more are done."""
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda done: bar.advance(task, done)

    def finish(self, results: Sequence[Result]) -> int:
        """Print the results and append them to the summary file.

        Returns:
            What the command must return: 0, or `EXIT_FAILED_TASKS` unless all tasks succeeded.
        """
        self.console.print(self._table(results))
        for result in results:
            self._print_below(result)
        facts = machine.facts()
        self._append("".join(json.dumps(self._summary(result, facts)) + "\n" for result in results))
        return 0 if all(result.complete for result in results) else EXIT_FAILED_TASKS

    def _table(self, results: Sequence[Result]) -> Table:
        table = Table(title=f"bench.{self._family}", title_justify="left")
        table.add_column("benchmark", no_wrap=True)
        table.add_column("backend", no_wrap=True)
        headings = ("tasks", "succeeded", "failed", "seconds", "per second", "P50 ms", "P95 ms", "P99 ms")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for result in results:
            counts = (f"{count:,}" for count in (result.tasks, result.tally.succeeded, result.tally.failed))
            latencies = (None if value is None else value * 1000 for value in result.quantiles())
            figures = (number(value) for value in (result.seconds, result.per_second, *latencies))
            style = None if result.complete else "red"
            table.add_row(escape(result.name), escape(result.backend), *counts, *figures, style=style)
        return table

    def _print_below(self, result: Result) -> None:
        if result.extra:
            words = ", ".join(f"{name} {_written(value)}" for name, value in result.extra.items())
            self.console.print(f"{result.name}: {words}", highlight=False, markup=False)
        for failure in result.tally.failures:
            self.console.print(f"{result.name}: {failure}", style="red", highlight=False, markup=False)

    def _summary(self, result: Result, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What is written of a result; latencies in seconds."""
        p50, p95, p99 = result.quantiles()
        return {
            "family": self._family,
            "name": result.name,
            "parameters": dict(result.parameters),
            "backend": result.backend,
            "tasks": result.tasks,
            "succeeded": result.tally.succeeded,
            "failed": result.tally.failed,
            "seconds": result.seconds,
            "per_second": result.per_second,
            "p50": p50,
            "p95": p95,
            "p99": p99,
            **({"extra": dict(result.extra)} if result.extra else {}),
            **({"failures": result.tally.failures} if result.tally.failures else {}),
            "time": time.time(),
            "machine": dict(facts),
        }

    def _append(self, text: str) -> None:
        if self._summary_file is None:
            return
        try:
            with self._summary_file.open("a") as file:
                file.write(text)
        except OSError as error:
            raise BenchError(f"the summary file {self._summary_file} cannot be written: {error.strerror}") from None


def _written(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def http_address(option: str, given: str) -> str:
    """The address of a server as an option gives it, without a slash at its end.

    Raises:
        BenchError: it is none; the message does not repeat it, since it may hold a password.
    """
    try:
        url = URL(given)
        if url.scheme in ("http", "https") and url.host and not url.query_string and not url.fragment:
            return given.rstrip("/")
    except ValueError:
        pass
    raise BenchError(f"{option} must be an address such as http://127.0.0.1:4747")


def launch(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a family's command, whose function returns the exit status, and exit with it.

    What is wrong with its arguments or surroundings is one line on stderr and exit status 2.
    """
    # Also where whoever started us has told us to ignore it, as a shell tells what it runs in the background.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = command.main(arguments, prog_name=f"python -m {program}", standalone_mode=False)
    except (click.ClickException, BenchError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_RUN)
    except (click.Abort, KeyboardInterrupt):
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    sys.exit(status)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
