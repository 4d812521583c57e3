"""Servers that break the promise, each in a way that only some fault brings to light: `MODE serve …`.

With them the fault tests show that they would notice. Nothing here is ever imported by anything else.
"""

import asyncio
import sys
import time
from collections import deque
from typing import Any

from sqlalchemy import delete, update

from lightning_api.cli import main
from lightning_api.load import Calls
from lightning_sql.database.dialects.hot import SpanOutcome
from lightning_sql.database.native import ATTEMPTS, ROLLOUTS
from lightning_sql.database.schema import PARTITION
from lightning_sql.errors import LightningError
from lightning_sql.records import IdempotencyKey
from lightning_sql.store.sql_lanes import Lanes
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.store.sql_writes import NativeTransaction
from tests.faults.narrow import limit_pages

LATE_SECONDS = 0.5
SLOW_SECONDS = 0.1
FROZEN_SECONDS = 3.0
REMEMBERED = 200
"""How many of its latest claims a server that gives some back knows."""

_tasks: set[asyncio.Task[Any]] = set()


def acknowledge_early() -> None:
    """Spans are acknowledged first and stored half a second later."""
    add = Lanes._add_spans

    async def add_early(self: Lanes, batches: list[Any]) -> Any:
        async def later() -> None:
            await asyncio.sleep(LATE_SECONDS)
            await add(self, batches)

        task = asyncio.create_task(later())
        _tasks.add(task)
        task.add_done_callback(lambda done: (_tasks.discard(done), done.cancelled() or done.exception()))
        return [[SpanOutcome.STORED] * len(batch.spans) for batch in batches]

    Lanes._add_spans = add_early


def guess() -> None:
    """A statement whose outcome is not known is taken for done."""

    async def add(self: Lanes, batches: list[Any]) -> Any:
        try:
            return await self.hot.add_spans(batches, self.now())
        except Exception:  # noqa: BLE001 - which is the fault
            return [[SpanOutcome.STORED] * len(batch.spans) for batch in batches]

    Lanes._add_spans = add


def take_everything() -> None:
    """However many calls are in flight, another one is taken on."""

    def never(self: Calls, more: int, kept_share: float = 0.0) -> bool:
        return False

    Calls.are_full_with = never


def forget_keys() -> None:
    """Idempotency keys are taken for nothing; and answers take their time, so that some never come through."""
    for name in ("enqueue_rows", "claim_rows"):
        whole = getattr(SqlStore, name)

        async def forgetful(self: SqlStore, *arguments: Any, whole: Any = whole, **options: Any) -> Any:
            done = await whole(
                self, *(None if isinstance(argument, IdempotencyKey) else argument for argument in arguments), **options
            )
            await asyncio.sleep(SLOW_SECONDS)
            return done

        setattr(SqlStore, name, forgetful)


_claimed: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
_stores: list[SqlStore] = []


def _remember_claims() -> None:
    claim = SqlStore.claim_rows

    async def remembered(
        self: SqlStore,
        limit: int,
        worker_id: str | None,
        idempotency_key: IdempotencyKey | None = None,
        *,
        wait: float = 0.0,
    ) -> Any:
        if self not in _stores:
            _stores.append(self)
        rows = await claim(self, limit, worker_id, idempotency_key, wait=wait)
        _claimed.extend((row[0], row[13]) for row in rows)
        return rows

    SqlStore.claim_rows = remembered


def _give_back() -> None:
    """Put what was claimed lately into the queue again, as if it had never been claimed."""
    claims = list(_claimed)
    _claimed.clear()

    def work(transaction: NativeTransaction) -> None:
        for rollout_id, attempt_id in claims:
            mine = ATTEMPTS.c[PARTITION] == transaction._partition
            gone = delete(ATTEMPTS).where(
                mine, ATTEMPTS.c.rollout_id == rollout_id, ATTEMPTS.c.attempt_id == attempt_id
            )
            transaction._connection.execute(gone)
            transaction._connection.execute(
                update(ROLLOUTS)
                .where(ROLLOUTS.c[PARTITION] == transaction._partition, ROLLOUTS.c.rollout_id == rollout_id)
                .values(
                    status="queuing",
                    end_time=None,
                    watch_at=None,
                    attempt_count=ROLLOUTS.c.attempt_count - 1,
                    queue_position=transaction._hot.next_queue_position(),
                )
            )

    async def write() -> None:
        for store in _stores:
            try:
                await store._lanes.write(work)
            except LightningError:
                continue

    task = asyncio.get_running_loop().create_task(write())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def give_back() -> None:
    """When a connection breaks, whatever was claimed lately is taken for not given out."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    _remember_claims()
    lost = HttpToolsProtocol.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        lost(self, exc)
        if _claimed:
            _give_back()

    HttpToolsProtocol.connection_lost = connection_lost


def undo() -> None:
    """When it is not known whether a statement took place, whatever was claimed lately is taken for not given out."""
    _remember_claims()

    def undoing(run: Any) -> Any:
        async def ran(self: Lanes, calls: list[Any]) -> Any:
            try:
                return await run(self, calls)
            except LightningError:
                if _claimed:
                    _give_back()
                raise

        return ran

    Lanes._claim = undoing(Lanes._claim)
    Lanes._add_spans = undoing(Lanes._add_spans)
    Lanes._update_attempts = undoing(Lanes._update_attempts)
    # What may be sent again is not known to be lost until then.
    Lanes._repeatedly = Lanes._once


def wake_confused() -> None:
    """A server that slept takes everybody for dead."""
    _remember_claims()
    sweep = SqlStore.sweep
    seen = [time.monotonic()]

    async def confused(self: SqlStore) -> int:
        now = time.monotonic()
        if now - seen[0] > FROZEN_SECONDS and _claimed:
            _give_back()
        seen[0] = now
        return await sweep(self)

    SqlStore.sweep = confused


MODES = {
    mode.__name__: mode
    for mode in (acknowledge_early, guess, undo, forget_keys, give_back, wake_confused, take_everything)
}

if __name__ == "__main__":
    MODES[sys.argv.pop(1)]()
    limit_pages()
    main()
