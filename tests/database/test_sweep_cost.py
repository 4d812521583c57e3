"""What the watchdog costs follows from what is due, not from how many rollouts run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from lightning_sql.database.engine import Database
from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from tests.database.plans import Session, analyze, create, plan_of_text, seed, session_on

FEW = 2000
MANY = 20_000
DUE = 7


# PostgreSQL


class Sent:
    """The statements that a store sends, with their parameters."""

    def __init__(self, store: SqlStore) -> None:
        self.all: list[tuple[str, Sequence[Any]]] = []
        engine = store._database._here().engines.writer.sync_engine
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        self.all.append((statement, parameters))


async def make_due(session: Session, first: int) -> None:
    """Let some of the running rollouts, which are long over their limits, be due."""
    ids = [f"r{10 * number + 2}" for number in range(first, first + DUE)]
    await session.execute("UPDATE rollouts SET watch_at = 1 WHERE partition_id = 'p' AND rollout_id = ANY($1)", ids)


async def cost(url: str, session: Session, first: int) -> tuple[int, float, list[str]]:
    """Of a sweep: its statements, the rows they touch, and what of that are whole tables."""
    await make_due(session, first)
    async with SqlStore(Database(url), partition="p") as store:
        await store.ping()
        sent = Sent(store)
        assert await store.sweep() == DUE
        transaction = session.transaction()
        await transaction.start()
        await make_due(session, first + DUE)
        plans = [await plan_of_text(session, text, *parameters) for text, parameters in sent.all]
        await transaction.rollback()
    return (
        len(plans),
        sum(sum(plan.touched.values()) for plan in plans),
        [name for plan in plans for name in plan.walked],
    )


@pytest.mark.slow
async def test_on_postgres(postgres_url: str) -> None:
    async with session_on(postgres_url) as session:
        await create(session)
        await seed(session, FEW)
        await analyze(session)
        few = await cost(postgres_url, session, 0)
        await seed(session, MANY, FEW + 1)
        await analyze(session)
        many = await cost(postgres_url, session, 2 * DUE)
    assert few[1] >= DUE
    assert many == few
    assert many[2] == []


# SQLite


async def steps_of_a_sweep(file: Path, running: int) -> int:
    """How many steps SQLite's machine takes for a sweep, beside so many rollouts that run within their limits."""
    now = [1000.0]
    url = f"sqlite:///{file}"
    await prepare_database(url)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def count(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(step, 1)

    async with SqlStore(Database(url), clock=lambda: now[0]) as store:
        for seconds, number in ((10.0, DUE), (1000.0, running)):
            config = RolloutConfig(timeout_seconds=seconds)
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, config=config)] * number)
            assert len(await store.dequeue_many_rollouts(limit=number)) == number
        now[0] += 20.0
        await store._lanes.hot.write(count)
        await store._lanes.hot.read(count)
        steps = 0
        assert await store.sweep() == DUE
    return steps


async def test_on_sqlite(tmp_path: Path) -> None:
    few, many = [await steps_of_a_sweep(tmp_path / f"{running}.db", running) for running in (FEW // 10, MANY // 10)]
    assert few > DUE
    assert many == few
