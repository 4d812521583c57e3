"""Long pages come in chunks, which together are what one statement would have answered."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import delete, update

from lightning_sql.database.native import ATTEMPTS, ROLLOUTS, SPANS
from lightning_sql.errors import InvalidRequestError
from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig
from lightning_sql.store import sql_pages
from lightning_sql.store.row_store import RolloutQuery, RowPage, SpanQuery
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.backends import Clock
from tests.store.native import key_of

pytestmark = pytest.mark.slow

COUNT = 43
HEAVY = 3000
"""Characters that no compression makes much smaller."""
ROLLOUT_SORTS = (None, "rollout_id", "start_time", "end_time", "mode", "resources_id", "status")
SPAN_SORTS = (None, "sequence_id", "attempt_id", "trace_id", "span_id", "parent_id", "name", "start_time", "end_time")
UNCHANGING = (None, "rollout_id", "start_time")


def heavy(chance: random.Random, size: int = HEAVY) -> str:
    return "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(size // 3))


async def fill(store: SqlStore, clock: Clock, seed: int = 1, weight: int = 0) -> list[Rollout]:
    """Rollouts of every status, some with attempts, with many ties in whatever they can be sorted by."""
    chance = random.Random(seed)
    found: list[Rollout] = []
    while len(found) < COUNT:
        requests = [
            EnqueueRolloutRequest(
                input={"n": len(found) + n, "heavy": heavy(chance, weight) if chance.random() < 0.4 else ""},
                mode=chance.choice([None, "train", "val"]),
                resources_id=chance.choice([None, "a", "b"]),
                config=RolloutConfig(max_attempts=3, retry_condition=["failed"]),
            )
            for n in range(min(chance.randint(1, 7), COUNT - len(found)))
        ]
        found += await store.enqueue_many_rollouts(requests)
        clock.now += chance.choice([0.0, 1.0])
    claimed = await store.dequeue_many_rollouts(limit=25)
    for rollout in claimed:
        clock.now += chance.choice([0.0, 0.0, 1.0])
        outcome: Any = chance.choice(["preparing", "running", "succeeded", "failed"])
        await store.update_attempt(*key_of(rollout), status=outcome)
    for rollout in chance.sample(found, 6):
        await store.update_rollout(rollout.rollout_id, status=chance.choice(["cancelled", "failed"]))
    return found


async def rows_of(page: RowPage) -> list[Sequence[Any]]:
    """All rows of a page, no chunk of which may be empty."""
    rows = list(page.first)
    if page.rest is not None:
        async for chunk in page.rest:
            assert chunk
            rows += chunk
    return rows


def queries(chance: random.Random, count: int) -> list[dict[str, Any]]:
    statuses: list[Any] = ["queuing", "requeuing", "preparing", "running", "failed", "succeeded", "cancelled"]
    return [
        {
            "sort_by": chance.choice([*ROLLOUT_SORTS, "start_time"]),
            "sort_order": chance.choice(["asc", "desc"]),
            "status_in": chance.choice([None, chance.sample(statuses, 1), chance.sample(statuses, 3), statuses, []]),
            "rollout_id_contains": chance.choice([None, None, None, "a"]),
            "filter_logic": chance.choice(["and", "or"]),
            "limit": chance.choice([-1, -1, 1, 9, 10, 21, 60]),
            "offset": chance.choice([0, 0, 3, 10, 40, 50]),
        }
        for _ in range(count)
    ]


# The same as in one statement


@pytest.mark.parametrize("weight", [0, HEAVY])
async def test_chunks_of_rollouts_make_up_the_page(
    store: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, weight: int
) -> None:
    await fill(store, clock, weight=weight)
    asked = queries(random.Random(2), 40)
    whole = [(await store.query_rollouts(**query)) for query in asked]
    assert len({len(page) for page in whole}) > 5
    monkeypatch.setattr(sql_pages, "CHUNK_ROWS", 5)
    monkeypatch.setattr(sql_pages, "CHUNK_BYTES", 2 * HEAVY)
    for query, expected in zip(asked, whole, strict=True):
        assert await store.query_rollouts(**query) == expected, query
        unlimited = await store.rollout_page(RolloutQuery(**query, total=False))
        assert unlimited.total is None
        ids = [row[0] for row in await rows_of(unlimited)]
        assert ids == [rollout.rollout_id for rollout in expected], query
    assert any(isinstance(rollout, AttemptedRollout) for page in whole for rollout in page)


async def test_chunks_of_spans_make_up_the_page(store: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    rollout = await store.start_rollout(1)
    attempts = [rollout.attempt, *[(await store.start_attempt(rollout.rollout_id)).attempt for _ in range(2)]]
    spans = [
        make_span(
            rollout.rollout_id,
            chance.choice(attempts).attempt_id,
            f"s{number}",
            chance.randint(0, 9),
            trace_id=chance.choice(["t1", "t2"]),
            parent_id=chance.choice([None, "s1", "s2"]),
            name=chance.choice(["alpha", "beta"]),
            start_time=chance.choice([None, 1.0, 2.0]),
            attributes={"heavy": heavy(chance) if chance.random() < 0.4 else ""},
        )
        for number in range(COUNT)
    ]
    await store.add_many_spans(spans)
    asked: list[dict[str, Any]] = [
        {
            "rollout_id": rollout.rollout_id,
            "attempt_id": chance.choice([None, None, "latest", attempts[0].attempt_id]),
            "sort_by": chance.choice([*SPAN_SORTS, "sequence_id", "sequence_id"]),
            "sort_order": chance.choice(["asc", "desc"]),
            "name": chance.choice([None, None, "alpha"]),
            "limit": chance.choice([-1, -1, 9, 10, 60]),
            "offset": chance.choice([0, 0, 3, 40]),
        }
        for _ in range(40)
    ]
    whole = [await store.query_spans(**query) for query in asked]
    monkeypatch.setattr(sql_pages, "CHUNK_ROWS", 5)
    monkeypatch.setattr(sql_pages, "CHUNK_BYTES", 2 * HEAVY)
    for query, expected in zip(asked, whole, strict=True):
        assert await store.query_spans(**query) == expected, query
        page = await store.span_page(SpanQuery(**query, total=False))
        assert [row[4] for row in await rows_of(page)] == [span.span_id for span in expected], query


async def test_no_chunk_is_heavier_than_it_may_be(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(4)
    rollout = await store.start_rollout(1)
    sizes = [chance.choice([10, 1000, 3000, 20_000]) for _ in range(60)]
    spans = [
        make_span(*key_of(rollout), f"s{number}", number, attributes={"heavy": heavy(chance, size)})
        for number, size in enumerate(sizes)
    ]
    await store.add_many_spans(spans)
    most = 10_000
    monkeypatch.setattr(sql_pages, "CHUNK_BYTES", most)
    for sort_by in ("sequence_id", "name"):
        page = await store.span_page(SpanQuery(rollout_id=rollout.rollout_id, sort_by=sort_by))
        chunks = [page.first]
        assert page.rest is not None
        chunks += [chunk async for chunk in page.rest]
        assert sum(map(len, chunks)) == page.total == len(spans)
        assert len(chunks) > 10
        for chunk in chunks:
            # The row that reaches the bound is the last one. What a database keeps of a text may be smaller.
            before = [len(row[8].encode()) for row in chunk][:-1]
            assert sum(before) < 1.5 * most


# While others write


async def forget(store: SqlStore, *rollout_ids: str) -> None:
    """Delete rollouts behind the store's back."""
    for table in (ATTEMPTS, ROLLOUTS):
        statement = delete(table).where(table.c.rollout_id.in_(rollout_ids))
        await store._lanes.hot.write(lambda connection, statement=statement: connection.execute(statement) and None)


@pytest.mark.parametrize("sort_order", ["asc", "desc"])
@pytest.mark.parametrize("sort_by", ROLLOUT_SORTS)
async def test_what_others_write_between_chunks(
    store: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, sort_by: str | None, sort_order: Any
) -> None:
    """What stays as it is appears once, in its order; what is deleted, or matches no longer, is left out."""
    await fill(store, clock, weight=HEAVY)
    statuses: list[Any] = ["queuing", "requeuing", "preparing", "running", "failed", "succeeded"]
    query = RolloutQuery(status_in=statuses, sort_by=sort_by, sort_order=sort_order)
    before = [row[0] for row in await rows_of(await store.rollout_page(query))]
    monkeypatch.setattr(sql_pages, "CHUNK_ROWS", 6)
    monkeypatch.setattr(sql_pages, "CHUNK_BYTES", 2 * HEAVY)
    page = await store.rollout_page(query)
    seen = [row[0] for row in page.first]
    assert page.rest is not None
    assert seen == before[: len(seen)]
    changed: set[str] = set()
    new: set[str] = set()
    chance = random.Random(5)
    for step in range(100):
        if step < 4:
            clock.now += 1.0
            ahead = [id_ for id_ in before if id_ not in seen and id_ not in changed]
            gone, ended, moved = chance.sample(ahead, 3)
            await forget(store, gone, seen[0])
            await store.update_rollout(ended, status="cancelled")
            # Of a row that stays, what it is sorted by changes.
            await store.update_rollout(moved, mode="test", status="succeeded", resources_id="zz")
            changed |= {gone, ended}
            if sort_by not in UNCHANGING:
                changed.add(moved)
                new.add(moved)
            late = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="late") for _ in range(2)])
            new |= {rollout.rollout_id for rollout in late}
        try:
            chunk = await anext(page.rest)
        except StopAsyncIteration:
            break
        seen += [row[0] for row in chunk]
    assert len(set(seen)) == len(seen), [id_ for id_ in seen if seen.count(id_) > 1]
    stayed = [id_ for id_ in before if id_ not in changed]
    assert [id_ for id_ in seen if id_ in stayed] == stayed
    assert set(seen) <= {*before, *new}
    # One that moved was there all the time.
    assert {id_ for id_ in new if id_ in before} <= set(seen)


async def test_a_sort_key_that_changes_while_a_heavy_chunk_is_cut(
    store: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(6)
    requests = [EnqueueRolloutRequest(input=heavy(chance), mode="train") for _ in range(24)]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    monkeypatch.setattr(sql_pages, "CHUNK_ROWS", 8)
    monkeypatch.setattr(sql_pages, "CHUNK_BYTES", 2 * HEAVY)
    page = await store.rollout_page(RolloutQuery(sort_by="mode"))
    seen = [row[0] for row in page.first]
    assert page.rest is not None
    assert len(seen) < 8
    turns = 0
    async for chunk in page.rest:
        seen += [row[0] for row in chunk]
        # The last ones come first now.
        turns += 1
        changed = update(ROLLOUTS).where(ROLLOUTS.c.rollout_id.in_(ids[-turns:])).values(mode=None)
        await store._lanes.hot.write(lambda connection, changed=changed: connection.execute(changed) and None)
    assert turns > 4
    assert sorted(seen) == sorted(ids)


@pytest.mark.parametrize("sort_by", ["name", "sequence_id", None])
async def test_spans_that_come_between_chunks(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch, sort_by: str | None
) -> None:
    rollout = await store.start_rollout(1)
    spans = [make_span(*key_of(rollout), f"s{number}", number, name="m") for number in range(30)]
    await store.add_many_spans(spans)
    monkeypatch.setattr(sql_pages, "CHUNK_ROWS", 4)
    page = await store.span_page(SpanQuery(rollout_id=rollout.rollout_id, sort_by=sort_by))
    seen = [row[4] for row in page.first]
    assert page.rest is not None
    turn = 0
    while True:
        turn += 1
        early = make_span(*key_of(rollout), f"early{turn}", -turn, name="a")
        if turn < 4:
            await store.add_many_spans([early])
        if turn == 2:
            gone = delete(SPANS).where(SPANS.c.rollout_id == rollout.rollout_id, SPANS.c.span_id.in_(["s0", "s29"]))
            await store._lanes.hot.write(lambda connection, gone=gone: connection.execute(gone) and None)
        try:
            seen += [row[4] for row in await anext(page.rest)]
        except StopAsyncIteration:
            break
    assert len(set(seen)) == len(seen)
    old = [span_id for span_id in seen if not span_id.startswith("early")]
    assert old == [span.span_id for span in spans[:-1]]


# What is no page


async def test_a_bad_page_is_refused(store: SqlStore) -> None:
    for call in (
        store.query_rollouts(limit=0),
        store.query_rollouts(offset=-1),
        store.query_rollouts(sort_by="config"),
        store.query_rollouts(sort_by=""),
        store.query_attempts("r", sort_by="metadata"),
        store.query_spans("r", sort_by="attributes"),
        store.query_spans("r", limit=-2),
        store.query_workers(limit=-2),
        store.query_resources(sort_by="resources"),
    ):
        with pytest.raises(InvalidRequestError):
            await call


async def test_pages_past_the_end(store: SqlStore, clock: Clock) -> None:
    await fill(store, clock)
    for sort_by in ROLLOUT_SORTS:
        for limit in (-1, 5):
            page = await store.query_rollouts(sort_by=sort_by, limit=limit, offset=1000)
            assert (page.items, page.total) == ([], COUNT)
