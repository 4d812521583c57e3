"""The presets beside the upstream server: the sums, what is written, and one small run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import compare, document, preset_runs
from bench.drivers.rollouts import Requests
from bench.families import Tally
from bench.ideal import sleeps_allow
from bench.machine import Machine
from bench.preset_runs import PresetRuns
from bench.presets import PRESETS
from bench.processes import ROOT, BenchError, python_path
from bench.report import number
from bench.results import Samples
from bench.servers import Kind
from bench.store import Run

MACHINE = Machine(
    cpu="some processor",
    cores=2,
    memory_gib=24,
    system="Linux 6",
    python="3.11",
    sqlite="3.40",
    postgres=None,
    shared_buffers=None,
    folder="ext4",
    fsyncs_per_second=(400.0,),
)


def run_of(name: str, per_second: float, succeeded: int = 100) -> Run:
    requests = Requests()
    requests.tallies["dequeue"].succeed(0.25)
    return Run(
        workload=PRESETS[name].scaled(100 / PRESETS[name].total_tasks),
        seconds=succeeded / per_second,
        tally=Tally(succeeded=succeeded),
        requests=requests,
        stale=100 - succeeded,
        wrong_spans=0,
        cpu={"server": 0.5, "driver": 0.25},
    )


def runs_of(name: str, **per_second: float) -> PresetRuns:
    runs: dict[Any, Run] = {kind: run_of(name, rate) for kind, rate in per_second.items()}
    return PresetRuns(name, run_of(name, 1.0).workload, runs)


class TestSums:
    def test_what_a_run_reaches(self) -> None:
        run = run_of("medium", 50.0)
        assert run.complete
        assert run.per_second == 50.0

    def test_a_run_with_a_stale_rollout_is_not_complete(self) -> None:
        run = run_of("medium", 50.0, succeeded=99)
        assert not run.complete
        [said] = preset_runs.failures([PresetRuns("medium", run.workload, {"postgres": run})])
        assert said.startswith("medium (batch) on postgres: 99 of 100 tasks succeeded, 0 calls failed")

    @pytest.mark.parametrize(
        ("name", "ours", "reached"),
        [
            ("minimal", 9.7, True),
            ("minimal", 9.5, False),
            ("medium", 90.5, True),
            ("medium", 80.0, False),
            ("large-batch", 40.0, True),
            ("large-batch", 39.0, False),
        ],
    )
    def test_the_aims(self, name: str, ours: float, reached: bool) -> None:
        assert runs_of(name, upstream=10.0, sqlite=1.0, postgres=ours).reached is reached

    def test_what_was_not_measured_has_no_verdict(self) -> None:
        assert runs_of("minimal", upstream=10.0).reached is None
        assert runs_of("midhigh", postgres=10.0).reached is None
        kinds: list[Kind] = ["postgres"]
        assert [runs_of("midhigh", postgres=10.0).ratio(kind) for kind in kinds] == [None]

    def test_some_of_the_presets(self) -> None:
        found = preset_runs.chosen(["m*"], 0.1, ["simple", "batch"])
        assert [(name, one.exporter) for name, one in found] == [
            (name, exporter) for exporter in ("simple", "batch") for name in ("minimal", "medium", "midhigh")
        ]
        assert [one.total_tasks for _, one in found[:3]] == [410, 1000, 2000]
        assert [name for name, _ in preset_runs.chosen([], 0.1, ["batch"])] == list(PRESETS)
        with pytest.raises(BenchError, match="no preset matches nothing"):
            preset_runs.chosen(["nothing"], 0.1, ["batch"])


class TestDocument:
    def test_the_part_about_the_presets_is_written_anew_and_all_else_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "performance.md"
        path.write_text("# Performance\n\nSome figures.\n\n<!-- by hand: notes -->\nA note.\n<!-- end -->\n")
        first = runs_of("large-batch", upstream=10.0, sqlite=50.0, postgres=45.5)
        document.write_presets(path, preset_runs.lines([first], MACHINE, 0.1))
        allowed = number(sleeps_allow(first.workload))
        row = f"| large-batch | 100 | 10 | 50, 5× | 45.5, 4.55× | 3,333 | {allowed} | 14.6 | 50 | 4× upstream | yes |"
        assert row in path.read_text()
        second = runs_of("medium", upstream=10.0, postgres=45.5)
        document.write_presets(path, preset_runs.lines([second], MACHINE, 0.1))
        text = path.read_text()
        allowed = number(sleeps_allow(second.workload))
        assert f"| medium | 100 | 10 | 45.5, 4.55× | 100 | {allowed} | 23.3 | 32.8 | 0.9 of ceiling |" in text
        assert "large-batch" not in text
        assert text.startswith("# Performance\n\nSome figures.\n\n<!-- presets -->\n## Presets\n")
        assert text.endswith("<!-- end of presets -->\n\n<!-- by hand: notes -->\nA note.\n<!-- end -->\n")

    def test_the_other_comparison_keeps_it(self, tmp_path: Path) -> None:
        path = tmp_path / "performance.md"
        document.write_presets(path, preset_runs.lines([runs_of("medium", postgres=45.5)], MACHINE, 0.1))
        document.write(path, MACHINE, [], Samples(), 3)
        document.write(path, MACHINE, [], Samples(), 3)
        assert path.read_text().count("## Presets") == 1
        assert "| medium | 100 | 45.5 |" in path.read_text()


class TestCommandLine:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--scale", "0.5"], "--scale: only with --presets"),
            (["--exporter", "simple"], "--exporter: only with --presets"),
            (["--presets", "--quick"], "--quick: not with --presets"),
            (["--presets", "--rounds", "2"], "--rounds: not with --presets"),
            (["--presets", "--only", "nothing"], "no preset matches nothing"),
            (["--presets", "--no-peer", "--targets", "memory"], "--targets: the presets are for sqlite, postgres"),
        ],
    )
    def test_what_cannot_be_is_said_at_once(self, given: list[str], said: str) -> None:
        result = CliRunner().invoke(compare.main, given)
        assert (result.exit_code, result.output.strip()) == (compare.EXIT_CANNOT_RUN, f"bench.compare: {said}")

    @pytest.mark.slow
    def test_a_small_run(self, tmp_path: Path) -> None:
        figures, written = tmp_path / "figures.json", tmp_path / "performance.md"
        given = ["--presets", "--no-peer", "--targets", "sqlite", "--scale", "0.0005", "--only", "medium"]
        given += ["--exporter", "batch"]
        done = subprocess.run(
            [sys.executable, "-m", "bench.compare", *given, "--json", str(figures), "--docs", str(written)],
            cwd=ROOT,
            env=python_path(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(figures.read_text())["medium.batch"]["runs"]["sqlite"]
        assert (found["tasks"], found["succeeded"], found["failed_calls"], found["stale"]) == (5, 5, 0, 0)
        assert found["cpu"]["server"] > 0
        assert "| medium | 5 |" in written.read_text()
