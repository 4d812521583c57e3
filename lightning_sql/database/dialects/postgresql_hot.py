"""The native store's way to PostgreSQL: hot statements on the driver's own connections, in autocommit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Double, Executable, Table, extract, func, select, text
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import override

from lightning_sql.database.dialects import postgresql_statements as statements
from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    AttemptChanged,
    Claim,
    Enqueued,
    HotPath,
    KeyNote,
    RolloutDraft,
    Row,
    SpanBatch,
    SpanDraft,
    SpanKey,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.dialects.hot_statement import HotStatement
from lightning_sql.database.dialects.postgresql_connections import Connections, Held, driver_of, is_undone, warn_of_loss
from lightning_sql.database.dialects.postgresql_outcome import (
    BackendSession,
    current_transaction,
    end_session,
    took_place,
)
from lightning_sql.database.dialects.queue_front import QueueFront
from lightning_sql.database.dialects.words import word
from lightning_sql.database.native import ORDERS, ROLLOUT_COLUMNS, TABLES
from lightning_sql.database.payload import encode_text
from lightning_sql.database.reading import KeptReading, Reading
from lightning_sql.errors import DatabaseUnavailableError

__all__ = ["PostgreSQLHotPath"]

logger: Final = logging.getLogger(__name__)

R = TypeVar("R")

HOT_CONNECTIONS: Final = 10
"""How many connections hot statements may hold at once; joined calls need few of them."""
PAGE_CONNECTIONS: Final = 4
"""How many pages may be read at once."""

GROWN_BY_ROWS: Final = 200
"""So many rows and as many as there were: a table has grown."""

_ROLLOUT_WIDTH: Final = len(ROLLOUT_COLUMNS)
_SPAN_FIELDS: Final = SpanDraft._fields


_ANALYZE_LOCK: Final = 0x616E616C797A65
HOT_SETTINGS: Final = """
    SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off
"""
"""Planning a hot statement takes longer than running it, and no value would change its plan. It looks up
rows by key, so a plan must not be kept that reads a whole table because the table was small once."""

_GROWN: Final = text(
    """
    SELECT c.relname FROM pg_class c JOIN pg_stat_user_tables s ON s.relid = c.oid
    WHERE c.oid = ANY (CAST(CAST(:names AS text[]) AS regclass[]))
        AND s.n_mod_since_analyze > :least + greatest(c.reltuples, 0)
    ORDER BY c.relname
    """
)
"""Tables whose rows have doubled. A table of many rows is autovacuum's to watch, which looks every minute."""


def _analyze_grown_tables(connection: Connection) -> Sequence[str]:
    # Several servers need not do it at once, and none of them need wait for it.
    if not connection.scalar(select(func.pg_try_advisory_xact_lock(_ANALYZE_LOCK))):
        return ()
    grown = connection.scalars(_GROWN, {"names": [table.name for table in TABLES], "least": GROWN_BY_ROWS}).all()
    for name in grown:
        connection.execute(text(f"ANALYZE {word(name)}"))
    return grown


def _note_values(notes: Sequence[KeyNote]) -> dict[str, Any]:
    """The values of `statements`' notes."""
    keys, routes, fingerprints, parts = zip(*notes, strict=True)
    return {"note_keys": keys, "note_parts": parts, "note_routes": routes, "note_prints": fingerprints}


class PostgreSQLHotPath(HotPath):
    """Hot statements go to the driver as they are, pages through SQLAlchemy; none of them in a transaction."""

    in_order = False

    def __init__(
        self,
        engine: AsyncEngine,
        partition: str,
        claim_timeout: float | None = None,
        statement_seconds: float | None = None,
        break_pool: Callable[[], None] = lambda: None,
    ) -> None:
        self._break_pool = break_pool
        self._statement_seconds = statement_seconds
        self._claim_timeout = claim_timeout
        self._updates = statements.UPDATE_ATTEMPTS if claim_timeout is None else statements.UPDATE_HEARD_ATTEMPTS
        self._engine = engine
        self._partition = encode_text(partition)
        self._checked = False
        self._hot = Connections(engine, HOT_CONNECTIONS, HOT_SETTINGS)
        self._pages = Connections(engine, PAGE_CONNECTIONS)
        self._front = QueueFront()

    async def _run(self, statement: HotStatement, values: Mapping[str, Any], *, writing: bool = True) -> list[Any]:
        arguments = statement.arguments(values)

        async def run(held: Held) -> list[Any]:
            if not self._checked:
                self._checked = True
                await warn_of_loss(held.driver)
            try:
                # sql: of a HotStatement, made at import
                return await held.driver.fetch(statement.sql, *arguments, timeout=self._statement_seconds)
            except Exception as error:
                if isinstance(error, TimeoutError):
                    # It may yet take place, whatever is sent on another connection.
                    held.driver.terminate()
                    self._suspect_all()
                if not held.driver.is_closed():
                    raise
                if writing and not is_undone(error):
                    raise CommitUnknownError(token=held.session) from error
                raise DatabaseUnavailableError from error

        return await self._hot.use(run)

    def _suspect_all(self) -> None:
        """Where a session does not answer, those that nobody uses may not either: not to be tried one by one."""
        for connections in (self._hot, self._pages):
            connections.break_idle()
        self._break_pool()

    @override
    async def close(self) -> None:
        await self._hot.close()
        await self._pages.close()

    # Hot operations

    @override
    async def enqueue(
        self, drafts: Sequence[RolloutDraft], now: float | None, notes: Sequence[tuple[KeyNote, str]] = ()
    ) -> Enqueued:
        columns = zip(*drafts, strict=True)
        values = dict(zip(RolloutDraft._fields, columns, strict=True)) | {"partition": self._partition, "now": now}
        operation = statements.ENQUEUE
        if notes:
            operation = statements.ENQUEUE_NOTED
            values |= _note_values([note for note, _ in notes]) | {"note_ids": [ids for _, ids in notes]}
        [row] = await self._run(operation.of(len(drafts)), values)
        return Enqueued(row[0], row[1])

    @override
    async def claim(self, claims: Sequence[Claim], now: float | None) -> tuple[float, list[list[Row]]]:
        floor = self._front.floor()
        instant, given = await self._claim_behind(floor, claims, now)
        left = [place for place, rows in enumerate(given) if not rows and claims[place].attempt_ids]
        if not floor or not left:
            return instant, given
        # Nobody shall go away with nothing because of what is before the floor after all.
        self._front.forget()
        given_some = any(given)
        try:
            then, more = await self._claim_behind(0, [claims[place] for place in left], instant if given_some else now)
        except CommitUnknownError:
            raise  # these may have got something after all
        except Exception:
            if not given_some:
                raise
            # What was given out is given out; the others are told that there is nothing, as a moment ago.
            logger.debug("a second look at the queue failed", exc_info=True)
            return instant, given
        for place, rows in zip(left, more, strict=True):
            given[place] = rows
        return (instant if given_some else then), given

    async def _claim_behind(
        self, floor: int, claims: Sequence[Claim], now: float | None
    ) -> tuple[float, list[list[Row]]]:
        """As `claim`, of what is queued behind a position."""
        attempt_ids: list[str | None] = []
        slot_workers: list[str | None] = []
        workers: list[tuple[str, int, int]] = []
        notes: list[KeyNote] = []
        slot_notes: list[int | None] = []
        for claim in claims:
            first = len(attempt_ids) + 1
            attempt_ids += claim.attempt_ids
            slot_workers += [claim.worker_id] * len(claim.attempt_ids)
            if claim.worker_id:
                workers.append((claim.worker_id, first, len(attempt_ids)))
            if claim.note is not None:
                notes.append(claim.note)
            slot_notes += [None if claim.note is None else len(notes)] * len(claim.attempt_ids)
        workers.sort()
        most = len(attempt_ids)
        # Of several claims one may want a worker noted, and no rollout.
        operation = statements.CLAIM_NOTED if notes else statements.CLAIM
        statement = operation.of(most) if len(claims) == 1 else operation.some
        if statement is operation.some:
            # A slot that nobody gets: a list of one empty text could not be given.
            attempt_ids.append(None)
            slot_workers.append(None)
            slot_notes.append(None)
        # The statement for one attempt takes one worker, if only NULL, and the other one that none.
        names, first_slots, last_slots = zip(*(workers or [(None, 1, 1)]), strict=True)
        values: dict[str, Any] = {
            "partition": self._partition,
            "now": now,
            "most": most,
            "floor": floor,
            "attempt_ids": attempt_ids,
            "slot_workers": slot_workers,
            "workers": names,
            "first_slots": first_slots,
            "last_slots": last_slots,
            "claim_timeout": self._claim_timeout,
        }
        if notes:
            places = list(range(1, len(notes) + 1))
            values |= _note_values(notes) | {"place": places, "slot_notes": slot_notes}
        rows = await self._run(statement, values)
        if not rows:
            return 0.0, [[] for _ in claims]
        self._front.seen(rows[0][-2])
        instant: float = rows[0][-1]
        by_slot: dict[int, Row] = {row[_ROLLOUT_WIDTH + 1]: row for row in rows}
        given: list[list[Row]] = []
        slot = 0
        for claim in claims:
            mine: list[Row] = []
            for attempt_id in claim.attempt_ids:
                slot += 1
                row = by_slot.get(slot)
                if row is not None:
                    mine.append((*row[:_ROLLOUT_WIDTH], attempt_id, row[_ROLLOUT_WIDTH]))
            given.append(mine)
        return instant, given

    @override
    async def add_spans(self, batches: Sequence[SpanBatch], now: float | None) -> list[list[SpanOutcome]]:
        spans: list[SpanDraft] = []
        batch_of: list[int | None] = []
        for number, batch in enumerate(batches):
            spans += batch.spans
            # A span that is alone and unknown is not stored in any case.
            batch_of += [number if batch.strict and len(batch.spans) > 1 else None] * len(batch.spans)
        pairs = {pair: place for place, pair in enumerate(sorted({(span[0], span[1]) for span in spans}), 1)}
        values: dict[str, Any] = dict(zip(_SPAN_FIELDS, zip(*spans, strict=True), strict=True))
        values |= {
            "partition": self._partition,
            "now": now,
            "pair_rollouts": [rollout_id for rollout_id, _ in pairs],
            "pair_attempts": [attempt_id for _, attempt_id in pairs],
            "pair": [pairs[span[0], span[1]] for span in spans],
            "batch": batch_of,
            "count": len(spans),
        }
        notes = [batch.note for batch in batches if batch.note is not None]
        if notes:
            statement = statements.ADD_SPANS_NOTED
            places = iter(range(1, len(notes) + 1))
            place_of = [None if batch.note is None else next(places) for batch in batches]
            note_of = [place for batch, place in zip(batches, place_of, strict=True) for _ in batch.spans]
            values |= _note_values(notes) | {"place": list(range(1, len(notes) + 1)), "note": note_of}
        elif any(number is not None for number in batch_of):
            statement = statements.ADD_SPANS_STRICTLY
        else:
            statement = statements.ADD_SPANS.of(len(spans))
        missing = await self._run(statement, values)
        outcomes = [SpanOutcome.STORED] * len(spans)
        for place, unknown in missing:
            outcomes[place - 1] = SpanOutcome.UNKNOWN if unknown else SpanOutcome.DUPLICATE
        answers: list[list[SpanOutcome]] = []
        begin = 0
        for batch in batches:
            answers.append(outcomes[begin : begin + len(batch.spans)])
            begin += len(batch.spans)
        return answers

    @override
    async def number_spans(self, spans: Sequence[SpanKey]) -> list[int | None]:
        rollout_ids, attempt_ids, span_ids = zip(*spans, strict=True)
        values = {
            "partition": self._partition,
            "rollout_id": rollout_ids,
            "attempt_id": attempt_ids,
            "span_id": span_ids,
        }
        fresh: dict[int, str] = {}
        last: dict[str, int] = {}
        for place, rollout_id, value in await self._run(statements.NUMBER_SPANS.of(len(spans)), values):
            if place is None:
                last[rollout_id] = value
            else:
                fresh[place] = rollout_id
        numbers: list[int | None] = [None] * len(spans)
        for place in sorted(fresh, reverse=True):
            rollout_id = fresh[place]
            numbers[place - 1] = last[rollout_id]
            last[rollout_id] -= 1
        return numbers

    @override
    async def update_attempts(self, changes: Sequence[AttemptChange], now: float | None) -> list[AttemptChanged | None]:
        answers: list[AttemptChanged | None] = [None] * len(changes)
        places = sorted(range(len(changes)), key=lambda place: changes[place].rollout_id)
        while places:
            rollout_ids, attempt_ids, statuses, workers, beats, metadata = zip(
                *(changes[place] for place in places), strict=True
            )
            values = {
                "partition": self._partition,
                "now": now,
                "owners": rollout_ids,
                "attempt_id": attempt_ids,
                "status": statuses,
                "worker_id": workers,
                "last_heartbeat_time": beats,
                "metadata": metadata,
                "place": places,
            }
            unseen: list[int] = []
            for row in await self._run(self._updates.of(len(places)), values):
                place: int = row[10]
                if row[1] is not None:
                    answers[place] = AttemptChanged(row[:9], row[9], row[12], row[13])
                elif row[11]:
                    unseen.append(place)
            places = sorted(unseen, key=lambda place: changes[place].rollout_id)
        return answers

    @override
    async def issue_numbers(self, counts: Mapping[str, int]) -> dict[str, int]:
        values = {"partition": self._partition, "rollout_id": list(counts), "number": list(counts.values())}
        return {row[0]: row[1] for row in await self._run(statements.ISSUE_NUMBERS.of(len(counts)), values)}

    @override
    async def beat_workers(self, beats: Sequence[WorkerBeat], now: float | None) -> list[Row]:
        worker_ids, stats = zip(*beats, strict=True)
        values = {"partition": self._partition, "now": now, "worker_id": worker_ids, "heartbeat_stats": stats}
        rows = {row[0]: tuple(row) for row in await self._run(statements.BEAT_WORKERS.of(len(beats)), values)}
        return [rows[worker_id] for worker_id in worker_ids]

    # Everything else

    @override
    async def rollouts(self, rollout_ids: Sequence[str], finished: bool) -> list[Row]:
        operation = statements.FINISHED_ROLLOUTS if finished else statements.ROLLOUTS
        ids = list(dict.fromkeys(rollout_ids))
        values = {"partition": self._partition, "rollout_id": ids}
        return [tuple(row) for row in await self._run(operation.of(len(ids)), values, writing=False)]

    @override
    async def fetch(self, statement: Executable) -> Sequence[Row]:
        return await self._asked(statement, {})

    async def _asked(self, statement: Executable, values: Mapping[str, Any]) -> Sequence[Row]:
        async def run(held: Held) -> Sequence[Row]:
            rows = (await held.connection.execute(statement, values)).all()
            await held.connection.rollback()
            return rows

        return await self._pages.use(run)

    @override
    async def fetch_bounded(
        self, reading: Reading, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> tuple[Sequence[Row], bool]:
        if not isinstance(reading, KeptReading):
            return await self._asked(reading.statement, values), False
        sql, arguments = reading.on(self._engine.dialect, values)

        async def run(held: Held) -> Sequence[Row]:
            try:
                return await held.driver.fetch(sql, *arguments)  # sql: compiled by SQLAlchemy, its values bound
            except Exception as error:
                if held.driver.is_closed():
                    raise DatabaseUnavailableError from error
                raise

        return await self._pages.use(run), False

    @override
    async def read(self, work: Callable[[Connection], R]) -> R:
        return await self._transaction(work, {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True})

    @override
    async def write(self, work: Callable[[Connection], R]) -> R:
        return await self._transaction(work, {"isolation_level": "READ COMMITTED", "postgresql_readonly": False})

    async def _transaction(self, work: Callable[[Connection], R], options: Mapping[str, Any]) -> R:
        async with self._engine.connect() as connection:
            await connection.execution_options(**options)
            transaction = await connection.begin()
            try:
                result = await connection.run_sync(work)
            except BaseException as error:
                if isinstance(error, TimeoutError):
                    # Who does not answer is not asked to take it back: without its connection it will.
                    await connection.invalidate()
                await transaction.rollback()
                raise
            driver = await driver_of(connection)
            written = None if options["postgresql_readonly"] else await current_transaction(driver)
            try:
                await transaction.commit()
            except Exception as error:
                broken = isinstance(error, TimeoutError) or driver.is_closed()
                if broken:
                    await connection.invalidate()  # there is nobody to roll anything back
                if written is not None and broken and not is_undone(error):
                    raise CommitUnknownError(token=written, result=result) from error
                raise
        return result

    @override
    async def is_over(self, error: CommitUnknownError) -> bool:
        session = error.token
        if not isinstance(session, BackendSession):
            return False
        return await self._hot.use(lambda held: end_session(held.driver, session))

    @override
    async def took_place(self, error: CommitUnknownError) -> bool | None:
        transaction = error.token
        if not isinstance(transaction, str):
            return None
        answer = await self._hot.use(lambda held: took_place(held.driver, transaction))
        if answer is None:
            raise CommitUnknownError(token=transaction, result=error.result)
        return answer

    @override
    async def refresh_statistics(self) -> Sequence[str]:
        return await self.write(_analyze_grown_tables)

    @override
    def next_order(self, table: Table) -> ColumnElement[int]:
        return ORDERS[table.name].next_value()

    @override
    def next_queue_position(self) -> ColumnElement[int]:
        return ORDERS["rollouts"].next_value()

    @override
    def connections(self) -> tuple[int, int]:
        pools = self._hot, self._pages
        return sum(pool.in_use for pool in pools), sum(pool.idle for pool in pools)

    @override
    def clock(self) -> ColumnElement[float] | None:
        return sql_cast(extract("epoch", func.clock_timestamp()), Double)
