"""What hot statements and pages of PostgreSQL touch is bounded, whatever there is and whatever the planner knows of it.

A bound is on rows times loops, for each row of a batch. SQLite's plans are in `test_hot_sqlite_plans`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from lightning_sql.database.dialects.hot import (
    AttemptChange,
    Claim,
    KeyNote,
    RolloutDraft,
    SpanBatch,
    SpanDraft,
    WorkerBeat,
)
from lightning_sql.database.dialects.hot_statement import HotStatement
from lightning_sql.database.dialects.postgresql_hot import HOT_SETTINGS, PostgreSQLHotPath
from lightning_sql.database.dialects.postgresql_statements import CLAIM, STATEMENTS
from lightning_sql.database.dialects.queue_front import QueueFront
from lightning_sql.database.engine import Database
from lightning_sql.database.reading import KeptReading, Reading
from lightning_sql.store.row_store import RolloutQuery, SpanQuery
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.postgres import PostgresServer
from tests.backends import run_apart
from tests.database.plans import Plan, Session, analyze, create, plan_of, plan_of_text, prepare, seed, session_on

pytestmark = pytest.mark.slow

SMALL = 100
KNOWN = 400
LARGE = 50_000
BATCHES = (1, 10, 100, 1000)

PER_ROW = 8
"""Rows of base tables that a statement may touch for each row of its batch."""
HANDLED_PER_ROW = 60
"""Rows that it may handle in all for each row of its batch."""
ALWAYS = 10


# What is asked


class AskedError(Exception):
    """Raised instead of asking the database."""


class Asking(PostgreSQLHotPath):
    """The hot path as it is, but that it only says which statement it would send, and with what."""

    def __init__(self, claim_timeout: float | None = None) -> None:
        super().__init__(create_async_engine("postgresql+asyncpg://nowhere/nothing"), "p", claim_timeout)

    async def _run(self, statement: HotStatement, values: Mapping[str, Any], *, writing: bool = True) -> list[Any]:
        raise AskedError(statement, values)


def span(rollout: str, attempt: str, span_id: str, number: int) -> SpanDraft:
    payloads = ('{"status_code":"OK"}', '{"a":1}', "[]", "[]")
    return SpanDraft(
        rollout, attempt, number, "t", span_id, None, "name", *payloads, 1.0, None, None, None, '{"r":1}', None
    )


def running(count: int) -> list[str]:
    """Ids of rollouts that are worked on, in a database that holds enough of them."""
    return [f"r{10 * number + 2}" for number in range(count)]


def note(number: int) -> KeyNote:
    return KeyNote(f"new key {number}", "route", "print")


CALLS: dict[str, Callable[[PostgreSQLHotPath, int], Any]] = {
    "enqueue": lambda hot, n: hot.enqueue(
        [RolloutDraft(f"new{i}", "{}", None, None, 5.0, None, 1, "[]", "{}") for i in range(n)], None
    ),
    "claims": lambda hot, n: hot.claim([Claim(f"w{i}", [f"at{i}"]) for i in range(n)], None),
    "a claim of many": lambda hot, n: hot.claim([Claim("w1", [f"at{i}" for i in range(n)])], None),
    "claims of nobody": lambda hot, n: hot.claim([Claim(None, [f"at{i}"]) for i in range(n)], None),
    "noted rollouts": lambda hot, n: hot.enqueue(
        [RolloutDraft(f"new{i}", "{}", None, None, 5.0, None, 1, "[]", "{}") for i in range(n)],
        None,
        [(note(i), "[]") for i in range(n)],
    ),
    "noted claims": lambda hot, n: hot.claim([Claim(f"w{i}", [f"at{i}"], note(i)) for i in range(n)], None),
    "noted spans": lambda hot, n: hot.add_spans(
        [SpanBatch([span(rollout, "a1", "new", 3)], False, note(i)) for i, rollout in enumerate(running(n))], None
    ),
    "spans of many": lambda hot, n: hot.add_spans(
        [SpanBatch([span(rollout, "a1", "new", 3)], strict=True) for rollout in running(n)], None
    ),
    "spans of one": lambda hot, n: hot.add_spans(
        [SpanBatch([span("r2", "a1", f"new{i}", i) for i in range(n)], strict=True)], None
    ),
    "spans again": lambda hot, n: hot.add_spans(
        [SpanBatch([span(rollout, "a1", f"s{i % 2 + 1}", 3)], strict=False) for i, rollout in enumerate(running(n))],
        None,
    ),
    "numbers of spans": lambda hot, n: hot.number_spans([(rollout, "a1", "s9") for rollout in running(n)]),
    "updates": lambda hot, n: hot.update_attempts(
        [AttemptChange(rollout, "a1", "failed", None, None, None) for rollout in running(n)], None
    ),
    "updates of the latest": lambda hot, n: hot.update_attempts(
        [AttemptChange(rollout, None, "running", f"w{i}", 5.0, "{}") for i, rollout in enumerate(running(n))], None
    ),
    "numbers": lambda hot, n: hot.issue_numbers(dict.fromkeys(running(n), 2)),
    "beats": lambda hot, n: hot.beat_workers([WorkerBeat(f"w{i}", "{}") for i in range(n)], None),
    "rollouts": lambda hot, n: hot.rollouts(running(n), False),
    "finished rollouts": lambda hot, n: hot.rollouts([f"r{10 * i + 6}" for i in range(n)], True),
}


LIMITED = {f"{name} where claims end": name for name in CALLS if name.startswith(("claims", "updates"))}
CALLS |= {name: CALLS[plain] for name, plain in LIMITED.items()}


async def asked(name: str, count: int) -> tuple[HotStatement, Mapping[str, Any]]:
    with pytest.raises(AskedError) as caught:
        await CALLS[name](Asking(5.0 if name in LIMITED else None), count)
    return caught.value.args


# Where it is asked


@dataclass(frozen=True)
class State:
    """A database, and a session like the hot path's own that prepared its statements, perhaps, long ago."""

    size: int
    hot: Session


class Databases:
    """Seeded once, and copied."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._sizes: dict[int, str] = {}
        self._made: list[str] = []

    def of(self, size: int) -> str:
        """The URL of a fresh database with so many rollouts in each of two partitions."""
        if size not in self._sizes:
            self._sizes[size] = self._server.create_database()
            run_apart(fill(self._sizes[size], size))
        self._made.append(self._server.create_database(template=self._sizes[size]))
        return self._made[-1]

    def drop(self) -> None:
        for url in (*self._sizes.values(), *self._made):
            self._server.drop_database(url)


async def fill(url: str, size: int) -> None:
    async with session_on(url) as session:
        await create(session)
        if size:
            await seed(session, size)


@pytest.fixture(scope="module")
def databases(postgres: PostgresServer) -> Iterator[Databases]:
    databases = Databases(postgres)
    yield databases
    databases.drop()


async def prepare_all(session: Session) -> None:
    done: set[str] = set()
    for name, count in itertools.product(CALLS, (1, 2)):
        statement, values = await asked(name, count)
        if statement.name not in done:
            await prepare(session, statement, values)
            done.add(statement.name)
    assert done == {statement.name for statement in STATEMENTS}


STATES = {
    "empty": (0, False, None),
    "small": (SMALL, False, None),
    "small and analyzed": (SMALL, True, None),
    "large": (LARGE, False, None),
    "large and analyzed": (LARGE, True, None),
    "large, prepared when it was small and analyzed": (KNOWN, True, 20_000),
}


@pytest.fixture(params=STATES)
async def state(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[State]:
    size, analyzed, grown = STATES[request.param]
    url = databases.of(size)
    async with session_on(url, HOT_SETTINGS) as hot, session_on(url) as other:
        if analyzed:
            await analyze(other)
        await prepare_all(hot)
        if grown is not None:
            await seed(other, grown, size + 1)
        yield State(grown or size, hot)


@pytest.fixture
async def large(databases: Databases) -> AsyncIterator[tuple[str, Session]]:
    """A large database that was vacuumed and analyzed, and a session there."""
    url = databases.of(LARGE)
    async with session_on(url) as session:
        await session.execute("VACUUM ANALYZE")
        yield url, session


# Hot statements


def touched(plan: Plan) -> float:
    return sum(plan.touched.values())


async def test_hot_statements_touch_little(state: State) -> None:
    for name in CALLS:
        for count in BATCHES:
            if count > max(1, state.size // 10) and state.size:
                continue  # there are not so many to be worked on
            statement, values = await asked(name, count)
            plan = await plan_of(state.hot, statement, values)
            # A small table may be read from one end to the other for each row: that is a page or two.
            small = 2 * state.size * (count + ALWAYS) if state.size <= SMALL else 0
            told = f"{name} of {count}: {plan.touched}\n{plan.text}"
            assert touched(plan) <= PER_ROW * count + ALWAYS + small, told
            assert plan.handled <= HANDLED_PER_ROW * (count + 1) + small, told
            if not small:
                assert not plan.walked, told


async def test_the_bounds_would_be_exceeded(large: tuple[str, Session]) -> None:
    """That is, plans are read right: a table that is walked through counts, and so does what is thrown away."""
    _, session = large
    plan = await plan_of_text(session, "SELECT * FROM rollouts WHERE input IS NULL")
    assert (plan.walked, plan.touched) == (["rollouts"], {"rollouts": 2.0 * LARGE})
    plan = await plan_of_text(session, "SELECT count(*) FROM rollouts WHERE partition_id = 'p' AND status = 'failed'")
    assert (plan.walked, plan.touched) == ([], {"rollouts": LARGE / 10})
    await session.execute("SET enable_indexscan = off")
    plan = await plan_of_text(session, "SELECT input FROM rollouts WHERE partition_id = 'p' AND rollout_id = 'r5'")
    assert plan.touched["rollouts"] >= 1
    await session.execute("SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_material = off")
    batch = "unnest(ARRAY(SELECT n FROM generate_series(1, 100) n))"
    plan = await plan_of_text(session, f"SELECT FROM {batch} a JOIN {batch} b ON a = b")
    assert plan.handled >= 10_000


async def test_a_plan_from_an_empty_database_is_given_up_once_tables_are_analyzed(databases: Databases) -> None:
    url = databases.of(0)
    async with session_on(url, HOT_SETTINGS) as hot:
        await prepare_all(hot)
        # What a session has written is counted now and then, and when it ends.
        async with session_on(url) as other:
            await seed(other, 2_000)
        async with SqlStore(Database(url), partition="p") as store, asyncio.timeout(60):
            while not await store._lanes.refresh_statistics():  # noqa: ASYNC110 - it is in the database
                await asyncio.sleep(0.05)
        for name in CALLS:
            statement, values = await asked(name, 100)
            plan = await plan_of(hot, statement, values)
            assert touched(plan) <= PER_ROW * 100 + ALWAYS, f"{name}: {plan.touched}\n{plan.text}"


# Claims


async def test_claims_while_an_old_snapshot_is_open(databases: Databases) -> None:
    """Dead entries at the front of the queue stay as long as somebody might still see them; claims pass over them."""
    url = databases.of(LARGE)
    statement, values = await asked("claims", 1)
    now = [1000.0]
    buffers: list[int] = []
    looked: list[int] = []
    async with (
        session_on(url, HOT_SETTINGS) as session,
        session_on(url, "BEGIN ISOLATION LEVEL REPEATABLE READ") as old,
        SqlStore(Database(url), partition="p", scan_debounce_seconds=1e12) as store,
    ):
        await prepare(session, statement, values)
        assert await old.fetchval("SELECT count(*) FROM rollouts WHERE partition_id = 'p'") == LARGE
        hot: Any = store._lanes.hot
        hot._front = front = QueueFront(lambda: now[0])
        for _ in range(120):
            assert len(await store.dequeue_many_rollouts(limit=50)) == 50
            now[0] += 0.2
            floor = front.floor()
            plan = await plan_of(session, CLAIM.one, {**values, "floor": floor})
            assert touched(plan) <= PER_ROW + ALWAYS
            (buffers if floor else looked).append(plan.buffers)
    # A claim that looks at the whole queue passes over everything that was claimed since the snapshot.
    assert max(looked) > 400
    # Others pass over what was claimed in the last moments, however much was before.
    half = len(buffers) // 2
    assert half > 30
    assert max(buffers) < 200
    assert max(buffers[half:]) <= 1.2 * max(buffers[:half])


# Pages

NEWEST: dict[str, Any] = {"sort_by": "start_time", "sort_order": "desc", "limit": 100}
PAGES: dict[str, dict[str, Any]] = {
    "newest": NEWEST,
    "newest of a status": {**NEWEST, "status_in": ["running"]},
    "newest of a status that none has": {**NEWEST, "status_in": ["cancelled"]},
    "newest of some": {**NEWEST, "status_in": ["running", "failed", "queuing"]},
    "newest of some, further on": {**NEWEST, "status_in": ["running", "failed", "queuing"], "offset": 300},
    "newest of all": {**NEWEST, "status_in": ["running", "failed", "queuing", "requeuing", "succeeded"]},
}
MORE_PAGES: dict[str, dict[str, Any]] = {
    "first": {"limit": 100},
    "oldest": {**NEWEST, "sort_order": "asc"},
    "oldest of a status": {**NEWEST, "sort_order": "asc", "status_in": ["failed"]},
    "by id": {"rollout_id_in": [f"r{number}" for number in range(1, 101)], "limit": 100},
}


class Sent:
    """The statements that a store reads with, with their parameters."""

    def __init__(self, store: SqlStore) -> None:
        self.all: list[tuple[str, Sequence[Any]]] = []
        engine = store._database._here().engines.reader.sync_engine
        event.listen(engine, "before_cursor_execute", self._note)
        hot: Any = store._lanes.hot
        self._fetch = hot.fetch_bounded
        hot.fetch_bounded = self._fetch_kept
        self._dialect = engine.dialect

    async def _fetch_kept(self, reading: Reading, values: Mapping[str, Any], *rest: Any) -> Any:
        if isinstance(reading, KeptReading):
            self.all.append(reading.on(self._dialect, values))
        return await self._fetch(reading, values, *rest)

    def _note(self, _connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        self.all.append((statement, parameters))


async def plans_of(url: str, query: RolloutQuery | SpanQuery) -> list[Plan]:
    """The plans of a page's statements."""
    async with SqlStore(Database(url), partition="p", scan_debounce_seconds=1e12) as store:
        await store.query_workers()
        # That was the first call, which also lets the database look at its tables, meanwhile.
        tending = store._here._tending
        assert tending is not None
        await tending
        sent = Sent(store)
        page = await (store.rollout_page(query) if isinstance(query, RolloutQuery) else store.span_page(query))
        assert page.rest is None or query.limit < 0
    async with session_on(url) as session:
        return [await plan_of_text(session, statement, *parameters) for statement, parameters in sent.all]


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("size", [0, SMALL, LARGE])
async def test_pages_newest_first_touch_what_they_show(databases: Databases, size: int, analyzed: bool) -> None:
    url = databases.of(size)
    if analyzed:
        async with session_on(url) as session:
            await analyze(session)
    for name, query in PAGES.items():
        [plan] = await plans_of(url, RolloutQuery(**query, total=False))
        told = f"{name}: {plan.touched}\n{plan.text}"
        # The index, the row, its latest attempt; those of the index also before the offset, and one more per status.
        most = 3 * 100 + query.get("offset", 0) + 10 if size > SMALL else 5 * size**2
        assert touched(plan) <= most, told
        assert size <= SMALL or not plan.walked, told


async def test_other_pages_of_a_large_table(large: tuple[str, Session]) -> None:
    url, _ = large
    for name, query in MORE_PAGES.items():
        [plan] = await plans_of(url, RolloutQuery(**query, total=False))
        assert touched(plan) <= 6 * 100, f"{name}: {plan.touched}\n{plan.text}"
        assert not plan.walked


async def test_an_exact_total_is_counted_in_an_index(large: tuple[str, Session]) -> None:
    url, _ = large
    for name, query in PAGES.items():
        [plan] = await plans_of(url, RolloutQuery(**query, total=True))
        [without] = await plans_of(url, RolloutQuery(**query, total=False))
        tenths = len(query.get("status_in", range(10))) + 4 * (name == "newest of all")
        matches = 0 if "none" in name else LARGE * (tenths + ("running" in query.get("status_in", ()))) / 10
        told = f"{name}: {plan.touched}\n{plan.text}"
        assert touched(plan) - touched(without) == matches, told
        # Ten rows of a table fill a page or so, many more entries one of an index.
        assert plan.buffers - without.buffers <= matches / 50 + 20, told
        assert not plan.walked, told


async def test_pages_of_spans_touch_those_of_the_rollout(large: tuple[str, Session]) -> None:
    url, _ = large
    for query in (
        SpanQuery(rollout_id="r2"),
        SpanQuery(rollout_id="r2", limit=100),
        SpanQuery(rollout_id="r2", attempt_id="latest", limit=100),
        SpanQuery(rollout_id="r3", name="name", sort_by="name", limit=100),
        SpanQuery(rollout_id="none"),
    ):
        for plan in await plans_of(url, query):
            assert touched(plan) <= 20, f"{query}: {plan.touched}\n{plan.text}"
            assert not plan.walked
