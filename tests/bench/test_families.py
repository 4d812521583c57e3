"""What the bench families share: counting, the table, the summary file, and complaints in one line."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich_click as click

from bench import families
from bench.families import Bench, Result, Tally
from bench.processes import BenchError
from lightning_sql.errors import RecordNotFoundError


async def answering(value: Any) -> Any:
    return value


async def failing(error: Exception) -> Any:
    raise error


def tally_of(*latencies: float, failed: int = 0) -> Tally:
    tally = Tally()
    for seconds in latencies:
        tally.succeed(seconds)
    for number in range(failed):
        tally.fail(f"failure {number}")
    return tally


def result_of(tally: Tally, tasks: int = 4, **changes: Any) -> Result:
    given: dict[str, Any] = {"name": "try", "parameters": {"n": 1}, "backend": "memory", "seconds": 2.0}
    return Result(**given | changes, tasks=tasks, tally=tally)


class TestTally:
    def test_each_call_is_a_success_or_a_failure(self) -> None:
        async def calls() -> Tally:
            tally = Tally()
            assert await tally.timed(answering(5)) == 5
            assert await tally.timed(answering(None)) is None
            assert await tally.timed(failing(RecordNotFoundError("gone"))) is None
            assert await tally.timed(failing(OSError("away"))) is None
            assert await tally.timed(answering(6), lambda answer: answer == 5) is None
            return tally

        tally = asyncio.run(calls())
        assert (tally.succeeded, tally.failed, len(tally.latencies)) == (2, 3, 2)
        assert tally.failures == [
            "RecordNotFoundError: gone",
            "OSError: away",
            "not the right answer: 6",
        ]

    def test_a_mistake_of_ours_is_no_failed_call(self) -> None:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(Tally().timed(failing(ZeroDivisionError())))

    def test_all_failures_are_counted_and_a_few_are_kept_in_words(self) -> None:
        tally = tally_of(failed=20)
        assert (tally.failed, len(tally.failures)) == (20, families.WORDS_KEPT)

    def test_successes_can_be_taken_back(self) -> None:
        tally = tally_of(1.0, 1.0, 1.0)
        tally.take_back(0, "nothing")
        tally.take_back(2, "came twice")
        assert (tally.succeeded, tally.failed, tally.failures) == (1, 2, ["2 came twice"])

    def test_what_another_process_counted_arrives_exactly(self) -> None:
        tally = tally_of(0.1, 1 / 3, 1e-9, failed=2)
        assert Tally.from_json(json.loads(json.dumps(tally.as_json()))) == tally

    def test_a_sum(self) -> None:
        total = Tally.sum([tally_of(1.0, failed=1), tally_of(2.0, 3.0), tally_of(failed=2)])
        assert (total.succeeded, total.failed, list(total.latencies)) == (3, 3, [1.0, 2.0, 3.0])


class TestResult:
    def test_quantiles_are_of_all_samples(self) -> None:
        result = result_of(tally_of(*[number / 1000 for number in range(100, -1, -1)]))
        assert result.quantiles() == pytest.approx((0.050, 0.095, 0.099))
        assert result_of(Tally(succeeded=3)).quantiles() == (None, None, None)

    @pytest.mark.parametrize(
        ("tally", "complete"),
        [
            (tally_of(1, 1, 1, 1), True),
            (tally_of(1, 1, 1), False),
            (tally_of(1, 1, 1, 1, failed=1), False),
            (tally_of(1, 1, 1, 1, 1), False),
        ],
    )
    def test_it_is_complete_when_each_task_succeeded_once_and_nothing_failed(
        self, tally: Tally, complete: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = result_of(tally, tasks=4)
        assert result.complete == complete
        status = Bench("try", None).finish([result])
        assert status == (0 if complete else families.EXIT_FAILED_TASKS)
        assert f"│ {tally.succeeded} │" in " ".join(capsys.readouterr().out.split())


class TestBench:
    def test_a_line_is_appended_for_each_result(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "summary.jsonl"
        file.write_text('{"earlier": true}\n')
        bench = Bench("try", file)
        with bench.progress("working", 4) as advance:
            advance(4)
        first = result_of(tally_of(0.5, 0.5, 0.5, 0.5), extra={"stale": 0, "note": "none [of it]"})
        second = result_of(tally_of(0.25, failed=1), name="other [bold]")
        assert bench.finish([first, second]) == families.EXIT_FAILED_TASKS
        earlier, *written = map(json.loads, file.read_text().splitlines())
        assert earlier == {"earlier": True}
        facts = [line.pop("machine") for line in written]
        assert facts[0]["cores"] >= 1
        assert [line.pop("time") > 1.7e9 for line in written] == [True, True]
        common = {"family": "try", "parameters": {"n": 1}, "backend": "memory", "tasks": 4, "seconds": 2.0}
        assert written[0] == common | {
            "name": "try",
            "succeeded": 4,
            "failed": 0,
            "per_second": 2.0,
            "p50": 0.5,
            "p95": 0.5,
            "p99": 0.5,
            "extra": {"stale": 0, "note": "none [of it]"},
        }
        assert written[1] == common | {
            "name": "other [bold]",
            "succeeded": 1,
            "failed": 1,
            "per_second": 0.5,
            "p50": 0.25,
            "p95": 0.25,
            "p99": 0.25,
            "failures": ["failure 0"],
        }
        shown = capsys.readouterr().out
        assert "try: stale 0, note none [of it]" in shown
        assert "other [bold]: failure 0" in shown

    def test_a_file_that_cannot_be_written_is_found_out_before_anything_is_measured(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match=r"the summary file .* cannot be written: No such file or directory"):
            Bench("try", tmp_path / "missing" / "summary.jsonl")


@click.command(context_settings=families.CONTEXT)
@click.option("--total-tasks", type=click.IntRange(1), required=True)
@click.option("--unusable", is_flag=True)
@click.option("--interrupted", is_flag=True)
def command(total_tasks: int, unusable: bool, interrupted: bool) -> int:
    if unusable:
        raise BenchError("first\n  second")
    if interrupted:
        raise KeyboardInterrupt
    return total_tasks


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """Launch the command with arguments: its exit status, and what it said on stderr."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def launch(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as left:
            families.launch(command, "bench.try", arguments)
        return left.value.code, capfd.readouterr().err

    return launch


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--total-tasks", "7"], 7, ""),
        (["--help"], 0, ""),
        ([], 2, "bench.try: Missing option '--total-tasks'.\n"),
        (["--total-tasks", "0"], 2, "bench.try: Invalid value for '--total-tasks': 0 is not in the range x>=1.\n"),
        (["--total-tasks", "7", "more"], 2, "bench.try: Got unexpected extra argument (more)\n"),
        (["--total-tasks", "7", "--unusable"], 2, "bench.try: first second\n"),
        (["--total-tasks", "7", "--interrupted"], 130, "bench.try: interrupted\n"),
    ],
)
def test_how_a_command_ends(
    launched: Callable[..., tuple[Any, str]], arguments: list[str], status: int, said: str
) -> None:
    code, err = launched(*arguments)
    assert (code, err.lstrip("\n")) == (status, said)


@pytest.mark.parametrize("given", ["", "127.0.0.1:4747", "ftp://host", "http://", "http://host:99999", "http://h?x=1"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(BenchError, match=r"^--store-url must be an address such as http://127.0.0.1:4747$"):
        families.http_address("--store-url", given)


def test_an_address() -> None:
    assert families.http_address("--store-url", "http://[::1]:4747/") == "http://[::1]:4747"
    assert families.http_address("--url", "https://user:word@host/prefix/") == "https://user:word@host/prefix"
