"""Every benchmark in short: that none is left out, and that what does not succeed is seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import collections, micro, quick
from bench.presets import PRESETS
from bench.processes import BenchError
from bench.quick import Done, Step

STEP = Step("store.medium.sqlite", ("--preset", "medium"), "sqlite")
SUMMARY: dict[str, Any] = {"tasks": 5, "succeeded": 5, "failed": 0, "per_second": 2.5, "p50": 0.1, "p99": 0.2}


def choices(command: Any) -> set[str]:
    """What a family's command calls its benchmarks."""
    [argument] = (one for one in command.params if one.param_type_name == "argument")
    return set(argument.type.choices)


class TestSteps:
    def test_no_benchmark_of_any_family_is_left_out(self) -> None:
        steps = {step.name for step in quick.every_step()}
        backends = ("memory", "sqlite", "postgres")
        wanted = {f"collections.{name}.{backend}" for name in choices(collections.main) for backend in backends}
        for server in ("sqlite", "postgres"):
            wanted |= {f"micro.{name}.{server}" for name in choices(micro.main)}
            wanted |= {f"store.{name}.{server}" for name in PRESETS}
        assert steps == wanted

    def test_the_command_of_a_step(self) -> None:
        assert STEP.module == "bench.store"


class TestDone:
    DONE = Done(STEP, 1.0, 0, [SUMMARY], "")

    @pytest.mark.parametrize(
        ("changes", "right"),
        [
            ({}, True),
            ({"status": 1}, False),
            ({"summaries": []}, False),
            ({"summaries": [SUMMARY | {"succeeded": 4}]}, False),
            ({"summaries": [SUMMARY | {"failed": 1}]}, False),
            ({"summaries": [SUMMARY | {"extra": {"stale": 1}}]}, False),
            ({"summaries": [SUMMARY | {"extra": {"stale": 0}}]}, True),
        ],
    )
    def test_what_succeeds(self, changes: dict[str, Any], right: bool) -> None:
        assert replace(self.DONE, **changes).right is right

    def test_what_does_not_is_shown_with_what_it_said(self) -> None:
        console = Console(width=150, record=True)
        quick.show(console, [self.DONE, replace(self.DONE, status=1, summaries=[], said="a span is missing")])
        text = console.export_text()
        assert "│ store.medium.sqlite │     5 │         5 │     – │        2.5 │    100 │    200 │      1 │" in text
        assert "store.medium.sqlite did not succeed:\na span is missing" in text
        assert text.count("did not succeed") == 1


class TestRun:
    def test_nothing_to_do_is_said(self) -> None:
        with pytest.raises(BenchError, match=r"^no benchmark matches nothing\.\*$"):
            quick.main.main(["--only", "nothing.*"], standalone_mode=False)

    @pytest.mark.slow
    def test_a_step_that_cannot_be_done(self, tmp_path: Path) -> None:
        done = quick.do(replace(STEP, arguments=("--preset", "huge")), ["--store-url", "http://127.0.0.1:9"], tmp_path)
        assert not done.right
        assert done.status == 2
        assert "'huge' is not one of" in done.said

    @pytest.mark.slow
    def test_a_small_run(self, tmp_path: Path) -> None:
        summaries = tmp_path / "summaries"
        given = ["--only", "micro.worker.sqlite", "--only", "collections.inc.memory"]
        assert quick.main.main([*given, "--summary-file", str(summaries)], standalone_mode=False) == 0
        found = [json.loads(line) for line in summaries.read_text().splitlines()]
        assert [(one["family"], one["name"], one["backend"]) for one in found] == [
            ("collections", "inc", "memory"),
            ("micro", "worker", "sqlite"),
        ]
        assert all(one["succeeded"] == one["tasks"] > 0 for one in found)
