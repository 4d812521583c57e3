"""The demo tells the truth about the store that it ran on."""

import asyncio
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lightning_api.demo import Demo, DemoOptions, Report, report_table, run_demo, show
from lightning_sql.errors import LightningError
from lightning_sql.store.factory import open_store

ROOT = Path(__file__).parents[2]


def consistent(report: Report, rollouts: int) -> bool:
    return (
        report.sound
        and sum(report.statuses.values()) == rollouts
        and set(report.statuses) <= {"succeeded", "failed"}
        and report.attempts == rollouts + report.retries
        and report.spans >= 2 * rollouts
    )


async def test_a_run_in_process_is_reported_as_it_was() -> None:
    async with await open_store("memory://", scan_debounce_seconds=0) as store:
        stranger = await store.enqueue_rollout("not the demo's")
        options = DemoOptions(rollouts=30, runners=5, seed=3)
        report = await show(Demo(store, options), Console(quiet=True))
        assert consistent(report, 30)
        statistics = await store.statistics()
        assert statistics["total_rollouts"] == 31
        assert statistics["total_spans"] == report.spans
        assert await store.get_rollout_by_id(stranger.rollout_id) is not None


async def test_a_claim_that_the_store_does_not_know_is_reported() -> None:
    async with await open_store("memory://", scan_debounce_seconds=0) as store:
        demo = Demo(store, DemoOptions(rollouts=5, runners=2))
        demo.seen.claims.append(("ro-of-nobody", 1))
        report = await demo.run()
        assert not report.sound
        assert [check for check, passed in report.checks.items() if not passed] == [
            "every claim is in the store, and nothing else"
        ]
        console = Console(record=True, width=80, file=io.StringIO())
        console.print(report_table(report))
        assert "NO" in console.export_text()


@pytest.mark.slow
def test_without_a_terminal_it_prints_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_api", "demo", "--rollouts", "20", "--runners", "4"],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}", "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "20/20 finished" in done.stdout
    assert "What happened" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer_is_one_error(unused_tcp_port: int) -> None:
    with pytest.raises(LightningError) as caught:
        run_demo(DemoOptions(url=f"http://127.0.0.1:{unused_tcp_port}"), Console(quiet=True))
    assert "\n" not in str(caught.value)


async def test_a_store_that_fails_on_the_way_ends_the_run() -> None:
    async with await open_store("memory://") as store:
        demo = Demo(store, DemoOptions(rollouts=5, runners=2))

        async def fail(**_: object) -> None:
            raise LightningError("gone")

        store.update_attempt = fail  # pyright: ignore[reportAttributeAccessIssue]
        store.dequeue_rollout = fail  # pyright: ignore[reportAttributeAccessIssue]
        async with asyncio.timeout(30):
            with pytest.raises(ExceptionGroup, match="unhandled errors"):
                await show(demo, Console(quiet=True))
