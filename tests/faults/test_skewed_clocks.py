"""Two servers whose clocks are a minute apart: what the watchdogs of both make of attempts that live, and of others.

On PostgreSQL the time is the database's, so that nothing may follow from it. On SQLite it is the process's: a limit
may then be off by as much as the clocks are, and by no more.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lightning_api.client import LightningClient
from lightning_sql.database.engine import Database
from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.postgres import PostgresServer
from lightning_sql.testing.samples import make_span
from tests.faults.stage import Server, until
from tests.native_laws import broken_laws

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SKEW_SECONDS = 60.0
ABANDONED = 30
ATTEMPTS = 4
ALIVE = 6
PATIENCE = 200.0


class Pair:
    """Two servers on one database, one of them with a clock that is ahead."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self.database_url = database_url
        self._notebooks = [folder / f"{number}.jsonl" for number in range(2)]
        self._servers = [
            Server(database_url, folder / f"{number}.log", ("tests.faults.skewed", str(skew), str(notebook)))
            for number, (skew, notebook) in enumerate(zip((0.0, SKEW_SECONDS), self._notebooks, strict=True))
        ]
        self.clients: list[LightningClient] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for server in self._servers:
            stack.push_async_callback(server.kill)
            await server.start()
            client = await stack.enter_async_context(LightningClient(f"http://127.0.0.1:{server.port}"))
            self.clients.append(client)

    def ended(self) -> list[int]:
        """How many attempts the watchdog of each says that it ended."""
        return [sum(json.loads(line)[1] for line in book.read_text().splitlines()) for book in self._notebooks]

    @property
    def on_postgres(self) -> bool:
        return self.database_url.startswith("postgresql")

    async def laws(self, now: float) -> list[str]:
        async with SqlStore(Database(self.database_url)) as store:
            return await broken_laws(store, now)


@pytest.fixture(params=["sqlite", "postgres"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    url = f"sqlite:///{tmp_path / 'skewed.db'}"
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create_database()
    await prepare_database(url)
    async with AsyncExitStack() as stack:
        pair = Pair(url, tmp_path)
        await pair.start(stack)
        yield pair


def limits_of_the_living(pair: Pair) -> RolloutConfig:
    """A limit that is far off for whoever sends a sign of life now and then, and by the other clock long past.

    On SQLite that would end attempts, as it says above, so that the limit is longer by what the clocks differ.
    """
    limit = SKEW_SECONDS - 5
    return RolloutConfig(unresponsive_seconds=limit if pair.on_postgres else limit + SKEW_SECONDS)


async def test_the_living_live_and_the_dead_die_once(pair: Pair) -> None:
    first, second = pair.clients
    dying = RolloutConfig(unresponsive_seconds=1.0, max_attempts=ATTEMPTS, retry_condition=["unresponsive"])
    living: list[AttemptedRollout] = []
    for client in pair.clients:
        requests = [EnqueueRolloutRequest(input="lives", config=limits_of_the_living(pair))] * ALIVE
        await client.enqueue_many_rollouts(requests)
        living += await client.dequeue_many_rollouts(limit=ALIVE, worker_id="living")
    assert len(living) == 2 * ALIVE
    dead = await first.enqueue_many_rollouts([EnqueueRolloutRequest(input="dies", config=dying)] * ABANDONED)
    ids = [rollout.rollout_id for rollout in dead]
    claims: Counter[str] = Counter()
    turn = 0
    async with asyncio.timeout(PATIENCE):
        while {rollout.status for rollout in await second.query_rollouts(rollout_id_in=ids)} != {"failed"}:
            turn += 1
            for client in pair.clients:
                claimed = await client.dequeue_many_rollouts(limit=ABANDONED // 4, worker_id="dying")
                claims.update(rollout.rollout_id for rollout in claimed)
            for client, rollout in zip(pair.clients * ALIVE, living, strict=True):
                await client.add_span(make_span(rollout.rollout_id, rollout.attempt.attempt_id, f"{turn}", turn))
            await asyncio.sleep(0.1)

    assert claims == dict.fromkeys(ids, ATTEMPTS)
    assert sum(pair.ended()) == ABANDONED * ATTEMPTS
    for rollout_id in ids:
        attempts = await first.query_attempts(rollout_id)
        assert [attempt.sequence_id for attempt in attempts] == list(range(1, ATTEMPTS + 1))
        assert {attempt.status for attempt in attempts} == {"unresponsive"}
    for rollout in living:
        [attempt] = await first.query_attempts(rollout.rollout_id)
        assert (attempt.attempt_id, attempt.status) == (rollout.attempt.attempt_id, "running")
    # A sign of life by the clock that is behind may come before the time of an earlier one, and with it the limit.
    assert await pair.laws(time.time() if pair.on_postgres else math.inf) == []


async def test_a_clock_that_is_ahead_would_end_the_living(pair: Pair) -> None:
    """That is, the test above would see it, and on SQLite the difference of the clocks counts in full."""
    limit = RolloutConfig(unresponsive_seconds=SKEW_SECONDS - 5)
    await pair.clients[0].enqueue_rollout("lives", config=limit)
    claimed = await pair.clients[0].dequeue_rollout("living")
    assert claimed is not None
    await pair.clients[0].enqueue_rollout("dies", config=RolloutConfig(unresponsive_seconds=1.0))
    doomed = await pair.clients[0].dequeue_rollout("dying")
    assert doomed is not None
    await until(lambda: sum(pair.ended()) >= (1 if pair.on_postgres else 2))
    statuses = [(await pair.clients[1].query_attempts(each.rollout_id))[0].status for each in (claimed, doomed)]
    assert statuses == (["preparing", "unresponsive"] if pair.on_postgres else ["unresponsive", "unresponsive"])
