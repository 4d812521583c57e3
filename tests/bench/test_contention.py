"""The benchmark of the collections: what it finds wrong, what it counts, and a small run on each backend."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import collections
from bench.collections import Options
from bench.contender import Share, check, contend, prepare
from bench.crew import run_crew
from bench.families import Tally
from bench.processes import BenchError
from lightning_sql.collections.memory import MemoryCollections
from tests.commands import run_module

TOTAL = 6


def done(benchmark: str, successes: int = TOTAL) -> MemoryCollections:
    """Collections after a benchmark of which so many tasks were done."""

    async def run() -> MemoryCollections:
        store = MemoryCollections()
        await prepare(store, benchmark, "task", TOTAL)

        async def ready() -> None:
            """Nobody else is waited for."""

        await contend(store, Share(benchmark, "task", 0, successes, 2), ready, lambda _: None)
        return store

    return asyncio.run(run())


def checked(benchmark: str, store: MemoryCollections, numbers: Sequence[int], failed: int = 0) -> Tally:
    tally = Tally(succeeded=len(numbers), failed=failed)
    asyncio.run(check(store, benchmark, "task", TOTAL, tally, numbers))
    return tally


class TestChecks:
    @pytest.mark.parametrize(("benchmark", "first"), [("insert", 0), ("dequeue", 0), ("inc", 1)])
    def test_what_is_right_stays_a_success(self, benchmark: str, first: int) -> None:
        tally = checked(benchmark, done(benchmark), range(first, first + TOTAL))
        assert (tally.succeeded, tally.failed, tally.failures) == (TOTAL, 0, [])

    @pytest.mark.parametrize(("benchmark", "first"), [("insert", 0), ("dequeue", 0), ("inc", 1)])
    def test_a_number_that_came_twice_counts_once(self, benchmark: str, first: int) -> None:
        numbers = [*range(first, first + TOTAL - 1), first]
        tally = checked(benchmark, done(benchmark, TOTAL - 1), numbers)
        assert tally.failures[0] == f"1 numbers of {benchmark} came twice"
        assert tally.succeeded == TOTAL - 1

    @pytest.mark.parametrize(("benchmark", "first"), [("insert", 0), ("dequeue", 0), ("inc", 1)])
    def test_a_number_of_somebody_else(self, benchmark: str, first: int) -> None:
        tally = checked(benchmark, done(benchmark), [*range(first, first + TOTAL - 1), 99])
        assert tally.failures[0] == f"1 numbers of {benchmark} are none of its own, [99] among them"
        assert tally.succeeded <= TOTAL - 1

    def test_an_insert_that_is_not_there(self) -> None:
        tally = checked("insert", done("insert", TOTAL - 2), range(TOTAL))
        assert (tally.succeeded, tally.failures) == (TOTAL - 2, ["2 rollouts that were inserted are not there"])

    def test_a_rollout_that_nobody_inserted(self) -> None:
        assert checked("insert", done("insert"), range(TOTAL - 1)).failures == [
            "rollouts are there that nobody inserted"
        ]
        # It may be of a call that failed after all.
        assert checked("insert", done("insert"), range(TOTAL - 1), failed=1).failed == 1

    def test_an_entry_that_was_taken_and_is_still_there(self) -> None:
        tally = checked("dequeue", done("dequeue", TOTAL - 1), range(TOTAL))
        assert tally.failures == [f"1 entries are left although {TOTAL} were taken"]

    def test_an_entry_that_nobody_has(self) -> None:
        assert checked("dequeue", done("dequeue"), range(TOTAL - 1)).failures == ["0 entries are left: some are lost"]
        assert checked("dequeue", done("dequeue"), range(TOTAL - 1), failed=1).failed == 1

    def test_an_update_that_was_lost(self) -> None:
        tally = checked("inc", done("inc", TOTAL - 1), range(1, TOTAL + 1))
        assert tally.failures == [f"the counter is {TOTAL - 1} after {TOTAL} times one"]

    def test_an_update_that_nobody_made(self) -> None:
        assert checked("inc", done("inc"), range(1, TOTAL)).failures == [
            f"the counter is {TOTAL} after only {TOTAL - 1} times one"
        ]
        assert checked("inc", done("inc"), range(1, TOTAL), failed=1).failed == 1


def test_tasks_and_concurrency_are_dealt_out_evenly() -> None:
    options = Options(
        benchmark="inc",
        backend="memory",
        total_tasks=10,
        concurrency=5,
        task_prefix="task",
        database_url=None,
        data_dir=None,
    )
    shares = [(share.first, share.count, share.coroutines) for share in options.shares(4)]
    assert shares == [(0, 3, 2), (3, 3, 1), (6, 2, 1), (8, 2, 1)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("bench.collections", *arguments)


class TestRun:
    @pytest.mark.parametrize("benchmark", ["insert", "dequeue", "inc"])
    def test_threads_on_memory(self, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "summary.jsonl"
        arguments = [benchmark, "--total-tasks", "301", "--concurrency", "200", "--summary-file", str(file)]
        assert collections.main.main(arguments, standalone_mode=False) == 0
        summary = json.loads(file.read_text())
        assert (summary["family"], summary["name"], summary["backend"]) == ("collections", benchmark, "memory")
        assert (summary["tasks"], summary["succeeded"], summary["failed"]) == (301, 301, 0)
        assert summary["parameters"]["threads"] == 128
        assert 0 < summary["p50"] <= summary["p95"] <= summary["p99"] <= summary["seconds"]
        assert "concurrency 200, threads 128" in capsys.readouterr().out

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("benchmark", "backend"),
        [("inc", "sqlite"), ("insert", "postgres")],
    )
    def test_processes_on_a_database(self, benchmark: str, backend: str, tmp_path: Path) -> None:
        file, data = tmp_path / "summary.jsonl", tmp_path / "data"
        data.mkdir()
        # PostgreSQL runs as somebody else, who must be able to get there.
        places: list[str] = ["--data-dir", str(data)] if backend == "sqlite" else []
        arguments = [
            "--backend",
            backend,
            "--total-tasks",
            "120",
            "--concurrency",
            "12",
            "--task-prefix",
            "probe",
            *places,
        ]
        ended = run(benchmark, *arguments, "--summary-file", str(file))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        summary = json.loads(file.read_text())
        assert (summary["backend"], summary["tasks"], summary["succeeded"], summary["failed"]) == (backend, 120, 120, 0)
        assert summary["parameters"]["task_prefix"] == "probe"
        assert summary["parameters"]["processes"] >= 4
        assert list(data.iterdir()) == []

    def test_threads_end_when_one_of_them_fails(self) -> None:
        told: list[int] = []

        def advance(done: int) -> None:
            told.append(done)
            if len(told) == 1:
                raise BenchError("the terminal is gone")

        # The other would go on for an hour.
        shares = [Share("inc", "task", 0, 10**9, 1), Share("inc", "task", 10**9, 10**9, 1)]
        with pytest.raises(ExceptionGroup) as raised:
            collections.in_threads(MemoryCollections(), shares, advance)
        assert raised.group_contains(BenchError)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["--backend", "sqlite", "--database-url", "x"],
                "--database-url is for --backend postgres, not for sqlite",
            ),
            (["--task-prefix", ""], "--task-prefix must be 1 to 400 bytes of printable text"),
            (["--backend", "sqlite", "--data-dir", "/dev/shm"], "is in memory or no folder"),
            (
                ["--backend", "postgres", "--database-url", "postgresql://u:secret@127.0.0.1:1/x"],
                "this PostgreSQL cannot be used: ",
            ),
        ],
    )
    def test_what_cannot_be(self, arguments: list[str], said: str) -> None:
        with pytest.raises(BenchError) as raised:
            collections.main.main(["inc", "--total-tasks", "5", *arguments], standalone_mode=False)
        assert said in str(raised.value)
        assert "secret" not in str(raised.value)


@pytest.mark.slow
def test_a_process_that_ends_before_its_time(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"a process of bench\.contender ended before its time\n(?s:.*)KeyError"):
        run_crew("bench.contender", [{"nothing": 1}], tmp_path, lambda _: None)
