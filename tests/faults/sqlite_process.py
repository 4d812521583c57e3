"""A process that shares an SQLite file with others: `python -m tests.faults.sqlite_process ROLE URL NOTEBOOK NAME`.

Roles: `write` works through the queue and notes what it is told; `read` looks at the whole store in one read, and at
the queue, over and over; `crash` writes, until it stops for ever inside of a transaction, after its statements and
before its commit, and prints the keys that nobody must ever see. The end of the input ends the others, who then print
how much they did. Whatever goes wrong ends a process with a traceback.
"""

import asyncio
import json
import math
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from lightning_sql.database.dialects.sqlite_thread import _Seat
from lightning_sql.database.engine import Database
from lightning_sql.records import ROLLOUT_QUEUED, EnqueueRolloutRequest
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.faults.ledger import Notebook
from tests.native_laws import broken_laws

RUNNERS = 3
ENQUEUED_AT_ONCE = 10
QUEUE_LENGTH = 60
"""A process enqueues while it was given fewer than this many less than it enqueued."""
SPANS = 3
CALM_TRANSACTIONS = 20
"""After at most so many transactions that write, a process that is to be killed stops in one."""
CALM_SECONDS = 0.05
"""Between two reads of everything, which would leave writers little of a small machine."""
FEW_PAGES = 8
"""So small a cache puts pages into the log before the commit."""


KEYS = {"rollouts": "rollout_id", "attempts": "rollout_id, attempt_id", "spans": "rollout_id, attempt_id, span_id"}
"""The columns by which rows are told apart."""


class Writers:
    """What one process does to the store: rollouts go into the queue, and are worked on."""

    def __init__(self, store: SqlStore, notebook: Notebook, name: str) -> None:
        self._store = store
        self._notebook = notebook
        self._name = name
        self._enqueued = 0
        self.done = 0

    async def work(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._algorithm())
            for number in range(RUNNERS):
                group.create_task(self._runner(f"{self._name}-{number}"))

    async def _algorithm(self) -> None:
        request = EnqueueRolloutRequest(input={"task": self._name})
        while True:
            if self._enqueued - self.done >= QUEUE_LENGTH:
                await asyncio.sleep(0.01)
                continue
            queued = await self._store.enqueue_many_rollouts([request] * ENQUEUED_AT_ONCE)
            self._notebook.note("enqueue", *(rollout.rollout_id for rollout in queued))
            self._enqueued += len(queued)

    async def _runner(self, worker_id: str) -> None:
        while True:
            claimed = await self._store.dequeue_rollout(worker_id)
            if claimed is None:
                await asyncio.sleep(0.01)
                continue
            key = claimed.rollout_id, claimed.attempt.attempt_id
            self._notebook.note("claim", *key, claimed.attempt.sequence_id)
            spans = [make_span(*key, f"{number}", number, attributes={"text": "x" * 200}) for number in range(SPANS)]
            await self._store.add_many_spans(spans)
            self._notebook.note("spans", *key, *(span.span_id for span in spans))
            ended = await self._store.update_attempt(*key, status="succeeded")
            self._notebook.note("end", *key, ended.status)
            self.done += 1


class Readers:
    """What one process sees of the store."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self.done = 0

    async def work(self) -> None:
        """Look until cancelled, or until something is wrong."""
        most = 0
        while True:
            wrong = await broken_laws(self._store, math.inf)
            assert wrong == []
            queued = await self._store.query_rollouts(status_in=list(ROLLOUT_QUEUED), limit=100)
            assert {rollout.status for rollout in queued} <= ROLLOUT_QUEUED
            count = (await self._store.statistics())["total_rollouts"]
            assert count >= most, f"there were {most} rollouts, and now there are {count}"
            most = count
            self.done += 1
            await asyncio.sleep(CALM_SECONDS)


def stop_inside(file: Path) -> None:
    """Let this process stop inside of one of its next transactions."""
    hot = _Seat.hot
    left = random.randint(1, CALM_TRANSACTIONS)

    def stopping(self: _Seat, work: Callable[[sqlite3.Cursor], Any]) -> Any:
        def worked(cursor: sqlite3.Cursor) -> Any:
            nonlocal left
            cursor.execute(f"PRAGMA cache_size = {FEW_PAGES}")
            result = work(cursor)
            left -= 1
            if left <= 0 and any(unseen := _uncommitted(cursor, file)):
                _stop(unseen)
            return result

        return hot(self, worked if self._writes else work)

    _Seat.hot = stopping


def _uncommitted(cursor: sqlite3.Cursor, file: Path) -> list[list[Any]]:
    """The keys of the new rollouts, attempts and spans of a transaction that is not committed."""
    unseen: list[list[Any]] = []
    with closing(sqlite3.connect(file)) as committed:
        for table, columns in KEYS.items():
            [last] = committed.execute(f"SELECT coalesce(max(rowid), 0) FROM {table}").fetchone()
            unseen.append(cursor.execute(f"SELECT {columns} FROM {table} WHERE rowid > ?", [last]).fetchall())
    return unseen


def _stop(unseen: list[list[Any]]) -> NoReturn:
    sys.stdout.write(json.dumps(unseen) + "\n")
    sys.stdout.flush()
    while True:  # until somebody kills us
        time.sleep(1)


async def main(role: str, url: str, notebook: str, name: str) -> None:
    """Work until there is no more input."""
    if role == "crash":
        stop_inside(Path(urlsplit(url).path.removeprefix("/")))
    async with SqlStore(Database(url)) as store:
        worker = Readers(store) if role == "read" else Writers(store, Notebook(Path(notebook)), name)
        await _until_told(worker.work())
    sys.stdout.write(f"{worker.done}\n")


async def _until_told(work: Awaitable[None]) -> None:
    working = asyncio.ensure_future(work)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told = asyncio.ensure_future(reader.read())
    await asyncio.wait([working, told], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    working.cancel()
    await asyncio.wait([working])
    if not working.cancelled() and (error := working.exception()) is not None:
        raise error


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
