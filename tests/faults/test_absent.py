"""A database that is away for a while, that says nothing, or whose file is locked: calls wait, then they are told."""

import asyncio
import signal
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from lightning_sql.testing.postgres import PostgresCluster, postgres_cluster
from tests.commands import environment, run
from tests.faults import absence
from tests.faults.proxy import proxy_to
from tests.faults.restart import restart_under_load
from tests.faults.stage import Stage, stage_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

WAIT_SECONDS = 8
OPTIONS = ("--database-wait-seconds", str(WAIT_SECONDS))
PATIENCE = 60.0
SPAN = {
    "sequence_id": 1,
    "trace_id": "t",
    "parent_id": None,
    "name": "step",
    "status": {"status_code": "OK"},
    "attributes": {},
    "events": [],
    "links": [],
    "start_time": None,
    "end_time": None,
    "context": None,
    "parent": None,
    "resource": {"attributes": {}, "schema_url": ""},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with postgres_cluster() as started:
        yield started


class Caller:
    """Requests that are sent once."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any, str | None]:
        """Status, answer and `Retry-After`."""
        async with self._session.post(f"/v1/agl{path}", json=body) as response:
            return response.status, await response.json(), response.headers.get("retry-after")

    async def enqueue(self, *inputs: Any) -> tuple[int, Any, str | None]:
        return await self.post("/queues/rollouts/enqueue", {"rollouts": [{"input": value} for value in inputs]})

    async def inputs(self) -> list[Any]:
        """Those of all rollouts."""
        _, page, _ = await self.post("/rollouts/search", {})
        return [rollout["input"] for rollout in page["items"]]

    async def ready(self) -> int:
        async with self._session.get("/readyz") as response:
            return response.status

    def everything(self, key: tuple[str, str]) -> list[Any]:
        """One call of each kind; with the ids of an attempt."""
        ids = {"rollout_id": key[0], "attempt_id": key[1]}
        return [
            *self.writes(key),
            self.post("/rollouts/search", {"limit": 1}),
            self.post("/spans/search", ids),
        ]

    def writes(self, key: tuple[str, str]) -> list[Any]:
        """Those of them that change something."""
        rollout_id, attempt_id = key
        ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return [
            self.enqueue("while away"),
            self.post("/queues/rollouts/dequeue", {}),
            self.post("/spans", {**SPAN, **ids, "span_id": "new"}),
            self.post("/spans/next", ids),
            self.post(f"/rollouts/{rollout_id}/attempts/{attempt_id}", {"metadata": {"n": 1}}),
            self.post("/workers/w", {}),
            self.post("/rollouts", {"input": "started"}),
            self.post("/resources/mine", {}),
        ]


@asynccontextmanager
async def calling(stage: Stage) -> AsyncGenerator[Caller]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    url = f"http://127.0.0.1:{stage.servers[0].port}"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        yield Caller(session)


@pytest.fixture
async def stage(cluster: PostgresCluster, tmp_path: Path) -> Any:
    if not cluster.running:
        cluster.start()
    async with stage_on(cluster.create_database(), tmp_path, cluster=cluster, options=OPTIONS) as stage:
        yield stage
        if not cluster.running:
            cluster.start()


async def started(caller: Caller) -> tuple[str, str]:
    status, rollout, _ = await caller.post("/rollouts", {"input": "mine"})
    assert status == 201
    return rollout["rollout_id"], rollout["attempt"]["attempt_id"]


@pytest.mark.parametrize("wait", ["40", "1"])
async def test_a_restart_of_the_database_costs_time_and_no_call(
    cluster: PostgresCluster, tmp_path: Path, wait: str
) -> None:
    """And with less patience than it takes, the same callers notice."""
    url = cluster.create_database()
    options = ("--database-wait-seconds", wait)
    async with stage_on(url, tmp_path, cluster=cluster, servers=2, options=options) as stage:
        report = await restart_under_load(stage, cluster, 6.0)
    assert report.wrong == []
    if wait == "40":
        assert report.failures == []
        assert report.waited >= 24
    else:
        assert any("503" in failure for failure in report.failures)


async def test_who_waited_long_enough_is_told_so(stage: Stage, cluster: PostgresCluster) -> None:
    async with calling(stage) as caller:
        key = await started(caller)
        await asyncio.to_thread(cluster.stop)
        answers = await asyncio.gather(*caller.everything(key), *caller.everything(key))
        assert [(status, retry) for status, _, retry in answers] == [(503, "1")] * len(answers)
        assert await caller.ready() == 503
        await asyncio.to_thread(cluster.start)
        answers = await asyncio.gather(*caller.everything(key))
        assert {status for status, _, _ in answers} <= {200, 201}
        # What was answered 503 was not done.
        assert sorted(await caller.inputs()) == ["mine", "started", "while away"]


async def test_who_left_meanwhile_gets_nothing(stage: Stage, cluster: PostgresCluster) -> None:
    async with calling(stage) as caller:
        await started(caller)
        await asyncio.to_thread(cluster.stop)
        calls = [
            asyncio.create_task(call)
            for call in (caller.enqueue("gone"), caller.post("/rollouts", {"input": "gone too"}))
        ]
        stays = asyncio.create_task(caller.enqueue("here"))
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await asyncio.sleep(1.7)  # until the server has looked twice
        await asyncio.to_thread(cluster.start)
        assert (await stays)[0] == 201
        assert sorted(await caller.inputs()) == ["here", "mine"]


async def test_a_server_that_is_stopped_waits_for_no_database(cluster: PostgresCluster, tmp_path: Path) -> None:
    async with stage_on(cluster.create_database(), tmp_path, cluster=cluster) as stage, calling(stage) as caller:
        key = await started(caller)
        await asyncio.to_thread(cluster.stop)
        calls = [asyncio.create_task(call) for call in caller.everything(key)]
        await asyncio.sleep(0.5)
        assert not any(call.done() for call in calls)
        assert await stage.servers[0].end(signal.SIGTERM) == 0
        assert {(await call)[0] for call in calls} == {503}
    await asyncio.to_thread(cluster.start)


async def test_sessions_that_fall_silent_are_given_up(stage: Stage) -> None:
    """New ones can be had: what may be sent again is answered. Of the rest, some may have taken place."""
    assert stage.behind is not None
    async with calling(stage) as caller:
        key = await started(caller)
        await asyncio.gather(*(call for _ in range(3) for call in caller.everything(key)))
        assert stage.behind.black_hole(new=False) > 0
        ids = {"rollout_id": key[0], "attempt_id": key[1]}
        repeated = await asyncio.gather(
            caller.enqueue("again"),
            caller.post("/spans", {**SPAN, **ids, "span_id": "again"}),
            caller.post("/spans/next", ids),
            caller.post("/workers/w", {}),
            caller.post(f"/rollouts/{key[0]}/attempts/{key[1]}", {"metadata": {"n": 2}}),
        )
        assert {status for status, _, _ in repeated} <= {200, 201}
        assert (await caller.inputs()).count("again") == 1
        others = await asyncio.gather(*caller.everything(key))
        assert {status for status, _, _ in others} <= {200, 201, 503}
        assert await caller.ready() == 200


async def test_a_database_that_says_nothing_is_one_that_is_away(stage: Stage) -> None:
    assert stage.behind is not None
    async with calling(stage) as caller:
        key = await started(caller)
        stage.behind.black_hole(new=True)
        answers = await asyncio.gather(*caller.everything(key), *caller.everything(key))
        assert [(status, retry) for status, _, retry in answers] == [(503, "1")] * len(answers)
        assert await caller.ready() == 503
        stage.behind.heal()
        async with asyncio.timeout(PATIENCE):
            while await caller.ready() != 200:  # noqa: ASYNC110 - which it says nobody
                await asyncio.sleep(0.1)
        assert (await caller.enqueue("after"))[0] == 201
        stage.behind.black_hole(new=True)
        late = [asyncio.create_task(call) for call in caller.everything(key)]
        await asyncio.sleep(0.2)
        # Also in the middle of statements that are never answered.
        assert await stage.servers[0].end(signal.SIGTERM) == 0
        await asyncio.gather(*late, return_exceptions=True)


async def test_a_server_does_not_start_on_a_database_that_says_nothing(
    cluster: PostgresCluster, tmp_path: Path
) -> None:
    place = urlsplit(cluster.create_database())
    async with proxy_to("127.0.0.1", place.port or 5432) as proxy:
        proxy.black_hole(new=True)
        url = place._replace(netloc=f"{place.username}@127.0.0.1:{proxy.port}", query="connect_timeout=1").geturl()
        arguments = ["lightning-sql", "serve", "--port", "0", "--database-url", url]
        done = await asyncio.to_thread(run, arguments, tmp_path, environment(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("lightning-sql: The database cannot be reached")


async def test_a_file_that_another_process_keeps_locked_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "locked.db"
    async with stage_on(f"sqlite:///{file}", tmp_path, options=OPTIONS) as stage, calling(stage) as caller:
        key = await started(caller)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writes = [*caller.writes(key), *(caller.post("/rollouts", {"input": "many"}) for _ in range(30))]
            answers = await asyncio.gather(*writes, *(caller.enqueue("many") for _ in range(30)))
            assert [(status, retry) for status, _, retry in answers] == [(503, "1")] * len(answers)
            assert await caller.inputs() == ["mine"]
            assert await caller.ready() == 200
            waiting = [asyncio.create_task(call) for call in caller.everything(key)]
            await asyncio.sleep(0.5)
            other.execute("COMMIT")
        answers = await asyncio.gather(*waiting)
        assert {status for status, _, _ in answers} <= {200, 201}
        assert sorted(await caller.inputs()) == ["mine", "started", "while away"]


async def test_our_client_rides_out_the_death_of_its_server() -> None:
    told = await absence.run(2.0)
    assert told["rollouts"] > 0
