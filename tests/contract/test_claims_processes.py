"""Several processes on one database at once: no work is lost, none is given out twice, no number has a gap."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.native_laws import broken_laws

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLAIMER = Path(__file__).with_name("claimer.py")
PROCESSES = 4
PATIENCE = 120.0


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, database_of: Callable[[str], str]) -> str:
    return database_of(request.param)


@pytest.fixture
def partition(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
async def store(database_url: str, partition: str) -> AsyncIterator[LightningStore]:
    async with await open_store(database_url, partition=partition) as store:
        yield store
        assert await broken_laws(store, time.time()) == []


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode()


async def in_processes(database_url: str, partition: str, work: str) -> list[list[list[Any]]]:
    """What each process did; all begin together, when the last one is ready."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "api")])}
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(CLAIMER),
            database_url,
            partition,
            f"w{number}",
            work,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=2**20,
        )
        for number in range(PROCESSES)
    ]
    try:
        async with asyncio.timeout(PATIENCE):
            for process in processes:
                assert await line_of(process) == "ready\n"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"\n")
                await process.stdin.drain()
            results = [json.loads(await line_of(process)) for process in processes]
            assert [await process.wait() for process in processes] == [0] * PROCESSES
            return results
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_claims(store: LightningStore, database_url: str, partition: str) -> None:
    total = 120
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number, config=config) for number in range(total)])
    results = await in_processes(database_url, partition, "claim")
    claims = Counter((task, number) for done in results for task, number in done)
    assert claims == Counter((task, number) for task in range(total) for number in (1, 2))
    assert await store.dequeue_rollout() is None
    for rollout in await store.query_rollouts():
        assert rollout.status == "succeeded"
        attempts = await store.query_attempts(rollout.rollout_id)
        assert [attempt.sequence_id for attempt in attempts] == [1, 2]
    assert {worker.status for worker in await store.query_workers()} == {"idle"}


async def test_attempts_and_sequence_numbers(store: LightningStore, database_url: str, partition: str) -> None:
    rollout = await store.enqueue_rollout("the only one")
    results = await in_processes(database_url, partition, "count")
    attempts = sorted(number for done in results for kind, number in done if kind == "attempt")
    assert attempts == list(range(1, 15 * PROCESSES + 1))
    assert [attempt.sequence_id for attempt in await store.query_attempts(rollout.rollout_id)] == attempts
    spans = sorted(number for done in results for kind, number in done if kind == "span")
    assert spans == list(range(1, 30 * PROCESSES + 1))
    for done in results:
        mine = [number for kind, number in done if kind == "span"]
        assert mine == sorted(mine)
    assert await store.dequeue_rollout() is None
