"""The schema goes up and down on both dialects, once however many ask, is what the code declares, and loses nothing."""

import asyncio
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Executable, Table, Text, cast, insert, select, text, update

from lightning_sql.collections.sql import SqlCollections
from lightning_sql.database import migrate, native, schema
from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import METADATA, Migrations
from lightning_sql.database.types import Payload
from lightning_sql.errors import ConfigurationError, DatabaseUnavailableError, SchemaOutdatedError
from lightning_sql.lifecycle import is_queued
from lightning_sql.records import (
    LLM,
    Attempt,
    EnqueueRolloutRequest,
    Event,
    Link,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    Span,
    SpanContext,
    TraceStatus,
)
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.factory import migrations_of, open_store, prepare_database
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, assert_same, make_span

pytestmark = pytest.mark.slow


async def run(database_url: str, *statements: Executable) -> list[Any]:
    """Run statements in one transaction; the rows of the last one, if it has any."""
    database = Database(database_url)
    try:
        with database.translated():
            async with database.transaction(writing=True) as connection:
                results = [await connection.execute(statement) for statement in statements]
                return list(results[-1].all()) if results[-1].returns_rows else []
    finally:
        await database.close()


async def execute(database_url: str, statement: str) -> None:
    await run(database_url, text(statement))


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


async def test_every_revision_goes_up_and_down_and_up_again(database_url: str) -> None:
    migrations = Migrations(database_url)
    revisions = migrations.revisions()
    assert revisions[-1] == migrations.head
    for revision in revisions:
        await migrations.upgrade(revision)
        assert await migrations.current() == revision
    for revision in [*reversed(revisions[:-1]), "base"]:
        await migrations.downgrade(revision)
        assert await migrations.current() == (None if revision == "base" else revision)
        await migrations.upgrade("+1")  # each step down can be taken twice
        await migrations.downgrade("-1")
    await migrations.upgrade()
    assert await migrations.current() == migrations.head
    assert await migrations.check() == []


async def test_a_difference_is_reported(database_url: str) -> None:
    await prepare_database(database_url)
    migrations = Migrations(database_url)
    await execute(database_url, "ALTER TABLE collection_workers ADD COLUMN surprise INTEGER")
    await execute(database_url, "DROP INDEX ix_collection_rollouts_partition_id_seq")
    differences = await migrations.check()
    assert len(differences) == 2
    assert any("surprise" in line for line in differences)
    assert any("ix_collection_rollouts_partition_id_seq" in line for line in differences)


async def test_data_survives_a_second_preparation(database_url: str) -> None:
    async with await open_store(database_url) as store:
        rollout = await store.enqueue_rollout({"a": 1})
    async with await open_store(database_url) as store:
        assert await store.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_an_unknown_revision_is_refused(database_url: str) -> None:
    await prepare_database(database_url)
    migrations = Migrations(database_url)
    with pytest.raises(ConfigurationError):
        await migrations.upgrade("nope")
    await execute(database_url, "UPDATE alembic_version SET version_num = 'future'")
    with pytest.raises(SchemaOutdatedError, match="newer release"):
        await open_store(database_url)


@pytest.fixture
def newer_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A release with one more revision than this one; the revision."""
    tree = tmp_path / "migrations"
    shutil.copytree(migrate.scripts(), tree)
    (tree / "versions" / "9999_newer.py").write_text(
        "from alembic import op\n"
        f"revision, down_revision = '9999', {Migrations('sqlite:///unused.db').head!r}\n"
        "def upgrade(): op.execute('CREATE TABLE newer (id INTEGER)')\n"
        "def downgrade(): op.execute('DROP TABLE newer')\n"
    )
    monkeypatch.setattr(migrate, "scripts", lambda: tree)
    return "9999"


async def test_postgres_with_an_old_schema_is_not_served_until_it_is_migrated(
    postgres_url: str, request: pytest.FixtureRequest
) -> None:
    await prepare_database(postgres_url)
    newer: str = request.getfixturevalue("newer_release")
    with pytest.raises(SchemaOutdatedError, match="lightning-sql migrate up"):
        await open_store(postgres_url)
    await prepare_database(postgres_url, migrate=True)
    assert await Migrations(postgres_url).current() == newer


async def test_an_old_sqlite_file_is_copied_and_upgraded(sqlite_url: str, request: pytest.FixtureRequest) -> None:
    async with await open_store(sqlite_url) as store:
        rollout = await store.enqueue_rollout({"a": 1})
    old = Migrations(sqlite_url).head
    newer: str = request.getfixturevalue("newer_release")
    async with await open_store(sqlite_url) as store:
        assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
    assert await Migrations(sqlite_url).current() == newer
    backup = f"{sqlite_url}.before-upgrade-from-{old}"
    assert await Migrations(backup).current() == old


async def test_a_migration_that_fails_leaves_the_old_schema(
    database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await prepare_database(database_url)
    old = Migrations(database_url).head
    request.getfixturevalue("newer_release")
    script = tmp_path / "migrations" / "versions" / "9999_newer.py"
    script.write_text(script.read_text().replace("id INTEGER)')", "id INTEGER)'); op.execute('SELECT * FROM nothing')"))
    with pytest.raises(SchemaOutdatedError):
        await prepare_database(database_url, migrate=True)
    assert await Migrations(database_url).current() == old
    with pytest.raises(SchemaOutdatedError):
        await execute(database_url, "SELECT * FROM newer")


def prepare_in_processes(database_url: str, count: int) -> list[subprocess.CompletedProcess[str]]:
    code = (
        "import asyncio, sys; from lightning_sql.store.factory import prepare_database;"
        "asyncio.run(prepare_database(sys.argv[1]))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, database_url], stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    done = []
    for process in running:
        _, errors = process.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, "", errors))
    return done


@pytest.mark.slow
async def test_ten_processes_that_start_at_once_migrate_once(database_url: str) -> None:
    done = await asyncio.to_thread(prepare_in_processes, database_url, 10)
    assert [process.stderr for process in done if process.returncode != 0] == []
    migrations = Migrations(database_url)
    assert await migrations.current() == migrations.head
    assert await migrations.check() == []


async def test_an_sqlite_file_is_in_wal_mode_and_synced(sqlite_url: str) -> None:
    async with await open_store(sqlite_url) as store:
        await store.enqueue_rollout(1)
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_a_file_that_cannot_be_a_database_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("this is no database, and long enough to be sure of it\n" * 100)
    before = text.read_bytes()
    for file in (text, tmp_path / "no" / "such" / "folder.db", tmp_path):
        with pytest.raises(ConfigurationError, match=file.name):
            await open_store(f"sqlite:///{file}")
    assert text.read_bytes() == before


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://h/d", "sqlite:///x.db?mode=ro", "postgresql://u:secret@h/d?surprise=1"]
)
async def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await open_store(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_an_unreachable_server_is_a_short_error(unused_tcp_port: int) -> None:
    with pytest.raises(DatabaseUnavailableError) as caught:
        await open_store(f"postgresql://user:secret@127.0.0.1:{unused_tcp_port}/nothing")
    assert "secret" not in str(caught.value)


async def test_a_database_that_does_not_exist_is_a_short_error(postgres_url: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="refuses"):
        await open_store(postgres_url + "_nothing")


def test_the_memory_backend_has_no_schema() -> None:
    with pytest.raises(ConfigurationError):
        migrations_of("memory://")


# What the collections hold moves to the native tables, and back

PARTITIONS = ("default", "\x1ather \u2603")
BEFORE = "0001"

MEGABYTE = ODD_STRINGS["a megabyte"]
TEXTS = {name: string for name, string in ODD_STRINGS.items() if string != MEGABYTE}
PAYLOADS = {name: value for name, value in ODD_PAYLOADS.items() if value != MEGABYTE and not name.startswith("odd")}

CONFIGS = {
    "infinite": RolloutConfig(timeout_seconds=math.inf, unresponsive_seconds=math.inf, max_attempts=2**63 - 1),
    "exact": RolloutConfig(timeout_seconds=0.1 + 0.2, unresponsive_seconds=5e-324),
    "retried": RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"]),
    "limited": RolloutConfig(timeout_seconds=1e9, unresponsive_seconds=1e308, max_attempts=1),
}


def odd_spans(rollout_id: str, attempt_id: str) -> list[Span]:
    """Spans with everything that a column could lose, numbered otherwise than they come."""
    context = SpanContext.model_validate(
        {"trace_id": "t\x00", "span_id": "s", "is_remote": True, "trace_state": {"a\x00": "\ud800"}, "more": [1, None]}
    )
    odd = make_span(
        rollout_id,
        attempt_id,
        "odd",
        sequence_id=9,
        name="\ud800 \x00 name",
        parent_id="\x1aparent",
        status=TraceStatus.model_validate({"status_code": "ERROR", "description": "\x00", "unknown": math.nan}),
        attributes={**TEXTS, "nan": math.nan, "infinities": [math.inf, -math.inf], "minus": -0.0, "big": 10**40},
        events=[Event.model_validate({"name": "e", "attributes": {"\x00": [1.0, 1e22]}, "unknown": {"b": 1, "a": 2}})],
        links=[Link(context=context, attributes={"k": "\udfff"})],
        context=context,
        parent=context,
        start_time=0.1 + 0.2,
        end_time=math.inf,
        **{"unknown": PAYLOADS, "\x1aunknown": None},
    )
    plain = [make_span(rollout_id, attempt_id, f"s{number}", sequence_id=number) for number in (5, 3, 3)]
    spans = [odd, *(span.model_copy(update={"span_id": f"s{index}"}) for index, span in enumerate(plain))]
    spans[2].start_time = spans[2].end_time = None
    return spans


@dataclass
class Old:
    """A store over the collections of one partition; its clock moves with each look."""

    store: CollectionStore
    collections: SqlCollections
    names: dict[str, str] = field(default_factory=dict)
    """Rollout ids, by what is special about them."""

    async def enqueue(self, name: str, payload: Any = None, **fields: Any) -> str:
        rollout = await self.store.enqueue_rollout(payload, **fields)
        self.names[name] = rollout.rollout_id
        return rollout.rollout_id

    async def claim(self, name: str, worker_id: str | None = None) -> Attempt:
        claimed = await self.store.dequeue_rollout(worker_id)
        assert claimed is not None
        assert claimed.rollout_id == self.names[name]
        return claimed.attempt

    async def end(self, name: str, status: Any) -> None:
        await self.store.update_attempt(self.names[name], "latest", status=status)

    async def fill(self) -> None:
        """Put in a little of everything, in a state that takes work to reach."""
        store = self.store
        await store.add_resources({"main": LLM(endpoint="http://e", model="m", sampling_parameters={"t": math.inf})})
        first = await store.add_resources({"p": PromptTemplate(template="\x00 {x}", engine="jinja")})
        for name, config in CONFIGS.items():
            await self.enqueue(name, {"payload": name}, config=config, mode="train")
        await self.enqueue("running", PAYLOADS, metadata={"\x00": math.nan})
        await self.enqueue("done", ODD_STRINGS, resources_id="elsewhere", mode="val")
        await store.add_resources({})
        for name in ("infinite", "exact", "retried", "limited", "running", "done"):
            attempt = await self.claim(name, f"worker of {name}")
            if name in ("exact", "running"):
                spans = odd_spans(self.names[name], attempt.attempt_id)
                await store.add_many_spans(spans[:3])
                await store.add_many_spans(spans[3:])
        await self.end("retried", "failed")
        await self.end("done", "succeeded")
        await self.end("infinite", "failed")
        await self.claim("retried")
        await store.update_attempt(self.names["retried"], "latest", metadata={"b": math.inf, "a": "\x00"})
        await self.end("retried", "timeout")
        await store.start_attempt(self.names["done"], "worker of done")
        await self.end("done", "failed")
        for name in ("last", "cancelled", "doubled", "forgotten", "also forgotten"):
            await self.enqueue(name, metadata={"name": name})
        await store.update_rollout(self.names["cancelled"], status="cancelled")
        await store.update_rollout(self.names["infinite"], status="queuing", metadata=None)
        await store.start_rollout(None, config=CONFIGS["limited"], worker_id="starter")
        await self.collections.rollout_queue.enqueue(["nothing"] * 50)
        await self.enqueue_odd_id('\x1a\u2603 "odd" \\id', CONFIGS["limited"])
        await store.update_resources(first.resources_id, {"main": LLM(endpoint="e2", model="m2")})
        await store.update_worker("beating", {"load": math.nan, "\ud800": [None]})
        await store.update_worker("silent")
        await store.get_many_span_sequence_ids([(self.names["running"], "any"), ("unknown", "any"), ("unknown", "any")])
        # What only others than our store would do.
        queue = self.collections.rollout_queue
        await queue.enqueue([self.names["doubled"], self.names["done"], "nothing", self.names["done"]])
        await queue.discard([self.names["forgotten"], self.names["also forgotten"]])
        await self.collections.span_sequence_ids.set("no counter", "text")  # pyright: ignore[reportArgumentType]

    async def enqueue_odd_id(self, rollout_id: str, config: RolloutConfig) -> None:
        self.names["odd id"] = rollout_id
        await self.collections.rollouts.insert(
            [Rollout(rollout_id=rollout_id, input=1, start_time=1.5, status="requeuing", config=config)]
        )
        await self.collections.rollout_queue.enqueue([rollout_id])

    async def queue(self) -> list[str]:
        """The rollouts that are queued by their status, the first in the queue first; those not in it last."""
        rollouts = {rollout.rollout_id: rollout for rollout in (await self.store.query_rollouts()).items}
        queued = [rollout_id for rollout_id, rollout in rollouts.items() if is_queued(rollout.status)]
        entries = await self.collections.rollout_queue.peek(10_000)
        return list(dict.fromkeys([entry for entry in entries if entry in queued] + queued))

    async def everything(self) -> dict[str, Any]:
        """All that is kept, and would ever come to light."""
        answers = await answers_of(self.store)
        counters = [*(rollout.rollout_id for rollout in answers["rollouts"]), "unknown", "no counter"]
        return answers | {
            "counters": [await self.collections.span_sequence_ids.get(key) for key in counters],
            "queue": await self.queue(),
        }


async def answers_of(store: LightningStore) -> dict[str, Any]:
    """Every record of a store, in the orders in which it gives them."""
    rollouts = (await store.query_rollouts()).items
    ids = [rollout.rollout_id for rollout in rollouts]
    return {
        "rollouts": rollouts,
        "attempts": [(await store.query_attempts(rollout_id)).items for rollout_id in ids],
        "spans": [(await store.query_spans(rollout_id)).items for rollout_id in ids],
        "spans as they came": [(await store.query_spans(rollout_id, sort_by=None)).items for rollout_id in ids],
        "resources": (await store.query_resources()).items,
        "latest resources": await store.get_latest_resources(),
        "workers": (await store.query_workers()).items,
    }


@asynccontextmanager
async def old_store(database_url: str, partition: str) -> AsyncIterator[Old]:
    ticks = count(1_000)
    collections = SqlCollections(Database(database_url), partition=partition, clock=lambda: next(ticks) / 8)
    async with CollectionStore(collections, scan_debounce_seconds=1e9, clock=lambda: 0.0) as store:
        yield Old(store, collections)


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


async def everything(database_url: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for partition in PARTITIONS:
        async with old_store(database_url, partition) as old:
            found[partition] = await old.everything()
    return found


COUNTERPARTS = {
    native.ROLLOUTS: schema.ROLLOUTS,
    native.ATTEMPTS: schema.ATTEMPTS,
    native.SPANS: schema.SPANS,
    native.RESOURCES: schema.RESOURCES,
    native.WORKERS: schema.WORKERS,
}
OTHER_NAMES = {"extra": schema.EXTRA}


async def rows_of(database_url: str, table: Table, names: Sequence[str]) -> list[Any]:
    """Columns of a table as they are stored, payloads as text, in an order that holds on both sides."""
    columns = [table.c[name] for name in names]
    stored = [cast(column, Text) if isinstance(column.type, Payload) else column for column in columns]
    order = [name for name in (schema.PARTITION, "rollout_id", "attempt_id", schema.SEQ) if name in table.c]
    return await run(database_url, select(*stored).order_by(*(table.c[name] for name in order)))


async def collections_as_stored(database_url: str) -> list[Any]:
    tables = (*COUNTERPARTS.values(), schema.QUEUE, schema.COUNTERS)
    return [await rows_of(database_url, table, list(table.c.keys())) for table in tables]


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


DEFINITIONS = {
    "sqlite": """
        SELECT type, name, sql FROM sqlite_master
        WHERE tbl_name NOT LIKE 'alembic%' AND sql IS NOT NULL ORDER BY type, name
        """,
    "postgresql": """
        SELECT 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod) || ' ' || a.attnotnull
                || ' ' || coalesce(o.collname, '') || ' ' || coalesce(c.reloptions::text, '')
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
            LEFT JOIN pg_collation o ON o.oid = a.attcollation
            WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND c.relname NOT LIKE 'alembic%'
        UNION ALL SELECT 'index', tablename, indexname, indexdef FROM pg_indexes
            WHERE schemaname = 'public' AND tablename NOT LIKE 'alembic%'
        UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
            WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text NOT LIKE 'alembic%'
        UNION ALL SELECT 'sequence', '', sequencename, data_type::text || start_value || increment_by FROM pg_sequences
            WHERE schemaname = 'public'
        ORDER BY 1, 2, 3
        """,
}


async def definitions(database_url: str) -> list[Any]:
    statement = DEFINITIONS["postgresql" if database_url.startswith("postgres") else "sqlite"]
    return [tuple(re.sub(r"\s+", " ", str(value)) for value in row) for row in await run(database_url, text(statement))]


async def test_the_migrations_make_exactly_what_the_code_declares(database_url: str) -> None:
    """As `check` says, and beyond what it sees: checks, conditions of indexes, collations, sequences."""
    migrations = Migrations(database_url)
    await migrations.upgrade()
    migrated = await definitions(database_url)
    assert {table.name for table in native.TABLES} < {row[1] for row in migrated}
    await migrations.downgrade("base")
    database = Database(database_url)
    async with database.transaction(writing=True) as connection:
        await connection.run_sync(METADATA.create_all)
    await database.close()
    assert sorted(await definitions(database_url)) == sorted(migrated)
