"""Agent Lightning's own training loop, unchanged, on our store: by each of its strategies, on each database."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import RUNNERS, TASKS, VICTIM

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
on_each_database = pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "api")])
    environment = os.environ | {"PYTHONPATH": paths, "AGL_TEST_PORT": str(port)}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended


def train(url: str, strategy: str, folder: Path, *victim: str) -> list[dict[str, Any]]:
    """The rollouts of a training run, in order."""
    report = folder / "report.json"
    run(str(Path(__file__).with_name("training.py")), url, strategy, str(report), *victim)
    told = json.loads(report.read_text())
    direct = "LightningStoreServer" if strategy == "cs" else "LightningStoreThreaded"
    assert told["store"] == ("SqlLightningStore" if strategy.endswith("own") else direct)
    rollouts = sorted(told["rollouts"], key=lambda rollout: rollout["number"])
    assert [rollout["number"] for rollout in rollouts] == list(range(TASKS))
    assert {rollout["status"] for rollout in rollouts} == {"succeeded"}
    assert all(rollout["resources"] for rollout in rollouts)
    assert [rollout["reward"] for rollout in rollouts] == [number / TASKS for number in range(TASKS)]
    return rollouts


@on_each_database
@pytest.mark.parametrize("strategy", ["cs", "cs-own", "shm", "shm-own"])
def test_a_training_loop_runs_unchanged(url: str, strategy: str, tmp_path: Path) -> None:
    rollouts = train(url, strategy, tmp_path)
    assert all(rollout["attempts"] == ["succeeded"] for rollout in rollouts)
    assert all(rollout["numbers"] == [1, 2] for rollout in rollouts)
    workers = {worker for rollout in rollouts for worker in rollout["workers"]}
    assert workers <= {f"Worker-{number}" for number in range(RUNNERS)}


@on_each_database
@pytest.mark.parametrize("strategy", ["cs", "cs-own"])
def test_it_goes_on_when_a_runner_is_killed(url: str, strategy: str, tmp_path: Path) -> None:
    rollouts = train(url, strategy, tmp_path, "victim")
    attempts = [rollout["attempts"] for rollout in rollouts]
    assert attempts.pop(VICTIM) == ["unresponsive", "succeeded"]
    assert attempts == [["succeeded"]] * (TASKS - 1)
    first, second = rollouts[VICTIM]["workers"]
    assert first != second


@on_each_database
def test_threads_and_a_forked_process_share_a_store_for_a_minute(url: str) -> None:
    told = json.loads(run("-m", "tests.store.crowd", url, "60", "upstream").stdout)
    assert not told["errors"]
    assert all(count > 0 for count in told["done"].values())
    assert told["spans"] == sum(told["done"].values())
    assert not told["threads"]
