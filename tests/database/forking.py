"""Processes that fork while their SQLite files are in use: `python -m tests.database.forking NAME FILE` is one."""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final

from lightning_sql.collections.sql import SqlCollections
from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import Migrations
from lightning_sql.errors import TransactionConflictError

PATIENCE: Final = 20.0
FORKS: Final = 6
PAUSE: Final = 0.005
"""So that each process gets the lock of the file in a while; SQLite's own way of waiting for it is not fair."""


def forked(work: Callable[[], Awaitable[Any]]) -> int:
    """The process that does this work, and ends with 0 if it could."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        asyncio.run(asyncio.wait_for(work(), PATIENCE))
        status = 0
    except BaseException:  # noqa: BLE001 - it is told, and the process ends here
        traceback.print_exc()
    finally:
        os._exit(status)


def check_ended(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert not status, status


async def counted(collections: SqlCollections, key: str) -> None:
    await collections.span_sequence_ids.inc(key, 1)


async def count(collections: SqlCollections, key: str) -> int:
    return await collections.span_sequence_ids.get(key) or 0


def in_a_transaction(url: str) -> None:
    """The event loop forks while one of its tasks is in a transaction that holds the lock of the file."""
    asyncio.run(Migrations(url).prepare())
    collections = SqlCollections(Database(url))

    async def parent() -> None:
        tries = 0

        async def transaction(inside: SqlCollections) -> None:
            nonlocal tries
            tries += 1
            await counted(inside, "parent")
            if tries == 1:
                check_ended(forked(lambda: counted(collections, "child")))
            await counted(inside, "parent")

        await counted(collections, "before")
        await collections.execute(transaction, mode="rw", snapshot=False, commit=True, labels=["rollouts"])
        assert tries == 2, tries
        try:
            async with collections.atomic(mode="rw", snapshot=False, labels=["rollouts"]) as inside:
                await counted(inside, "parent")
                check_ended(forked(lambda: counted(collections, "child")))
        except TransactionConflictError:
            tries += 1
        assert tries == 3, "who was in the transaction was not told that it is gone"
        found = [await count(collections, key) for key in ("before", "parent", "child")]
        assert found == [1, 2, 2], found
        await collections.close()

    asyncio.run(parent())


def while_others_write(url: str) -> None:  # noqa: C901 - what each thread does
    """Threads prepare the file and write to it, each in its own way, while the process forks again and again."""
    asyncio.run(Migrations(url).prepare())  # which imports: a process forked by another thread meanwhile never could
    errors: list[BaseException] = []
    done = threading.Event()
    written = [0] * 4

    async def work(number: int) -> None:
        await Migrations(url).prepare()
        collections = SqlCollections(Database(url))
        while not done.is_set():
            await counted(collections, str(number))
            written[number] += 1
            await asyncio.sleep(PAUSE)
        await collections.close()

    async def prepare() -> None:
        while not done.is_set():
            await Migrations(url).prepare()
            await asyncio.sleep(PAUSE)

    def run(work: Awaitable[None]) -> None:
        async def awaited() -> None:
            await work

        try:
            asyncio.run(awaited())
        except BaseException as error:  # noqa: BLE001 - it is told
            errors.append(error)

    async def child() -> None:
        await Migrations(url).prepare()
        collections = SqlCollections(Database(url))
        await counted(collections, "children")
        await collections.close()

    works = [*(work(number) for number in range(len(written))), prepare(), prepare()]
    threads = [threading.Thread(target=run, args=(each,)) for each in works]
    for thread in threads:
        thread.start()
    try:
        for _ in range(FORKS):
            check_ended(forked(child))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors, errors

    async def found() -> list[int]:
        collections = SqlCollections(Database(url))
        counts = [await count(collections, key) for key in ("children", *map(str, range(len(written))))]
        await collections.close()
        return counts

    counts = asyncio.run(found())
    assert counts == [FORKS, *written], (counts, written)


PROGRAMS: Final = {"in_a_transaction": in_a_transaction, "while_others_write": while_others_write}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](f"sqlite:///{sys.argv[2]}")
    sys.stdout.write("ok\n")
