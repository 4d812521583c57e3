"""Bench families against a server that is started for them, and the tables that their summaries become."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import families
from bench.processes import ROOT, python_path
from bench.summaries import main, table

RESULT: dict[str, Any] = {
    "family": "store",
    "name": "minimal",
    "parameters": {"batch_size": 256},
    "backend": "sqlite",
    "tasks": 4096,
    "succeeded": 4096,
    "failed": 0,
    "seconds": 12.5,
    "per_second": 327.7,
    "p50": 0.0125,
    "p95": 0.05,
    "p99": None,
}


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=python_path(), capture_output=True, text=True, timeout=120, check=False
    )


def written(folder: Path, results: Sequence[dict[str, Any]]) -> Path:
    file = folder / "summary.jsonl"
    file.write_text("".join(json.dumps(result) + "\n" for result in results))
    return file


def test_a_table_has_a_row_for_each_result() -> None:
    heading, rule, row = table([RESULT])
    cells = row.strip("| ").split(" | ")
    assert cells[:6] == ["store minimal", "batch_size 256", "sqlite", "4,096", "4,096", "0"]
    assert heading.count("|") == rule.count("|") == row.count("|")
    assert cells[-3:] == ["12.5", "50", "–"]


@pytest.fixture
def summarise(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """The command in this process, whose signals stay as they are; its exit status."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run_it(file: Path) -> int:
        with pytest.raises(SystemExit) as ended:
            families.launch(main, "bench.summaries", [str(file)])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run_it


@pytest.mark.parametrize(("change", "status"), [({}, 0), ({"succeeded": 4095}, 1), ({"failed": 1}, 1)])
def test_a_run_that_is_not_complete_fails(
    tmp_path: Path,
    summarise: Callable[[Path], int],
    capsys: pytest.CaptureFixture[str],
    change: dict[str, int],
    status: int,
) -> None:
    assert summarise(written(tmp_path, [RESULT, RESULT | change])) == status
    assert capsys.readouterr().out.count("store minimal") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no result in these files"),
        ("{}\n", "line 1, is no result"),
        ("nothing\n", "line 1, is no result"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_summary_is_one_line(
    tmp_path: Path,
    summarise: Callable[[Path], int],
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    said: str,
) -> None:
    file = tmp_path / "summary.jsonl"
    if text is not None:
        file.write_text(text)
    assert summarise(file) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert said in shown.err


@pytest.mark.slow
def test_a_preset_against_a_server_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "summary.jsonl"
    arguments = ("--preset", "minimal", "--scale", "0.005", "--sleep-seconds", "0", "--summary-file", file)
    done = run("bench.served", "--backend", "memory", "bench.store", *arguments)
    assert done.returncode == 0, done.stderr
    [result] = map(json.loads, file.read_text().splitlines())
    assert (result["name"], result["backend"], result["succeeded"]) == ("minimal", "memory", 20)


@pytest.mark.slow
def test_a_family_against_a_server_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "summary.jsonl"
    arguments = ("bench.micro", "dequeue-empty", "--total-tasks", "20", "--concurrency", "2", "--summary-file", file)
    done = run("bench.served", "--backend", "postgres", *arguments)
    assert done.returncode == 0, done.stderr
    [result] = map(json.loads, file.read_text().splitlines())
    assert (result["backend"], result["succeeded"], result["failed"]) == ("postgres", 20, 0)


@pytest.mark.slow
def test_what_the_family_says_is_passed_on(tmp_path: Path) -> None:
    done = run("bench.served", "--backend", "memory", "bench.micro", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr
