"""The native store's hot operations on PostgreSQL, each as one statement.

The rules of a single statement (DESIGN.md section 4): whatever decides is read from a row that this
statement locked, in the order rollout, attempt, counter, worker, each kind in the order of its keys. A
statement sees the database as it was when it began, but a row that it locks as it is now; parts of one
statement do not see each other's writes, so none writes a row twice, and what a part needs of another
comes from its RETURNING. The rules themselves are those of `lightning_sql.lifecycle`, from whose tables
the CASE expressions are made.

A look-up by key is a LATERAL subquery with a LIMIT, which the planner cannot turn into a join over the
whole table, whatever its statistics say.
"""

from __future__ import annotations

from typing import Final

from lightning_sql import lifecycle
from lightning_sql.database.dialects.hot import SpanDraft, SpanOutcome
from lightning_sql.database.dialects.hot_statement import Given, HotOperation
from lightning_sql.database.dialects.postgresql_parts import (
    ACTIVE,
    BUSY,
    ENDED,
    FINISHED,
    NOW,
    QUEUED,
    case,
    columns,
    locked_rollout,
    noted_part,
    texts,
    words,
)
from lightning_sql.database.native import ATTEMPT_COLUMNS, ROLLOUT_COLUMNS, WORKER_COLUMNS
from lightning_sql.database.native import ATTEMPTS as ATTEMPTS_TABLE
from lightning_sql.database.native import ROLLOUTS as ROLLOUTS_TABLE
from lightning_sql.database.native import WORKERS as WORKERS_TABLE

__all__ = [
    "ADD_SPANS",
    "ADD_SPANS_NOTED",
    "ADD_SPANS_STRICTLY",
    "BEAT_WORKERS",
    "CLAIM",
    "CLAIM_NOTED",
    "ENQUEUE",
    "ENQUEUE_NOTED",
    "FINISHED_ROLLOUTS",
    "ISSUE_NUMBERS",
    "NUMBER_SPANS",
    "ROLLOUTS",
    "STATEMENTS",
    "UPDATE_ATTEMPTS",
    "UPDATE_HEARD_ATTEMPTS",
]


_DRAFT_KINDS: Final = {
    "rollout_id": "text",
    "input": "text",
    "mode": "text",
    "resources_id": "text",
    "timeout_seconds": "double precision",
    "unresponsive_seconds": "double precision",
    "max_attempts": "bigint",
    "retry_condition": "text",
    "metadata": "text",
}


def _enqueue(given: Given, *, noted: bool = False) -> str:
    return f"""
WITH latest AS MATERIALIZED (
    SELECT resources_id FROM resources WHERE partition_id = :partition ORDER BY update_time DESC LIMIT 1
),
placed AS (
    INSERT INTO rollouts (partition_id, rollout_id, seq, status, mode, resources_id, start_time, timeout_seconds,
        unresponsive_seconds, max_attempts, retry_condition, queue_position, attempt_count, input, metadata)
    SELECT :partition, d.rollout_id, d.place, 'queuing', d.mode,
        coalesce(d.resources_id, (SELECT resources_id FROM latest)), {NOW}, d.timeout_seconds,
        d.unresponsive_seconds, d.max_attempts, d.retry_condition, d.place, 0,
        CAST(d.input AS json), CAST(d.metadata AS json)
    FROM (
        SELECT u.*, nextval('rollouts_order') AS place
        FROM {given.rows(_DRAFT_KINDS, "u", place="ord")}
        ORDER BY u.ord
    ) d
){noted_part(given, {"note_ids": "text"}, "n.note_ids") if noted else ""}
SELECT {NOW}, (SELECT resources_id FROM latest)
"""


ENQUEUE: Final = HotOperation("enqueue", _enqueue)
ENQUEUE_NOTED: Final = HotOperation("enqueue_noted", lambda given: _enqueue(given, noted=True))


_WORKER_SLOTS: Final = {"workers": "text", "first_slots": "integer", "last_slots": "integer"}


def _noted_claims(given: Given) -> str:
    ids = f"CAST(json_agg(json_build_array(c.rollout_id, {given.at('attempt_ids', 'c.n')}) ORDER BY c.n) AS text)"
    slots = f"LEFT JOIN claimed c ON {given.at('slot_notes', 'c.n', 'integer')} = n.place"
    # A claim that got nothing leaves no note; but if there is one, it is a repeat, and must fail as such.
    written = """HAVING count(c.n) > 0 OR (
        SELECT true FROM idempotency_keys k
        WHERE k.partition_id = :partition AND k.key = n.key AND k.part = n.part LIMIT 1
    )"""
    return noted_part(given, {"place": "integer"}, ids, slots, written)


def _claim(given: Given, *, noted: bool = False) -> str:
    return f"""
WITH front AS MATERIALIZED (
    SELECT rollout_id, queue_position FROM rollouts
    WHERE partition_id = :partition AND queue_position IS NOT NULL AND queue_position > :floor
    ORDER BY queue_position LIMIT :most
    FOR UPDATE SKIP LOCKED
),
claimed AS (
    UPDATE rollouts r
    SET status = 'preparing', end_time = NULL, queue_position = NULL, attempt_count = r.attempt_count + 1,
        watch_at = {NOW} + least(r.timeout_seconds, r.unresponsive_seconds, CAST(:claim_timeout AS double precision))
    WHERE r.partition_id = :partition AND r.rollout_id = ANY (ARRAY(SELECT rollout_id FROM front))
    RETURNING {texts("r", ROLLOUTS_TABLE, ROLLOUT_COLUMNS)}, r.attempt_count,
        array_position(ARRAY(SELECT rollout_id FROM front), r.rollout_id) AS n
),
begun AS (
    INSERT INTO attempts (partition_id, rollout_id, attempt_id, sequence_id, status, worker_id, start_time)
    SELECT :partition, c.rollout_id, {given.at("attempt_ids", "c.n")}, c.attempt_count, 'preparing',
        {given.at("slot_workers", "c.n")}, {NOW}
    FROM claimed c
),
tended AS (
    INSERT INTO workers AS w (partition_id, worker_id, seq, status, last_dequeue_time, last_busy_time,
        last_idle_time, current_rollout_id, current_attempt_id)
    SELECT :partition, g.worker_id, nextval('workers_order'),
        CASE WHEN c.n IS NULL THEN 'idle' ELSE 'busy' END, {NOW},
        CASE WHEN c.n IS NOT NULL THEN {NOW} END, CASE WHEN c.n IS NULL THEN {NOW} END,
        c.rollout_id, {given.at("attempt_ids", "c.n")}
    -- A worker has the slots from its first to its last; it is tied to the last of them that got something.
    FROM {given.rows(_WORKER_SLOTS, "g", "worker_id", "first_slot", "last_slot", short=_WORKER_SLOTS)}
        LEFT JOIN claimed c ON c.n = least(g.last_slot, (SELECT count(*) FROM front)) AND c.n >= g.first_slot
    WHERE g.worker_id IS NOT NULL
    ON CONFLICT (partition_id, worker_id) DO UPDATE SET
        status = excluded.status,
        last_dequeue_time = excluded.last_dequeue_time,
        last_busy_time = coalesce(excluded.last_busy_time, w.last_busy_time),
        last_idle_time = CASE WHEN excluded.status = 'idle' AND w.status <> 'idle' THEN excluded.last_idle_time
            ELSE w.last_idle_time END,
        current_rollout_id = coalesce(excluded.current_rollout_id, w.current_rollout_id),
        current_attempt_id = coalesce(excluded.current_attempt_id, w.current_attempt_id)
){_noted_claims(given) if noted else ""}
SELECT {columns("c", ROLLOUT_COLUMNS)}, c.attempt_count, c.n, (SELECT queue_position FROM front LIMIT 1), {NOW}
FROM claimed c
"""


CLAIM: Final = HotOperation("claim", _claim)
CLAIM_NOTED: Final = HotOperation("claim_noted", lambda given: _claim(given, noted=True))

_SPAN_TYPES: Final = {
    "sequence_id": "bigint",
    "start_time": "double precision",
    "end_time": "double precision",
}
_SPAN_PAYLOADS: Final = ("status", "attributes", "events", "links", "context", "parent", "resource", "extra")
# Rollout and attempt come by the number of their pair, so that they cross the wire once.
_SPAN_GIVEN: Final = tuple(name for name in SpanDraft._fields if name not in ("rollout_id", "attempt_id"))

_REFUSED: Final = """refused AS MATERIALIZED (
    SELECT DISTINCT g.batch FROM given g
    WHERE g.batch IS NOT NULL AND NOT EXISTS (SELECT FROM attempt a WHERE a.pair = g.pair)
),
"""
_ACCEPTED: Final = "g.batch IS NULL OR NOT EXISTS (SELECT FROM refused f WHERE f.batch = g.batch)"


_PAIRS: Final = {"pair_rollouts": "text", "pair_attempts": "text"}
_SPAN_KINDS: Final = {"pair": "integer", "batch": "integer"} | {
    name: _SPAN_TYPES.get(name, "text") for name in _SPAN_GIVEN
}


_SPAN_SHORT: Final = _SPAN_KINDS.keys() - {"attributes"}


def _noted_spans(given: Given) -> str:
    outcome = f"""CASE WHEN s.span_id IS NOT NULL THEN '{SpanOutcome.STORED:d}'
        WHEN k.pair IS NOT NULL THEN '{SpanOutcome.DUPLICATE:d}' ELSE '{SpanOutcome.UNKNOWN:d}' END"""
    source = """JOIN given g ON g.note = n.place
    LEFT JOIN attempt k ON k.pair = g.pair
    LEFT JOIN stored s ON s.rollout_id = k.rollout_id AND s.attempt_id = k.attempt_id AND s.span_id = g.span_id"""
    return noted_part(
        given, {"place": "integer"}, f"""'"' || string_agg({outcome}, '' ORDER BY g.ord) || '"'""", source
    )


def _add_spans(given: Given, refused: str = "", accepted: str = "true", *, noted: bool = False) -> str:
    kinds = _SPAN_KINDS | {"note": "integer"} if noted else _SPAN_KINDS
    short = () if noted else _SPAN_SHORT  # a single span may have an empty text, which a list of one could not be
    return f"""
WITH attempt AS MATERIALIZED (
    -- The pairs come sorted, so that every statement locks in the same order.
    SELECT p.pair, p.rollout_id, p.attempt_id, o.attempt_count, o.limited, o.status AS rollout_status,
        a.status, a.sequence_id
    FROM {given.rows(_PAIRS, "p", "rollout_id", "attempt_id", place="pair")}
    CROSS JOIN LATERAL {locked_rollout("p.rollout_id")} o
    CROSS JOIN LATERAL (
        SELECT a.status, a.sequence_id FROM attempts a
        WHERE a.partition_id = :partition AND a.rollout_id = p.rollout_id AND a.attempt_id = p.attempt_id
        LIMIT 1 FOR NO KEY UPDATE
    ) a
),
given AS MATERIALIZED (
    SELECT nextval('spans_order') AS seq, u.* FROM {given.rows(kinds, "u", place="ord", short=short)}
),
{refused}stored AS (
    INSERT INTO spans (partition_id, rollout_id, attempt_id, seq, {", ".join(_SPAN_GIVEN)})
    SELECT :partition, a.rollout_id, a.attempt_id, g.seq,
        {", ".join(f"CAST(g.{n} AS json)" if n in _SPAN_PAYLOADS else f"g.{n}" for n in _SPAN_GIVEN)}
    FROM given g JOIN attempt a ON a.pair = g.pair
    WHERE {accepted}
    ON CONFLICT (partition_id, rollout_id, attempt_id, span_id) DO NOTHING
    RETURNING rollout_id, attempt_id, span_id, sequence_id
),
news AS MATERIALIZED (
    SELECT rollout_id, attempt_id, max(sequence_id) AS highest FROM stored GROUP BY rollout_id, attempt_id
),
raised AS (
    INSERT INTO span_sequences AS c (partition_id, rollout_id, value)
    SELECT :partition, h.rollout_id, h.highest
    FROM (SELECT rollout_id, max(highest) AS highest FROM news GROUP BY rollout_id) h
    -- Counters only grow: one that was high enough when this statement began needs no lock.
    WHERE h.highest > coalesce((
        SELECT k.value FROM span_sequences k WHERE k.partition_id = :partition AND k.rollout_id = h.rollout_id
    ), 0)
    ORDER BY h.rollout_id
    ON CONFLICT (partition_id, rollout_id) DO UPDATE SET value = GREATEST(c.value, excluded.value)
),
beaten AS (
    UPDATE attempts a
    SET last_heartbeat_time = {NOW}, status = {case("k.status", lifecycle.HEARTBEAT_ATTEMPT, "k.status")}
    FROM attempt k JOIN news n ON n.rollout_id = k.rollout_id AND n.attempt_id = k.attempt_id
    WHERE a.partition_id = :partition AND a.rollout_id {given.each("pair_rollouts")}
        AND a.rollout_id = k.rollout_id AND a.attempt_id = k.attempt_id
    RETURNING k.pair, a.status
),
promoted AS (
    UPDATE rollouts r
    SET status = {case("k.rollout_status", lifecycle.HEARTBEAT_ROLLOUT, "k.rollout_status")},
        end_time = NULL, queue_position = NULL,
        watch_at = CASE WHEN k.limited THEN CASE WHEN k.rollout_status IN {QUEUED} THEN {NOW} ELSE r.watch_at END END
    FROM attempt k JOIN beaten b ON b.pair = k.pair
    WHERE r.partition_id = :partition AND r.rollout_id {given.each("pair_rollouts")}
        AND r.rollout_id = k.rollout_id
        AND k.sequence_id = k.attempt_count AND b.status = 'running'
        AND k.rollout_status IN {words(lifecycle.HEARTBEAT_ROLLOUT)}
){_noted_spans(given) if noted else ""}
SELECT g.ord, k.pair IS NULL AS unknown
FROM given g LEFT JOIN attempt k ON k.pair = g.pair
    LEFT JOIN stored s ON s.rollout_id = k.rollout_id AND s.attempt_id = k.attempt_id AND s.span_id = g.span_id
-- Nearly always all are stored, and there is nothing to look for.
WHERE s.span_id IS NULL AND (SELECT count(*) FROM stored) < CAST(:count AS integer)
"""


ADD_SPANS: Final = HotOperation("add_spans", _add_spans)
ADD_SPANS_STRICTLY: Final = HotOperation(
    "add_spans_strictly", lambda given: _add_spans(given, _REFUSED, _ACCEPTED)
).some
"""Spans of a batch that has a number are stored only if all of them belong to an attempt."""
ADD_SPANS_NOTED: Final = HotOperation(
    "add_spans_noted", lambda given: _add_spans(given, _REFUSED, _ACCEPTED, noted=True)
).some
"""As that; the spans of a call that has a note name its place."""


def _number_spans(given: Given) -> str:
    kinds = {"rollout_id": "text", "attempt_id": "text", "span_id": "text"}
    return f"""
WITH fresh AS MATERIALIZED (
    SELECT g.ord, g.rollout_id
    FROM {given.rows(kinds, "g", place="ord")}
    CROSS JOIN LATERAL (
        SELECT FROM attempts a
        WHERE a.partition_id = :partition AND a.rollout_id = g.rollout_id AND a.attempt_id = g.attempt_id LIMIT 1
    ) a
    LEFT JOIN LATERAL (
        SELECT true AS there FROM spans s
        WHERE s.partition_id = :partition AND s.rollout_id = g.rollout_id AND s.attempt_id = g.attempt_id
            AND s.span_id = g.span_id LIMIT 1
    ) s ON true
    WHERE s.there IS NULL
),
issued AS (
    INSERT INTO span_sequences AS c (partition_id, rollout_id, value)
    SELECT :partition, f.rollout_id, f.number
    FROM (SELECT rollout_id, count(*) AS number FROM fresh GROUP BY rollout_id) f
    ORDER BY f.rollout_id COLLATE "C"
    ON CONFLICT (partition_id, rollout_id) DO UPDATE SET value = c.value + excluded.value
    RETURNING rollout_id, value
)
-- Whoever asks puts them together: joined here, each of one kind would be held against each of the other.
SELECT f.ord, f.rollout_id, CAST(NULL AS bigint) AS value FROM fresh f
UNION ALL SELECT NULL, i.rollout_id, i.value FROM issued i
"""


NUMBER_SPANS: Final = HotOperation("number_spans", _number_spans)

_STATUS_AFTER: Final = "coalesce(g.status, a.status)"
_HEARTBEAT_AFTER: Final = "coalesce(g.last_heartbeat_time, a.last_heartbeat_time)"
_FIRST_HEARTBEAT: Final = f"""coalesce(g.last_heartbeat_time, a.last_heartbeat_time,
            CASE WHEN {_STATUS_AFTER} IN {BUSY} THEN {NOW} END)"""
_RETRIED: Final = f"""CASE WHEN strpos(o.retry_condition, '"' || {_STATUS_AFTER} || '"') > 0
        AND a.sequence_id < o.max_attempts THEN 'requeuing' ELSE 'failed' END"""
_RETRIED_IF_LOST: Final = f"""CASE WHEN {_STATUS_AFTER} = 'unresponsive' AND {_FIRST_HEARTBEAT} IS NULL
        AND o.status NOT IN {FINISHED} THEN 'requeuing' ELSE {_RETRIED} END"""

_CHANGE_KINDS: Final = {
    "owners": "text",
    "attempt_id": "text",
    "status": "text",
    "worker_id": "text",
    "last_heartbeat_time": "double precision",
    "metadata": "text",
    "place": "integer",
}


def _update_attempts(given: Given, heartbeat: str = _HEARTBEAT_AFTER, retried: str = _RETRIED) -> str:
    return f"""
WITH follow AS MATERIALIZED (
    -- The rollouts come sorted, so that every statement locks in the same order.
    SELECT g.place, g.rollout_id, g.attempt_id AS wanted, g.status AS new_status, g.worker_id AS new_worker,
        g.last_heartbeat_time AS new_heartbeat,
        o.status AS rollout_status, o.attempt_count, o.limited, o.mode, o.begun,
        a.attempt_id, a.sequence_id, a.start_time,
        {_STATUS_AFTER} AS status_after,
        coalesce(g.worker_id, a.worker_id) AS worker_after,
        {heartbeat} AS heartbeat_after,
        coalesce(CAST(g.metadata AS json), a.metadata) AS metadata_after,
        CASE WHEN g.status IN {ENDED} THEN {NOW} ELSE a.end_time END AS end_after,
        a.sequence_id = o.attempt_count AS latest,
        CASE WHEN a.sequence_id = o.attempt_count AND o.status <> 'cancelled'
            THEN {case(_STATUS_AFTER, lifecycle.OUTCOME, retried)} ELSE o.status END AS rollout_after
    FROM {given.rows(_CHANGE_KINDS, "g", "rollout_id", *list(_CHANGE_KINDS)[1:])}
    CROSS JOIN LATERAL {locked_rollout("g.rollout_id")} o
    LEFT JOIN LATERAL (
        SELECT a.attempt_id, a.sequence_id, a.start_time, a.end_time, a.status, a.worker_id, a.last_heartbeat_time,
            a.metadata
        FROM attempts a
        WHERE a.partition_id = :partition AND a.rollout_id = g.rollout_id AND a.attempt_id = coalesce(g.attempt_id, (
            SELECT l.attempt_id FROM attempts l
            WHERE l.partition_id = :partition AND l.rollout_id = g.rollout_id AND l.sequence_id = o.attempt_count
        ))
        LIMIT 1 FOR NO KEY UPDATE
    ) a ON true
),
changed AS (
    UPDATE attempts a
    SET status = f.status_after, worker_id = f.worker_after, last_heartbeat_time = f.heartbeat_after,
        metadata = f.metadata_after, end_time = f.end_after
    FROM follow f
    WHERE a.partition_id = :partition AND a.rollout_id {given.each("owners")}
        AND a.rollout_id = f.rollout_id AND a.attempt_id = f.attempt_id
),
propagated AS (
    UPDATE rollouts r
    SET status = f.rollout_after,
        end_time = CASE WHEN f.rollout_after = f.rollout_status THEN r.end_time
            WHEN f.rollout_after IN {FINISHED} THEN {NOW} END,
        queue_position = CASE WHEN f.rollout_after IN {QUEUED}
            THEN coalesce(r.queue_position, nextval('rollouts_order')) END,
        watch_at = CASE WHEN f.limited AND f.rollout_after IN {ACTIVE} THEN {NOW} END
    FROM follow f
    WHERE r.partition_id = :partition AND r.rollout_id {given.each("owners")} AND r.rollout_id = f.rollout_id
        AND f.latest AND (f.rollout_after <> f.rollout_status
            OR f.limited AND f.rollout_after IN {ACTIVE}
                AND (f.new_status IS NOT NULL OR f.new_heartbeat IS NOT NULL))
),
tended AS (
    INSERT INTO workers AS w (partition_id, worker_id, seq, status, last_busy_time, last_idle_time,
        current_rollout_id, current_attempt_id)
    SELECT :partition, s.worker_id, nextval('workers_order'),
        {case("s.last_status", lifecycle.WORKER_STATUS, "'unknown'")},
        CASE WHEN s.any_busy THEN {NOW} END, CASE WHEN s.any_free THEN {NOW} END,
        CASE WHEN s.last_status IN {BUSY} THEN s.last_rollout END,
        CASE WHEN s.last_status IN {BUSY} THEN s.last_attempt END
    FROM (
        SELECT f.worker_after AS worker_id,
            (array_agg(f.status_after ORDER BY f.place DESC))[1] AS last_status,
            (array_agg(f.rollout_id ORDER BY f.place DESC))[1] AS last_rollout,
            (array_agg(f.attempt_id ORDER BY f.place DESC))[1] AS last_attempt,
            bool_or(f.status_after IN {BUSY}) AS any_busy, bool_or(f.status_after NOT IN {BUSY}) AS any_free
        FROM follow f
        WHERE f.attempt_id IS NOT NULL AND f.worker_after <> '' AND (f.new_worker <> '' OR f.new_status IS NOT NULL)
        GROUP BY f.worker_after
    ) s
    ORDER BY s.worker_id
    ON CONFLICT (partition_id, worker_id) DO UPDATE SET
        status = excluded.status,
        last_busy_time = coalesce(excluded.last_busy_time, w.last_busy_time),
        last_idle_time = coalesce(excluded.last_idle_time, w.last_idle_time),
        current_rollout_id = excluded.current_rollout_id,
        current_attempt_id = excluded.current_attempt_id
)
SELECT f.rollout_id, f.attempt_id, f.sequence_id, f.start_time, f.end_after, f.status_after, f.worker_after,
    f.heartbeat_after, CAST(f.metadata_after AS text), f.rollout_after, f.place,
    -- The latest attempt began after this statement did, so it cannot be seen yet.
    f.wanted IS NULL AND f.attempt_count > 0 AS may_be_unseen,
    f.mode, CASE WHEN f.rollout_after <> f.rollout_status AND f.rollout_after IN {FINISHED} THEN {NOW} - f.begun END
FROM follow f
"""


UPDATE_ATTEMPTS: Final = HotOperation("update_attempts", _update_attempts)
UPDATE_HEARD_ATTEMPTS: Final = HotOperation(
    "update_heard_attempts", lambda given: _update_attempts(given, _FIRST_HEARTBEAT, _RETRIED_IF_LOST)
)
"""As `UPDATE_ATTEMPTS`, where claims have a limit, so that it matters whether anything was heard of an attempt."""


def _issue_numbers(given: Given) -> str:
    return f"""
INSERT INTO span_sequences AS c (partition_id, rollout_id, value)
SELECT :partition, g.rollout_id, g.number
FROM {given.rows({"rollout_id": "text", "number": "bigint"}, "g")}
ORDER BY g.rollout_id COLLATE "C"
ON CONFLICT (partition_id, rollout_id) DO UPDATE SET value = c.value + excluded.value
RETURNING rollout_id, value
"""


ISSUE_NUMBERS: Final = HotOperation("issue_numbers", _issue_numbers)


def _beat_workers(given: Given) -> str:
    return f"""
INSERT INTO workers AS w (partition_id, worker_id, seq, status, last_heartbeat_time, heartbeat_stats)
SELECT :partition, g.worker_id, nextval('workers_order'), 'unknown', {NOW}, CAST(g.heartbeat_stats AS json)
FROM {given.rows({"worker_id": "text", "heartbeat_stats": "text"}, "g")}
ORDER BY g.worker_id COLLATE "C"
ON CONFLICT (partition_id, worker_id) DO UPDATE SET
    last_heartbeat_time = excluded.last_heartbeat_time,
    heartbeat_stats = coalesce(excluded.heartbeat_stats, w.heartbeat_stats)
RETURNING {texts("w", WORKERS_TABLE, WORKER_COLUMNS)}
"""


BEAT_WORKERS: Final = HotOperation("beat_workers", _beat_workers)


def _rollouts(given: Given, condition: str = "") -> str:
    return f"""
SELECT {texts("r", ROLLOUTS_TABLE, ROLLOUT_COLUMNS)}, {texts("a", ATTEMPTS_TABLE, ATTEMPT_COLUMNS)}
FROM {given.rows({"rollout_id": "text"}, "g")} CROSS JOIN LATERAL (
    SELECT {columns("o", ROLLOUT_COLUMNS)}, o.attempt_count FROM rollouts o
    WHERE o.partition_id = :partition AND o.rollout_id = g.rollout_id LIMIT 1
) r LEFT JOIN LATERAL (
    SELECT {columns("b", ATTEMPT_COLUMNS)} FROM attempts b
    WHERE b.partition_id = :partition AND b.rollout_id = r.rollout_id AND b.sequence_id = r.attempt_count LIMIT 1
) a ON true
{condition}
"""


ROLLOUTS: Final = HotOperation("rollouts", _rollouts)
FINISHED_ROLLOUTS: Final = HotOperation(
    "finished_rollouts", lambda given: _rollouts(given, f"WHERE r.status IN {FINISHED}")
)

STATEMENTS: Final = (
    ADD_SPANS_STRICTLY,
    ADD_SPANS_NOTED,
    *(
        statement
        for operation in (
            ENQUEUE,
            ENQUEUE_NOTED,
            CLAIM,
            CLAIM_NOTED,
            ADD_SPANS,
            NUMBER_SPANS,
            UPDATE_ATTEMPTS,
            UPDATE_HEARD_ATTEMPTS,
            ISSUE_NUMBERS,
            BEAT_WORKERS,
            ROLLOUTS,
            FINISHED_ROLLOUTS,
        )
        for statement in (operation.some, operation.one)
    ),
)
"""Every hot statement, for the tests that hold them to their plans."""
