"""One store for several threads, event loops and processes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sql.database.engine import Database
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


def run_crowd(url: str, seconds: float, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "tests.store.crowd", url, str(seconds), kind]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "fsync is off" not in line]
    assert not said, said
    return json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "upstream"])
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_threads_and_a_forked_process_share_a_store(
    tmp_path: Path, postgres: PostgresServer, backend: str, kind: str
) -> None:
    url = f"sqlite:///{tmp_path / 'crowd.db'}" if backend == "sqlite" else postgres.create_database()
    told = run_crowd(url, 3.0, kind)
    assert not told["errors"]
    assert all(count > 0 for count in told["done"].values())
    assert told["spans"] == sum(told["done"].values())
    assert not told["threads"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_connections_are_closed_with_their_event_loop(database_of: Callable[[str], str], backend: str) -> None:
    url = database_of(backend)
    store = SqlStore(Database(url), partition="closed with their loop")
    before = threading.active_count()

    async def use() -> tuple[int, int]:
        await store.enqueue_rollout(1)
        assert await store.dequeue_rollout("w") is not None
        assert await store.wait_for_rollouts(rollout_ids=["none"], timeout=0.01) == []
        usage = store.usage()
        return usage.connections_in_use, usage.connections_idle

    for _ in range(3):
        in_use, idle = asyncio.run(use())
        assert in_use + idle > 0
    assert threading.active_count() == before
    if backend == "postgres":
        assert asyncio.run(sessions_of(url)) == 1


async def sessions_of(url: str) -> int:
    """How many sessions a PostgreSQL has with this database, this one included."""
    from sqlalchemy import text

    database = Database(url)
    async with database.transaction(writing=False) as connection:
        count = await connection.scalar(
            text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = :kind"),
            {"kind": "client backend"},
        )
    await database.close()
    return int(count or 0)
