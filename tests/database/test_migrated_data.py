"""What the collections hold moves to the native tables, and back, and nothing is lost on the way."""

import asyncio
import json
import math
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update

from lightning_sql.database import native, schema
from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import Migrations
from lightning_sql.errors import ConfigurationError
from lightning_sql.records import (
    Attempt,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
)
from lightning_sql.store.factory import prepare_database
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import assert_same, make_span
from tests.database.migrating import run
from tests.database.old_data import (
    BEFORE,
    CONFIGS,
    COUNTERPARTS,
    OTHER_NAMES,
    PARTITIONS,
    PAYLOADS,
    answers_of,
    collections_as_stored,
    everything,
    old_store,
    rows_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
async def filled(database_url: str) -> dict[str, dict[str, str]]:
    """A database at the revision before, in which two partitions hold everything; the names of their rollouts."""
    await Migrations(database_url).upgrade(BEFORE)
    names: dict[str, dict[str, str]] = {}
    for partition in PARTITIONS:
        async with old_store(database_url, partition) as old:
            await old.fill()
            names[partition] = old.names
    return names


async def test_every_column_goes_up_as_it_is_stored(database_url: str, filled: object) -> None:
    before = await collections_as_stored(database_url)
    await Migrations(database_url).upgrade()
    for table, old in COUNTERPARTS.items():
        names = [column.name for column in table.c if OTHER_NAMES.get(column.name, column.name) in old.c]
        rows = await rows_of(database_url, table, names)
        assert rows == await rows_of(database_url, old, [OTHER_NAMES.get(name, name) for name in names])
        assert {row[names.index(schema.PARTITION)] for row in rows} == set(PARTITIONS)
    assert await collections_as_stored(database_url) == before


async def test_what_has_no_column_of_its_own_goes_up(database_url: str, filled: dict[str, dict[str, str]]) -> None:
    before = await everything(database_url)
    await Migrations(database_url).upgrade()
    for partition, old in before.items():
        records: list[Rollout] = old["rollouts"]
        table = native.ROLLOUTS
        found = {
            row.rollout_id: row
            for row in await run(database_url, select(table).where(table.c.partition_id == partition))
        }
        assert set(found) == {rollout.rollout_id for rollout in records}
        for rollout, attempts in zip(records, old["attempts"], strict=True):
            row, config = found[rollout.rollout_id], rollout.config
            limits = (row.timeout_seconds, row.unresponsive_seconds, row.max_attempts)
            assert limits == (config.timeout_seconds, config.unresponsive_seconds, config.max_attempts)
            assert row.retry_condition == json.dumps(config.retry_condition, separators=(",", ":"))
            assert row.attempt_count == max((attempt.sequence_id for attempt in attempts), default=0)
            limited = config.timeout_seconds is not None or config.unresponsive_seconds is not None
            active = rollout.status in ("preparing", "running")
            assert row.watch_at == (0.0 if active and limited else None)
        names = filled[partition]
        queued = [row for row in found.values() if row.queue_position is not None]
        queue = [row.rollout_id for row in sorted(queued, key=lambda row: row.queue_position)]
        assert queue == old["queue"]
        assert queue[-2:] == [names["forgotten"], names["also forgotten"]]
        assert queue.index(names["retried"]) < queue.index(names["last"]) < queue.index(names["infinite"])
        watched = {row.rollout_id for row in found.values() if row.watch_at is not None}
        assert {names["exact"], names["limited"]} < watched
        assert found[names["retried"]].attempt_count == found[names["done"]].attempt_count == 2

        counters = native.SPAN_SEQUENCES
        values = select(counters.c.rollout_id, counters.c.value).where(counters.c.partition_id == partition)
        keys = [*(rollout.rollout_id for rollout in records), "unknown", "no counter"]
        issued = {key: value for key, value in zip(keys, old["counters"], strict=True) if isinstance(value, int)}
        assert dict(await run(database_url, values)) == issued
        assert issued["unknown"] == 2
        assert issued[names["running"]] == 10


async def test_the_native_store_goes_on_and_its_work_goes_down(
    database_url: str, filled: dict[str, dict[str, str]]
) -> None:
    before = await everything(database_url)
    migrations = Migrations(database_url)
    await migrations.upgrade()
    after: dict[str, dict[str, Any]] = {}
    for partition in PARTITIONS:
        names, old = filled[partition], before[partition]
        # At the beginning of time no limit is passed yet.
        async with SqlStore(Database(database_url), partition=partition, clock=lambda: 0.0) as store:
            answers = await answers_of(store)
            assert_same(answers, {name: old[name] for name in answers})
            created = await store.enqueue_rollout(PAYLOADS, config=CONFIGS["infinite"])
            claimed = await store.dequeue_many_rollouts(limit=len(old["queue"]) - 1, worker_id="new")
            assert [rollout.rollout_id for rollout in claimed] == old["queue"][:-1]
            assert [rollout.attempt.sequence_id for rollout in claimed if rollout.rollout_id == names["retried"]] == [3]
            assert await store.get_next_span_sequence_id(names["running"], "any") == 11
            [ended, *_] = claimed
            await store.add_span(make_span(ended.rollout_id, ended.attempt.attempt_id, "new", sequence_id=50))
            await store.update_attempt(ended.rollout_id, "latest", status="succeeded")
            await store.add_resources({})
            after[partition] = await answers_of(store)
            after[partition]["queue"] = [old["queue"][-1], created.rollout_id]
    await migrations.downgrade(BEFORE)
    for partition, answers in (await everything(database_url)).items():
        del answers["counters"]
        assert_same(answers, after[partition])


async def test_sequences_go_on_after_what_was_copied(postgres_url: str) -> None:
    await Migrations(postgres_url).upgrade(BEFORE)
    async with old_store(postgres_url, PARTITIONS[0]) as old:
        await old.fill()
    await Migrations(postgres_url).upgrade()
    for table in (native.ROLLOUTS, native.SPANS, native.RESOURCES, native.WORKERS):
        numbers = select(table.c.seq)
        if table is native.ROLLOUTS:
            numbers = numbers.union_all(select(table.c.queue_position).where(table.c.queue_position.is_not(None)))
        highest = max(row[0] for row in await run(postgres_url, numbers))
        assert await run(postgres_url, text(f"SELECT nextval('{table.name}_order')")) == [(highest + 1,)]


async def test_an_empty_database_counts_from_one(postgres_url: str) -> None:
    await Migrations(postgres_url).upgrade()
    for table in (native.ROLLOUTS, native.SPANS, native.RESOURCES, native.WORKERS):
        assert await run(postgres_url, text(f"SELECT nextval('{table.name}_order')")) == [(1,)]


async def test_up_and_down_and_up_again_keeps_everything(database_url: str, filled: dict[str, dict[str, str]]) -> None:
    before = await everything(database_url)
    migrations = Migrations(database_url)
    await migrations.upgrade()
    numbers = ("seq", "queue_position")  # made anew on the way down
    names = {table: [column.name for column in table.c if column.name not in numbers] for table in COUNTERPARTS}
    first = [await rows_of(database_url, *pair) for pair in names.items()]
    await migrations.downgrade(BEFORE)
    assert_same(await everything(database_url), before)
    for partition in PARTITIONS:
        async with old_store(database_url, partition) as old:
            queue = old.collections.rollout_queue
            entries = await queue.peek(100)
            assert [entry for entry in entries if entry != "nothing"] == before[partition]["queue"]
            assert all([await queue.has(entry) for entry in entries])
    await migrations.upgrade()
    assert [await rows_of(database_url, *pair) for pair in names.items()] == first
    assert await migrations.check() == []
    await migrations.downgrade(BEFORE)
    assert_same(await everything(database_url), before)
    async with old_store(database_url, PARTITIONS[0]) as old:
        claimed = await old.store.dequeue_many_rollouts(limit=100)
        assert [rollout.rollout_id for rollout in claimed] == before[PARTITIONS[0]]["queue"]


async def test_the_native_tables_win_on_the_way_down_and_the_rest_stays(
    database_url: str, filled: dict[str, dict[str, str]]
) -> None:
    migrations = Migrations(database_url)
    await migrations.upgrade()
    names, table = filled[PARTITIONS[0]], native.ROLLOUTS
    mine = table.c.partition_id == PARTITIONS[0]
    new = {"partition_id": PARTITIONS[0], "rollout_id": "new", "seq": 10_000, "start_time": 2.5, "attempt_count": 0}
    limits = {"max_attempts": 7, "retry_condition": '["timeout"]', "timeout_seconds": math.inf, "status": "queuing"}
    await run(
        database_url,
        update(table)
        .where(mine, table.c.rollout_id == names["last"])
        .values(status="cancelled", queue_position=None, end_time=8.5, input=["\x00"], timeout_seconds=0.1),
        insert(table).values(**new, **limits, queue_position=0, metadata={"\x00": 1}),
        update(native.SPAN_SEQUENCES).where(native.SPAN_SEQUENCES.c.rollout_id == "unknown").values(value=77),
    )
    async with old_store(database_url, PARTITIONS[0]) as old:
        await old.enqueue("of the collections", 1)
        kept = await old.store.get_rollout_by_id(old.names["of the collections"])
    await migrations.downgrade(BEFORE)
    async with old_store(database_url, PARTITIONS[0]) as old:
        last = await old.store.get_rollout_by_id(names["last"])
        assert last is not None
        assert (last.status, last.end_time, last.input, last.config.timeout_seconds) == (
            "cancelled",
            8.5,
            ["\x00"],
            0.1,
        )
        created = await old.store.get_rollout_by_id("new")
        assert created is not None
        assert created.config == RolloutConfig(timeout_seconds=math.inf, max_attempts=7, retry_condition=["timeout"])
        assert created.metadata == {"\x00": 1}
        assert await old.store.get_rollout_by_id(kept.rollout_id if kept else "") == kept
        entries = await old.collections.rollout_queue.peek(100)
        assert {"new", kept.rollout_id if kept else ""} < set(entries)
        assert names["last"] not in entries
        assert await old.collections.span_sequence_ids.get("unknown") == 77


async def test_more_rollouts_than_a_batch_go_up_and_down(database_url: str) -> None:
    migrations = Migrations(database_url)
    await migrations.upgrade(BEFORE)
    requests = [
        EnqueueRolloutRequest(input=number, config=RolloutConfig(timeout_seconds=number / 3)) for number in range(2_100)
    ]
    async with old_store(database_url, PARTITIONS[0]) as old:
        await old.store.enqueue_many_rollouts(requests)
        before = (await old.store.query_rollouts()).items
    await migrations.upgrade()
    table = native.ROLLOUTS
    rows = await run(database_url, select(table.c.input, table.c.timeout_seconds).order_by(table.c.queue_position))
    assert rows == [(number, number / 3) for number in range(2_100)]
    await migrations.downgrade(BEFORE)
    async with old_store(database_url, PARTITIONS[0]) as old:
        assert (await old.store.query_rollouts()).items == before
        assert await old.queue() == [rollout.rollout_id for rollout in before]


async def test_configs_as_others_may_write_them_go_up_and_down(database_url: str) -> None:
    await Migrations(database_url).upgrade(BEFORE)
    documents = [None, {}, {"timeout_seconds": math.nan, "max_attempts": 2}, {"unresponsive_seconds": -math.inf}]
    async with old_store(database_url, PARTITIONS[0]) as old:
        rollouts = [Rollout(rollout_id=str(number), input=1, start_time=1.0) for number in range(len(documents))]
        await old.collections.rollouts.insert(rollouts)
    columns = schema.ROLLOUTS.c
    for number, document in enumerate(documents):
        change = update(schema.ROLLOUTS).where(columns.rollout_id == str(number)).values(config=document)
        await run(database_url, change)
    migrations = Migrations(database_url)
    await migrations.upgrade()
    table = native.ROLLOUTS.c
    limits = select(table.timeout_seconds, table.unresponsive_seconds, table.max_attempts, table.retry_condition)
    expected = [(None, None, 1, "[]"), (None, None, 1, "[]"), (None, None, 2, "[]"), (None, -math.inf, 1, "[]")]
    assert await run(database_url, limits.order_by(table.rollout_id)) == expected
    await migrations.downgrade(BEFORE)
    configs = [RolloutConfig(), RolloutConfig(), RolloutConfig(max_attempts=2)]
    configs.append(RolloutConfig(unresponsive_seconds=-math.inf))
    async with old_store(database_url, PARTITIONS[0]) as old:
        assert [rollout.config for rollout in (await old.store.query_rollouts()).items] == configs


async def test_attempts_that_share_a_number_are_named_and_nothing_changes(
    database_url: str, filled: dict[str, dict[str, str]]
) -> None:
    rollout_id = filled[PARTITIONS[1]]["running"]
    async with old_store(database_url, PARTITIONS[1]) as old:
        twin = Attempt(rollout_id=rollout_id, attempt_id="twin", sequence_id=1, start_time=1.0)
        await old.collections.attempts.insert([twin])
    migrations = Migrations(database_url)
    with pytest.raises(ConfigurationError, match=rollout_id):
        await migrations.upgrade()
    assert await migrations.current() == BEFORE
    async with old_store(database_url, PARTITIONS[1]) as old:
        await old.collections.attempts.delete([twin])
    await migrations.upgrade()
    assert await migrations.current() == migrations.head


async def test_a_writer_at_work_is_waited_for(postgres_url: str) -> None:
    migrations = Migrations(postgres_url)
    await migrations.upgrade(BEFORE)
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'collection_rollouts'::regclass")
    async with old_store(postgres_url, PARTITIONS[0]) as old:
        async with old.collections.atomic() as inside:
            await inside.rollouts.insert([Rollout(rollout_id="late", input=1, start_time=1.0)])
            upgrade = asyncio.create_task(migrations.upgrade())
            while await run(postgres_url, waiting) != [(1,)]:
                assert not upgrade.done()
                await asyncio.sleep(0.01)
        await upgrade
    table = native.ROLLOUTS
    [row] = await run(postgres_url, select(table.c.rollout_id, table.c.status, table.c.queue_position))
    assert (row.rollout_id, row.status) == ("late", "queuing")
    assert row.queue_position is not None


async def test_a_server_copies_an_sqlite_file_of_the_release_before(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations = Migrations(sqlite_url)
    await migrations.upgrade(BEFORE)
    async with old_store(sqlite_url, PARTITIONS[0]) as old:
        await old.fill()
        before = await old.everything()
    await prepare_database(sqlite_url)
    assert await migrations.current() == migrations.head

    async def of_the_past() -> str:
        return BEFORE

    # A second server that had looked before the first one was done copies nothing over the first one's copy.
    second = Migrations(sqlite_url)
    monkeypatch.setattr(second, "current", of_the_past)
    await second.prepare()
    assert len(await run(sqlite_url, select(native.ROLLOUTS.c.rollout_id))) == len(before["rollouts"])
    backup = f"{sqlite_url}.before-upgrade-from-{BEFORE}"
    assert await Migrations(backup).current() == BEFORE
    async with old_store(backup, PARTITIONS[0]) as old:
        assert_same(await old.everything(), before)
