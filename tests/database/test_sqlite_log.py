"""The write-ahead log of an SQLite file stays within bounds, also where somebody always reads from it."""

import itertools
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from lightning_sql.database.dialects import sqlite_log
from tests.database.hot_sqlite import NOW, create, draft, path_to

TURNS = 60
LARGE = '"' + "x" * 200_000 + '"'
MOST_BYTES = 2_000_000


@contextmanager
def somebody_reads(file: Path) -> Iterator[None]:
    """Two readers, of whom one begins before the other ends, over and over."""
    stopped = threading.Event()
    begun = threading.Event()

    def read() -> None:
        connections = [sqlite3.connect(file, isolation_level=None) for _ in range(2)]
        for reader, other in itertools.cycle([connections, connections[::-1]]):
            if stopped.wait(0.002):
                break
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM rollouts").fetchone()
            begun.set()
            if other.in_transaction:
                other.execute("COMMIT")
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        stopped.set()
        thread.join()


async def largest_log(file: Path) -> int:
    """How large the log of a new file was while a lot was written, and somebody always read."""
    create(file)
    # Opened once before, so that whoever closes a connection is not the last one, who empties the log.
    with closing(sqlite3.connect(file)) as connection, somebody_reads(file):
        connection.execute("SELECT count(*) FROM rollouts").fetchone()
        hot = path_to(make_url(f"sqlite:///{file}"))
        largest = 0
        for turn in range(TURNS):
            await hot.enqueue([draft(f"r{turn}", input=LARGE)], NOW)
            largest = max(largest, file.with_name(f"{file.name}-wal").stat().st_size)
        await hot.close()
    return largest


async def test_the_log_is_emptied_though_somebody_always_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_log, "MOST_BYTES", 2**40)
    unbounded = await largest_log(tmp_path / "unbounded.db")
    assert unbounded > TURNS * len(LARGE)  # which is what this is about
    monkeypatch.setattr(sqlite_log, "MOST_BYTES", MOST_BYTES)
    assert await largest_log(tmp_path / "bounded.db") < unbounded / 2


async def test_a_read_that_takes_long_keeps_its_state_and_writers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_log, "MOST_BYTES", MOST_BYTES)
    monkeypatch.setattr(sqlite_log, "PATIENCE_MILLISECONDS", 20)
    monkeypatch.setattr(sqlite_log, "LOOK_SECONDS", 0.0)
    file = tmp_path / "long.db"
    create(file)
    hot = path_to(make_url(f"sqlite:///{file}"))
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rollouts").fetchone()
        for turn in range(TURNS):
            await hot.enqueue([draft(f"r{turn}", input=LARGE)], NOW)
        assert reader.execute("SELECT count(*) FROM rollouts").fetchone() == (0,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM rollouts").fetchone() == (TURNS,)
    await hot.close()
