"""The hot operations on SQLite: each runs inside a transaction of the caller's, on its cursor.

What is read here cannot change before the commit, since only one transaction writes at a time. So
the rules are asked of `lightning_sql.lifecycle` in Python, and what follows is written by row number.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from sqlite3 import Cursor
from typing import Any, Final

from lightning_sql import lifecycle
from lightning_sql.database.dialects import sqlite_statements as statements
from lightning_sql.database.dialects.hot import (
    AttemptChange,
    AttemptChanged,
    Claim,
    Enqueued,
    KeyNote,
    RolloutDraft,
    Row,
    SpanBatch,
    SpanDraft,
    SpanKey,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.database.dialects.sqlite_statements import RolloutState
from lightning_sql.database.native import ATTEMPT_COLUMNS, ROLLOUT_COLUMNS
from lightning_sql.records import ROLLOUT_ACTIVE, AttemptStatus, RolloutStatus

__all__ = [
    "add_spans",
    "beat_workers",
    "claim",
    "enqueue",
    "issue_numbers",
    "number_spans",
    "rollouts",
    "update_attempts",
]


_ROLLOUT_WIDTH: Final = len(ROLLOUT_COLUMNS)
_ATTEMPT_WIDTH: Final = len(ATTEMPT_COLUMNS)
_ATTEMPT_ID: Final = ATTEMPT_COLUMNS.index("attempt_id")
_SEQUENCE_ID: Final = ATTEMPT_COLUMNS.index("sequence_id")
_STATUS: Final = ATTEMPT_COLUMNS.index("status")
_WORKER_ID: Final = ATTEMPT_COLUMNS.index("worker_id")
_END_TIME: Final = ATTEMPT_COLUMNS.index("end_time")
_HEARTBEAT: Final = ATTEMPT_COLUMNS.index("last_heartbeat_time")
_CHANGED: Final = tuple(
    (name, ATTEMPT_COLUMNS.index(name)) for name in ("status", "worker_id", "last_heartbeat_time", "metadata")
)
"""What an `AttemptChange` may set, and where it stands in an attempt's row."""
_ROLLOUT_STATUS: Final = RolloutState._fields.index("status")
_ATTEMPT_COUNT: Final = RolloutState._fields.index("attempt_count")
_updated_fields: Final = itemgetter(*(ATTEMPT_COLUMNS.index(name) for name in statements.ATTEMPT_FIELDS))


_json: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def _time(now: float | None) -> float:
    return time.time() if now is None else now


@lru_cache(maxsize=1024)
def _retry_condition(text: str) -> frozenset[str]:
    return frozenset(json.loads(text))


def _write_notes(cursor: Cursor, partition: str, notes: Sequence[tuple[KeyNote, str]], now: float) -> None:
    cursor.executemany(statements.INSERT_NOTE, [(partition, *note, ids, now) for note, ids in notes])


def _is_note(cursor: Cursor, partition: str, note: KeyNote) -> bool:
    return cursor.execute(statements.IS_NOTE, (partition, note.key, note.part)).fetchone() is not None


def enqueue(
    cursor: Cursor,
    partition: str,
    drafts: Sequence[RolloutDraft],
    now: float | None,
    notes: Sequence[tuple[KeyNote, str]] = (),
) -> Enqueued:
    """`HotPath.enqueue`."""
    time_ = _time(now)
    if notes:
        _write_notes(cursor, partition, notes, time_)
    latest: str | None = None
    if any(draft.resources_id is None for draft in drafts):
        found = cursor.execute(statements.LATEST_RESOURCES, (partition,)).fetchone()
        if found is not None:
            [latest] = found
            drafts = [
                draft if draft.resources_id is not None else draft._replace(resources_id=latest) for draft in drafts
            ]
    order, position = cursor.execute(statements.NEXT_ROLLOUT, (partition,)).fetchone()
    cursor.executemany(
        statements.INSERT_ROLLOUT,
        [
            (partition, order + index, "queuing", time_, position + index, 0, *draft)
            for index, draft in enumerate(drafts)
        ],
    )
    return Enqueued(time_, latest)


def claim(
    cursor: Cursor, partition: str, claims: Sequence[Claim], now: float | None, claim_timeout: float | None = None
) -> tuple[float, list[list[Row]]]:
    """`HotPath.claim`."""
    time_ = _time(now)
    wanted = sum(len(claim.attempt_ids) for claim in claims)
    front = iter(cursor.execute(statements.QUEUE_FRONT, (partition, wanted)).fetchall())
    changed: list[Row] = []
    begun: list[Row] = []
    workers: dict[str, dict[str, Any]] = {}
    notes: list[tuple[KeyNote, str]] = []
    answer: list[list[Row]] = []
    for claim in claims:
        rows: list[Row] = []
        last: tuple[str, str] | None = None
        # The front comes second, so that none is taken from it when there is no further id.
        for attempt_id, row in zip(claim.attempt_ids, front, strict=False):
            rowid, number, timeout, unresponsive = row[_ROLLOUT_WIDTH:]
            rollout = row[:_ROLLOUT_WIDTH]
            changed.append((number, lifecycle.watch_time(timeout, unresponsive, time_, None, claim_timeout), rowid))
            begun.append((partition, rollout[0], attempt_id, number, "preparing", claim.worker_id, time_))
            rows.append((*rollout, attempt_id, number))
            last = rollout[0], attempt_id
        if claim.worker_id:
            status = "unknown"
            if last is None:
                found = cursor.execute(statements.WORKER_STATUS, (partition, claim.worker_id)).fetchone()
                [status] = found or (status,)
            workers[claim.worker_id] = lifecycle.dequeue_sync(last, status, time_)
        # A claim that got nothing leaves no note; but if there is one, it is a repeat, and must fail as such.
        if claim.note is not None and (rows or _is_note(cursor, partition, claim.note)):
            notes.append((claim.note, _json([(row[0], row[_ROLLOUT_WIDTH]) for row in rows])))
        answer.append(rows)
    if changed:
        cursor.executemany(statements.CLAIM_ROLLOUT, changed)
        cursor.executemany(statements.INSERT_ATTEMPT, begun)
    _save_workers(cursor, partition, workers)
    if notes:
        _write_notes(cursor, partition, notes, time_)
    return time_, answer


def _insert_spans(cursor: Cursor, partition: str, spans: Sequence[SpanDraft]) -> list[SpanOutcome]:
    """Store those of the spans that are new."""
    [order] = cursor.execute(statements.NEXT_SPAN).fetchone()
    cursor.executemany(statements.INSERT_SPAN, [(partition, number, *span) for number, span in enumerate(spans, order)])
    if cursor.rowcount == len(spans):
        return [SpanOutcome.STORED] * len(spans)
    # Those that are stored under another number were there before.
    found = [
        cursor.execute(statements.SPAN_ORDER, (partition, span.rollout_id, span.attempt_id, span.span_id)).fetchone()
        for span in spans
    ]
    return [
        SpanOutcome.STORED if row == (number,) else SpanOutcome.DUPLICATE for number, row in enumerate(found, order)
    ]


def add_spans(
    cursor: Cursor, partition: str, batches: Sequence[SpanBatch], now: float | None
) -> list[list[SpanOutcome]]:
    """`HotPath.add_spans`."""
    now = _time(now)
    answer = _add_span_batches(cursor, partition, batches, now)
    notes = [
        (batch.note, _json("".join(str(int(outcome)) for outcome in outcomes)))
        for batch, outcomes in zip(batches, answer, strict=True)
        if batch.note is not None
    ]
    if notes:
        _write_notes(cursor, partition, notes, now)
    return answer


def _add_span_batches(
    cursor: Cursor, partition: str, batches: Sequence[SpanBatch], now: float
) -> list[list[SpanOutcome]]:
    spans = [span for batch in batches for span in batch.spans]
    owners: dict[Row, Row | None] = dict.fromkeys([span[:2] for span in spans])
    keys = list(owners)
    for row in cursor.execute(statements.SPAN_OWNERS, (_json(keys), partition)):
        owners[keys[row[0]]] = row
    if None in owners.values():
        return _add_known_spans(cursor, partition, batches, owners, now)
    outcomes = _store_spans(cursor, partition, spans, owners, now)
    answer: list[list[SpanOutcome]] = []
    begin = 0
    for batch in batches:
        end = begin + len(batch.spans)
        answer.append(outcomes[begin:end])
        begin = end
    return answer


def _add_known_spans(
    cursor: Cursor, partition: str, batches: Sequence[SpanBatch], owners: Mapping[Row, Row | None], now: float
) -> list[list[SpanOutcome]]:
    """As `add_spans`, where some of the attempts do not exist."""
    answer: list[list[SpanOutcome]] = []
    spans: list[SpanDraft] = []
    places: list[tuple[list[SpanOutcome], int]] = []
    for batch in batches:
        outcomes = [SpanOutcome.UNKNOWN if owners[span[:2]] is None else SpanOutcome.DUPLICATE for span in batch.spans]
        answer.append(outcomes)
        if not (batch.strict and SpanOutcome.UNKNOWN in outcomes):
            kept = [index for index, outcome in enumerate(outcomes) if outcome is not SpanOutcome.UNKNOWN]
            spans += [batch.spans[index] for index in kept]
            places += [(outcomes, index) for index in kept]
    if spans:
        stored = _store_spans(cursor, partition, spans, owners, now)
        for (outcomes, index), outcome in zip(places, stored, strict=True):
            outcomes[index] = outcome
    return answer


def _store_spans(
    cursor: Cursor, partition: str, spans: Sequence[SpanDraft], owners: Mapping[Row, Row | None], now: float
) -> list[SpanOutcome]:
    """Store spans whose owners are known, rows of `statements.SPAN_OWNERS`, and what follows for those."""
    outcomes = _insert_spans(cursor, partition, spans)
    highest: dict[Row, int] = {}
    for span, outcome in zip(spans, outcomes, strict=True):
        if outcome is SpanOutcome.STORED:
            key, number = span[:2], span[2]
            if number >= highest.get(key, number):
                highest[key] = number
    attempts: list[Row] = []
    changed: list[Row] = []
    numbers: dict[str, int] = {}
    for key, number in highest.items():
        owner = owners[key]
        if owner is None:
            continue
        _, rowid, status, sequence_id, issued, *state = owner
        beaten: AttemptStatus = lifecycle.HEARTBEAT_ATTEMPT.get(status) or status
        attempts.append((now, beaten, rowid))
        if sequence_id == state[_ATTEMPT_COUNT]:
            after = lifecycle.status_after_heartbeat(state[_ROLLOUT_STATUS], beaten)
            if after != state[_ROLLOUT_STATUS]:
                rollout = RolloutState._make(state)
                changed.append(_with_status(rollout, after, None, _watch_at(rollout, after, anew=False, now=now), now))
        known: int = numbers.get(key[0]) or issued
        if number > known:
            numbers[key[0]] = number
    cursor.executemany(statements.BEAT_ATTEMPT, attempts)
    if changed:
        cursor.executemany(statements.UPDATE_ROLLOUT, changed)
    if numbers:
        cursor.executemany(
            statements.RAISE_NUMBER, [(partition, rollout_id, number) for rollout_id, number in numbers.items()]
        )
    return outcomes


def _watch_at(rollout: RolloutState, status: RolloutStatus, *, anew: bool, now: float) -> float | None:
    """When the watchdog must look at a rollout that has this status now; `anew` when what it looks at was set."""
    if status not in ROLLOUT_ACTIVE or not rollout.is_limited:
        return None
    return now if anew or rollout.watch_at is None else rollout.watch_at


def _with_status(
    rollout: RolloutState, status: RolloutStatus, queue_position: int | None, watch_at: float | None, now: float
) -> Row:
    """The parameters of `statements.UPDATE_ROLLOUT` for another status."""
    return status, lifecycle.end_time_of(status, now), queue_position, watch_at, rollout.rowid


class _AttemptUpdates:
    """Changed attempts, and what follows for their rollouts and workers, gathered to be written together."""

    def __init__(self, cursor: Cursor, partition: str, now: float, claim_timeout: float | None) -> None:
        self._claims_have_limits = claim_timeout is not None
        self._cursor = cursor
        self._partition = partition
        self._now = now
        self._attempts: list[Row] = []
        self._rollouts: list[Row] = []
        self._watches: list[Row] = []
        self._workers: dict[str, dict[str, Any]] = {}
        self._next_position: int | None = None

    def find(self, changes: Sequence[AttemptChange]) -> list[Row | None]:
        """The attempts that change."""
        found: list[Row | None] = [None] * len(changes)
        by_id: list[int] = []
        ids: list[tuple[str, str]] = []
        latest: list[int] = []
        for place, change in enumerate(changes):
            if change.attempt_id is None:
                latest.append(place)
            else:
                by_id.append(place)
                ids.append((change.rollout_id, change.attempt_id))
        for statement, places, keys in (
            (statements.ATTEMPTS_BY_ID, by_id, ids),
            (statements.LATEST_ATTEMPTS, latest, [changes[place].rollout_id for place in latest]),
        ):
            if keys:
                for row in self._cursor.execute(statement, (_json(keys), self._partition)):
                    found[places[row[0]]] = row[1:]
        return found

    def add(self, change: AttemptChange, row: Row) -> AttemptChanged:
        """Work out a change of an attempt that was found."""
        attempt = list(row[:_ATTEMPT_WIDTH])
        rowid, *state = row[_ATTEMPT_WIDTH:]
        rollout = RolloutState(*state)
        changes: dict[str, Any] = {}
        for name, index in _CHANGED:
            value = getattr(change, name)
            if value is not None:
                changes[name] = attempt[index] = value
        if change.status in lifecycle.ATTEMPT_ENDED:
            attempt[_END_TIME] = self._now
        lost = self._claims_have_limits and attempt[_HEARTBEAT] is None
        if lost:
            attempt[_HEARTBEAT] = lifecycle.heartbeat_after_update(attempt[_STATUS], None, self._now)
        self._attempts.append((*_updated_fields(attempt), rowid))
        status = rollout.status
        if attempt[_SEQUENCE_ID] == rollout.attempt_count:
            status = self._follow(rollout, attempt[_STATUS], changes, lost=lost)
        worker_id = attempt[_WORKER_ID]
        if worker_id and lifecycle.worker_follows(changes):
            # Of several attempts of a worker the last one decides, but each leaves its times.
            self._workers.setdefault(worker_id, {}).update(
                lifecycle.worker_sync(attempt[_STATUS], change.rollout_id, attempt[_ATTEMPT_ID], self._now)
            )
        ended = status != rollout.status and lifecycle.is_finished(status)
        return AttemptChanged(tuple(attempt), status, rollout.mode, self._now - rollout.start_time if ended else None)

    def _follow(
        self, rollout: RolloutState, attempt_status: AttemptStatus, changes: Mapping[str, Any], *, lost: bool
    ) -> RolloutStatus:
        """Let a rollout follow its latest attempt."""
        status = lifecycle.status_after_attempt(
            rollout.status,
            attempt_status,
            rollout.attempt_count,
            rollout.max_attempts,
            _retry_condition(rollout.retry_condition),
            lost=lost,
        )
        anew = "status" in changes or "last_heartbeat_time" in changes
        watch_at = _watch_at(rollout, status, anew=anew, now=self._now)
        if status != rollout.status:
            position = None
            if lifecycle.is_queued(status):
                position = rollout.queue_position if lifecycle.is_queued(rollout.status) else self._position()
            self._rollouts.append(_with_status(rollout, status, position, watch_at, self._now))
        elif watch_at != rollout.watch_at:
            self._watches.append((watch_at, rollout.rowid))
        return status

    def _position(self) -> int:
        if self._next_position is None:
            self._next_position = int(self._cursor.execute(statements.NEXT_POSITION, (self._partition,)).fetchone()[0])
        position = self._next_position
        self._next_position = position + 1
        return position

    def write(self) -> None:
        """Write everything that was gathered."""
        for statement, rows in (
            (statements.UPDATE_ATTEMPT, self._attempts),
            (statements.UPDATE_ROLLOUT, self._rollouts),
            (statements.WATCH_ROLLOUT, self._watches),
        ):
            if rows:
                self._cursor.executemany(statement, rows)
        _save_workers(self._cursor, self._partition, self._workers)


def update_attempts(
    cursor: Cursor,
    partition: str,
    changes: Sequence[AttemptChange],
    now: float | None,
    claim_timeout: float | None = None,
) -> list[AttemptChanged | None]:
    """`HotPath.update_attempts`."""
    updates = _AttemptUpdates(cursor, partition, _time(now), claim_timeout)
    answer = [
        None if row is None else updates.add(change, row)
        for change, row in zip(changes, updates.find(changes), strict=True)
    ]
    updates.write()
    return answer


def issue_numbers(cursor: Cursor, partition: str, counts: Mapping[str, int]) -> dict[str, int]:
    """`HotPath.issue_numbers`."""
    return {
        rollout_id: cursor.execute(statements.ISSUE_NUMBERS, (partition, rollout_id, count)).fetchone()[0]
        for rollout_id, count in counts.items()
    }


def _save_workers(cursor: Cursor, partition: str, workers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what changes in workers; those that were never heard of are made up."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for worker_id, changes in workers.items():
        alike.setdefault(tuple(changes), []).append((*changes.values(), partition, worker_id))
    written = 0
    for fields, rows in alike.items():
        written += cursor.executemany(statements.worker_statements(fields)[0], rows).rowcount
    if written < len(workers):
        for worker_id, changes in workers.items():
            insert = statements.worker_statements(tuple(changes))[1]
            cursor.execute(insert, (*changes.values(), partition, worker_id))


def beat_workers(cursor: Cursor, partition: str, beats: Sequence[WorkerBeat], now: float | None) -> list[Row]:
    """`HotPath.beat_workers`."""
    time_ = _time(now)
    cursor.executemany(
        statements.BEAT_WORKER, [(partition, beat.worker_id, time_, beat.heartbeat_stats) for beat in beats]
    )
    worker_ids = [beat.worker_id for beat in beats]
    rows: dict[int, Row] = {
        row[0]: row[1:] for row in cursor.execute(statements.WORKERS_BY_ID, (_json(worker_ids), partition))
    }
    return [rows[place] for place in range(len(beats))]


def rollouts(cursor: Cursor, partition: str, rollout_ids: Sequence[str], *, finished: bool) -> list[Row]:
    """`HotPath.rollouts`."""
    statement = statements.FINISHED_BY_ID if finished else statements.ROLLOUTS_BY_ID
    return cursor.execute(statement, (_json(list(dict.fromkeys(rollout_ids))), partition)).fetchall()


def number_spans(cursor: Cursor, partition: str, spans: Sequence[SpanKey]) -> list[int | None]:
    """`HotPath.number_spans`."""
    known = {
        (rollout_id, attempt_id)
        for rollout_id, attempt_id in {(rollout_id, attempt_id) for rollout_id, attempt_id, _ in spans}
        if cursor.execute(statements.IS_ATTEMPT, (partition, rollout_id, attempt_id)).fetchone() is not None
    }
    fresh = [
        (rollout_id, attempt_id) in known
        and cursor.execute(statements.IS_SPAN, (partition, rollout_id, attempt_id, span_id)).fetchone() is None
        for rollout_id, attempt_id, span_id in spans
    ]
    counts = Counter(rollout_id for (rollout_id, _, _), new in zip(spans, fresh, strict=True) if new)
    last = issue_numbers(cursor, partition, counts)
    following = {rollout_id: last[rollout_id] - count for rollout_id, count in counts.items()}
    numbers: list[int | None] = []
    for (rollout_id, _, _), new in zip(spans, fresh, strict=True):
        if new:
            following[rollout_id] += 1
        numbers.append(following[rollout_id] if new else None)
    return numbers
