"""SQLite's hot path from many coroutines, event loops, threads and processes at once, and how it ends."""

import asyncio
import gc
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Connection, func, select
from sqlalchemy.engine import URL, make_url

from lightning_sql.database.dialects import sqlite_thread
from lightning_sql.database.dialects.base import FileLockedError
from lightning_sql.database.dialects.hot import HotPath, SpanOutcome
from lightning_sql.database.dialects.sqlite_hot import SQLiteHotPath
from lightning_sql.database.engine import Database
from lightning_sql.database.native import ATTEMPTS, ROLLOUTS, SPANS, WORKERS
from tests.database.hot_sqlite import NOW, batch, change, claim, create, draft, fresh_id, path_to, queued, span, stored

pytestmark = pytest.mark.slow


def our_threads(file: Path) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(file.name)]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file with a name of its own, none of whose threads may be left."""
    file = tmp_path / f"{fresh_id('db')}.db"
    create(file)
    yield file
    assert our_threads(file) == []


def path_on(file: Path, partition: str = "p", **query: str) -> HotPath:
    return path_to(URL.create("sqlite", database=str(file), query={"synchronous": "NORMAL"} | query), partition)


class Held:
    """Keeps the writer's thread in a transaction."""

    def __init__(self, hot: HotPath) -> None:
        self._hot = hot
        self._leave = threading.Event()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        entered = threading.Event()

        def hold(connection: Connection) -> None:
            entered.set()
            assert self._leave.wait(30)

        self.task = asyncio.create_task(self._hot.write(hold))
        assert await asyncio.to_thread(entered.wait, 30)
        return self

    def leave(self) -> None:
        self._leave.set()

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave.set()
        assert self.task is not None
        await self.task


@contextmanager
def locked(file: Path) -> Iterator[sqlite3.Connection]:
    """Another process, as it were, that is in the middle of a write."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


async def test_many_coroutines_share_one_queue(file: Path) -> None:
    hot = path_on(file)
    claimed: list[str] = []

    async def run(number: int) -> None:
        for turn in range(6):
            await hot.enqueue([draft(f"{number} {turn}")], None)
            _, [rows] = await hot.claim([claim(f"{number} {turn}", worker=f"w{number}")], None)
            for row in rows:
                claimed.append(row[0])
                assert await hot.add_spans([batch(span(row[0], row[-2], "x"))], None) == [[SpanOutcome.STORED]]
                [found] = await hot.rollouts([row[0]], False)  # reads what was written
                assert found[6] == "running"
                [changed] = await hot.update_attempts([change(row[0], row[-2], status="succeeded")], None)
                assert changed is not None

    await asyncio.gather(*(run(number) for number in range(32)))
    assert len(claimed) == len(set(claimed)) == 32 * 6
    assert set(await stored(hot, ROLLOUTS, "status")) == {"succeeded"}
    assert await stored(hot, ROLLOUTS, "seq") == list(range(1, 193))
    assert await stored(hot, SPANS, "seq") == list(range(1, 193))
    assert len(await stored(hot, WORKERS, "worker_id")) == 32
    await hot.close()


async def test_of_calls_that_share_a_transaction_only_the_bad_one_fails(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = path_on(file)
    sizes: list[int] = []
    joined = sqlite_thread._Seat.answer_joined

    def noted(self: Any, jobs: Any) -> Any:
        sizes.append(len(jobs))
        return joined(self, jobs)

    monkeypatch.setattr(sqlite_thread._Seat, "answer_joined", noted)
    await hot.enqueue([draft("taken")], NOW)
    async with Held(hot):
        names = ["a", "b", "taken", "c"]
        calls = [asyncio.create_task(hot.enqueue([draft(f"{name}"), draft(f"{name}2")], NOW)) for name in names]
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, sqlite3.IntegrityError) for answer in answers] == [False, False, True, False]
    assert await stored(hot, ROLLOUTS, "rollout_id") == ["taken", "a", "a2", "b", "b2", "c", "c2"]
    assert sizes == [1, 4]
    await hot.close()


async def test_what_waits_is_written_in_its_order_and_at_most_so_much_at_once(file: Path) -> None:
    hot = path_on(file)
    size = select(func.count()).select_from(ROLLOUTS)
    count = 2 * sqlite_thread.JOINED_JOBS + 3
    async with Held(hot):
        calls: list[asyncio.Task[Any]] = []
        for number in range(count):
            calls.append(asyncio.create_task(hot.enqueue([draft(str(number))], NOW)))
            if number == 5:  # a transaction of its own between them
                calls.append(asyncio.create_task(hot.write(lambda connection: connection.execute(size).scalar_one())))
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls)
    assert answers[6] == 6
    assert await queued(hot) == [str(number) for number in range(count)]
    await hot.close()


async def test_a_call_whose_caller_is_cancelled_runs_to_its_end(file: Path) -> None:
    hot = path_on(file)
    async with Held(hot) as held:
        calls = [asyncio.create_task(hot.enqueue([draft(name)], NOW)) for name in "ab"]
        await asyncio.sleep(0)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert held.task is not None
    await calls[1]
    assert await queued(hot) == ["a", "b"]
    async with Held(hot):
        failing = asyncio.create_task(hot.enqueue([draft("a")], NOW))
        await asyncio.sleep(0)
        failing.cancel()
    await hot.close()
    gc.collect()  # an error that nobody took would be reported now


async def test_closing_waits_for_what_was_sent_and_ends_the_threads(file: Path) -> None:
    hot = path_on(file)
    assert our_threads(file) == []
    await hot.enqueue([draft("a")], NOW)
    assert [thread.name for thread in our_threads(file)] == [f"sqlite-writer {file.name}"]
    await asyncio.gather(*(hot.rollouts(["a"], False) for _ in range(20)))
    assert 1 < len(our_threads(file)) <= 1 + sqlite_thread.READERS
    async with Held(hot) as held:
        call = asyncio.create_task(hot.enqueue([draft("b")], NOW))
        await asyncio.sleep(0)
        end = asyncio.create_task(hot.close())
        await asyncio.sleep(0)
        held.leave()
        await end
        assert our_threads(file) == []
        assert call.done()
    await hot.close()
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*) FROM rollouts").fetchone() == (2,)
    assert await queued(hot) == ["a", "b"]  # opens again
    await hot.close()


async def test_paths_of_a_file_share_the_threads_until_the_last_is_closed(file: Path) -> None:
    one, two = path_on(file, "one"), path_on(file, "two")
    await one.enqueue([draft("a")], NOW)
    await two.enqueue([draft("a")], NOW)
    assert len(our_threads(file)) == 1
    await one.close()
    assert len(our_threads(file)) == 1
    assert await queued(two, "two") == ["a"]
    other = path_on(file, "one", synchronous="FULL")  # connections of another kind
    await other.enqueue([draft("b")], NOW)
    assert len([thread for thread in our_threads(file) if "writer" in thread.name]) == 2
    await other.close()
    await two.close()


async def test_a_path_that_is_forgotten_ends_its_threads(file: Path) -> None:
    hot = path_on(file)
    await hot.enqueue([draft("a")], NOW)
    await queued(hot)
    threads = our_threads(file)
    assert len(threads) == 2
    del hot
    gc.collect()
    for thread in threads:
        await asyncio.to_thread(thread.join)


def test_an_event_loop_that_is_gone_does_not_hurt_the_others(file: Path) -> None:
    kept: list[HotPath] = []
    leave = threading.Event()

    async def start() -> None:
        hot = path_on(file)
        kept.append(hot)
        await hot.enqueue([draft("a")], NOW)
        entered = threading.Event()

        def hold(connection: Connection) -> None:
            entered.set()
            assert leave.wait(30)

        task = asyncio.create_task(hot.write(hold))
        more = asyncio.create_task(hot.enqueue([draft("b")], NOW))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        more.cancel()

    async def go_on() -> list[str]:
        hot = path_on(file)
        leave.set()
        await hot.enqueue([draft("c")], NOW)
        names = await queued(hot)
        await hot.close()
        await kept.pop().close()
        return names

    asyncio.run(start())
    assert asyncio.run(go_on()) == ["a", "b", "c"]


def test_event_loops_in_several_threads_use_one_file(file: Path) -> None:
    async def work(name: str) -> None:
        hot = path_on(file)
        for turn in range(10):
            await asyncio.gather(*(hot.enqueue([draft(f"{name} {turn} {number}")], NOW) for number in range(4)))
            _, [rows] = await hot.claim([claim(*(f"{turn} {number}" for number in range(4)))], NOW)
            assert len(rows) == 4
        await hot.close()

    with ThreadPoolExecutor(3) as executor:
        for outcome in [executor.submit(asyncio.run, work(name)) for name in "abc"]:
            outcome.result()
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT rollout_id) FROM attempts").fetchone() == (120, 120)
        assert connection.execute("SELECT max(seq), count(queue_position) FROM rollouts").fetchone() == (120, 0)


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
CHILD = """
import asyncio, sys
from pathlib import Path
from tests.database.hot_sqlite import NOW, claim, draft, fresh_id
from tests.database.test_hot_sqlite_threads import path_on

async def main(file, name):
    hot = path_on(Path(file))
    got = []

    async def run(number):
        for turn in range(8):
            await hot.enqueue([draft(f"{name} {number} {turn}")], None)
            _, [rows] = await hot.claim([claim(fresh_id("at"), worker=name)], None)
            got.extend(row[0] for row in rows)

    await asyncio.gather(*(run(number) for number in range(8)))
    await hot.close()
    print(len(got), len(set(got)))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_two_processes_write_at_once(file: Path) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(file), name, stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
        )
        for name in ("one", "two")
    ]
    answers = [(await process.communicate())[0].split() for process in processes]
    assert answers == [[b"64", b"64"], [b"64", b"64"]]
    hot = path_on(file)
    assert len(set(await stored(hot, ATTEMPTS, "rollout_id"))) == 128
    assert await stored(hot, ROLLOUTS, "seq") == list(range(1, 129))
    await hot.close()


FORK = """
import asyncio, os, sys
from pathlib import Path
from tests.database.hot_sqlite import NOW, draft, queued
from tests.database.test_hot_sqlite_threads import our_threads, path_on

file = Path(sys.argv[1])
hot = path_on(file)

async def before():
    await hot.enqueue([draft("parent")], NOW)
    await queued(hot)

async def child():
    assert our_threads(file) == []
    await hot.enqueue([draft("child")], NOW)
    await queued(hot)
    await hot.close()
    assert our_threads(file) == []

asyncio.run(before())
pid = os.fork()
if pid == 0:
    asyncio.run(child())
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status

async def after():
    assert await queued(hot) == ["parent", "child"]
    await hot.close()

asyncio.run(after())
print("ok")
"""

FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from lightning_sql.database.dialects.base import CommitUnknownError, Failure
from lightning_sql.database.dialects.sqlite import SQLite
from tests.database.hot_sqlite import NOW, draft, queued
from tests.database.test_hot_sqlite_threads import path_on

async def main(file):
    hot = path_on(file, synchronous="FULL")
    await hot.enqueue([draft("before")], NOW)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.with_name(file.name + "-wal").stat().st_size + 8192, hard))
    big = '"' + "x" * 100_000 + '"'
    outcomes = await asyncio.gather(
        *(hot.enqueue([draft(name, input=big)], NOW) for name in ("one", "two")),
        hot.write(lambda connection: connection.exec_driver_sql("UPDATE rollouts SET input = ?", (big,)).close()),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes[:2]] == [CommitUnknownError] * 2, outcomes
    # The third may find no room even for opening the file anew.
    assert SQLite().failure(outcomes[2]) is Failure.UNAVAILABLE or type(outcomes[2]) is CommitUnknownError, outcomes
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await hot.enqueue([draft("after", input=big)], NOW)
    assert await queued(hot) == ["before", "after"]
    await hot.close()
    print("ok")

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork, nor limit the size of files")
@pytest.mark.parametrize("script", [FORK, FULL_DISK], ids=["fork", "full disk"])
async def test_in_a_process_of_its_own(file: Path, script: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(file), stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
    )
    output, _ = await process.communicate()
    assert output == b"ok\n"


async def test_a_writer_waits_for_other_processes(file: Path) -> None:
    hot = path_on(file)
    with locked(file) as other:
        calls = [
            asyncio.create_task(hot.enqueue([draft("a")], NOW)),
            asyncio.create_task(hot.write(lambda connection: connection.execute(select(ROLLOUTS.c.mode)).all())),
        ]
        assert await queued(hot) == []  # readers do not wait
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        other.execute("COMMIT")
    await asyncio.gather(*calls)
    await hot.close()


async def test_a_lock_that_stays_is_told_and_no_harm(file: Path) -> None:
    database = Database(f"sqlite:///{file}")
    hot = SQLiteHotPath(file, {"busy_timeout": "40"}, "p", database.dialect.failure, join=True)
    writes: list[Callable[[], Any]] = [
        lambda: hot.enqueue([draft("a")], NOW),
        lambda: hot.write(lambda connection: connection.execute(select(ROLLOUTS.c.mode)).all()),
    ]
    await hot.enqueue([draft("b")], NOW)
    with locked(file):
        for write in writes:
            with pytest.raises(FileLockedError), database.translated():
                await write()
        both = await asyncio.gather(*(write() for write in [writes[0], writes[0]]), return_exceptions=True)
        assert [type(answer) for answer in both] == [FileLockedError] * 2
    for write in writes:
        await write()
    assert await queued(hot) == ["b", "a"]
    await hot.close()


async def test_a_connection_that_may_be_broken_is_opened_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_thread, "READERS", 1)

    class DiskError(sqlite3.OperationalError):
        sqlite_errorcode = sqlite3.SQLITE_IOERR

    def fail(connection: Connection) -> None:
        raise DiskError

    def driver(connection: Connection) -> Any:
        return connection.connection.driver_connection

    hot = path_on(file)
    for way in (hot.write, hot.read):
        before = await way(driver)
        assert await way(driver) is before
        with pytest.raises(DiskError):
            await way(fail)
        assert await way(driver) is not before
    await hot.enqueue([draft("a")], NOW)
    await hot.close()


async def test_a_read_is_of_one_state(file: Path) -> None:
    hot = path_on(file)
    await hot.enqueue([draft("a")], NOW)
    entered, leave = threading.Event(), threading.Event()

    def twice(connection: Connection) -> list[int]:
        size = select(func.count()).select_from(ROLLOUTS)
        first = connection.execute(size).scalar_one()
        entered.set()
        assert leave.wait(30)
        return [first, connection.execute(size).scalar_one()]

    reading = asyncio.create_task(hot.read(twice))
    assert await asyncio.to_thread(entered.wait, 30)
    await hot.enqueue([draft("b")], NOW)
    assert len(await hot.rollouts(["a", "b"], False)) == 2
    leave.set()
    assert await reading == [1, 1]
    await hot.close()


async def test_the_database_is_as_durable_as_its_url_says(file: Path) -> None:
    for query, level in (("", 2), ("?synchronous=NORMAL", 1), ("?synchronous=extra", 3)):
        hot = path_to(make_url(f"sqlite:///{file}{query}"))
        for way in (hot.write, hot.read):
            assert await way(lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar_one()) == level
        await hot.close()
