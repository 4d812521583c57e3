"""The schema goes up and down on both dialects, once however many ask, and is what the code declares."""

import asyncio
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from lightning_sql.database import migrate, native
from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import METADATA, Migrations
from lightning_sql.errors import ConfigurationError, DatabaseUnavailableError, SchemaOutdatedError
from lightning_sql.store.factory import migrations_of, open_store, prepare_database
from lightning_sql.testing.postgres import PostgresServer
from tests.database.migrating import execute, run

pytestmark = pytest.mark.slow


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


async def test_a_process_prepares_several_databases_at_once(tmp_path: Path, postgres: PostgresServer) -> None:
    urls = [f"sqlite:///{tmp_path / str(number)}.db" for number in range(6)]
    urls += [postgres.create_database() for _ in range(2)]
    in_threads = [asyncio.to_thread(asyncio.run, prepare_database(url)) for url in urls[::2]]
    async with asyncio.timeout(60):
        await asyncio.gather(*map(prepare_database, urls[1::2]), *in_threads)
    for url in urls:
        migrations = Migrations(url)
        assert await migrations.current() == migrations.head


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
