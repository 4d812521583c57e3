"""The native store's rarer writes: transactions that lock, ask `lightning_sql.lifecycle`, and write.

Functions here run on a plain connection inside a transaction (`HotPath.write`), the same code on both
dialects. Rows are locked in the order rollout, attempt, worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from sqlalchemy import Connection, Executable, Table, delete, insert, select, update

from lightning_sql import lifecycle
from lightning_sql.database.dialects.base import Dialect
from lightning_sql.database.dialects.hot import HotPath, KeyNote, Row
from lightning_sql.database.engine import lock_key
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    IDEMPOTENCY_KEYS,
    RESOURCES,
    RESOURCES_COLUMNS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    WORKERS,
    raw_columns,
)
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.identifiers import new_resources_id
from lightning_sql.records import (
    ROLLOUT_ACTIVE,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
)
from lightning_sql.store.rows import attempt_of, conditions_text, resources_of, rollout_of
from lightning_sql.store.transaction import attempted

__all__ = ["NativeTransaction", "Swept"]

SWEEP_ROWS: Final = 500
"""How many rollouts one transaction of the watchdog looks at."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one transaction of the watchdog did."""

    ended: int
    finished: Sequence[Rollout]
    more: bool
    """Whether it stopped before it had looked at everything that is due."""


class NativeTransaction:
    """One write transaction.

    `clock` gives seconds since the epoch; None asks the database after the locks. `claim_timeout` is how many
    seconds nothing need be heard of an attempt after its claim.
    """

    def __init__(
        self,
        connection: Connection,
        hot: HotPath,
        dialect: Dialect,
        partition: str,
        clock: float | None,
        claim_timeout: float | None = None,
    ) -> None:
        self._claim_timeout = claim_timeout
        self._connection = connection
        self._hot = hot
        self._dialect = dialect
        self._partition = partition
        self._clock = clock
        self._instant: float | None = None
        self.finished: list[Rollout] = []
        """The rollouts that got an outcome."""

    @property
    def now(self) -> float:
        """The time of this transaction; ask for it once its rows are locked."""
        if self._instant is None:
            if self._clock is not None:
                self._instant = self._clock
            else:
                clock = self._hot.clock()
                self._instant = time.time() if clock is None else self._connection.execute(select(clock)).scalar_one()
        return self._instant

    # Rollouts and attempts

    def start_rollout(
        self, request: EnqueueRolloutRequest, worker_id: str | None, note: KeyNote | None = None
    ) -> AttemptedRollout:
        """Create a rollout with its first attempt."""
        latest = None if request.resources_id is not None else self._latest_resources()
        latest_id = None if latest is None else latest.resources_id
        rollout = lifecycle.new_rollout(request, "preparing", latest_id, self.now)
        attempt = lifecycle.new_attempt(rollout.rollout_id, 1, worker_id, self.now)
        self._insert(
            ROLLOUTS,
            {
                "rollout_id": rollout.rollout_id,
                SEQ: self._hot.next_order(ROLLOUTS),
                "start_time": rollout.start_time,
                "attempt_count": 1,
                **_columns_of(rollout),
                **self._state_of(rollout, watch_at=self._watch_time(rollout, attempt)),
            },
        )
        self._insert_attempt(attempt)
        self._sync_worker(attempt)
        self._write_note(note, [_pair(attempt)])
        return attempted(rollout, attempt)

    def start_attempt(self, rollout_id: str, worker_id: str | None, note: KeyNote | None = None) -> AttemptedRollout:
        """Begin another attempt."""
        before, count = self._rollout(rollout_id)
        rollout = lifecycle.rollout_with_status(before, "preparing", self.now)
        attempt = lifecycle.new_attempt(rollout_id, count + 1, worker_id, self.now)
        self._update_rollout(
            rollout,
            {"attempt_count": count + 1, **self._state_of(rollout, watch_at=self._watch_time(rollout, attempt))},
        )
        self._insert_attempt(attempt)
        self._sync_worker(attempt)
        self._write_note(note, [_pair(attempt)])
        return attempted(rollout, attempt)

    def update_rollout(self, rollout_id: str, changes: Mapping[str, Any], note: KeyNote | None = None) -> Rollout:
        """Set fields of a rollout."""
        before, _ = self._rollout(rollout_id)
        self._write_note(note, [encode_text(rollout_id)])
        if not changes:
            return before
        # Validated as a whole: what a caller gives in Python is no safer than what comes over the wire.
        after = Rollout.model_validate(dict(before) | dict(changes))
        values = _columns_of(after)
        if "status" in changes:
            after = lifecycle.rollout_with_status(after, after.status, self.now)
        if "status" in changes or "config" in changes:
            # The watchdog finds out by itself when it need look again.
            values |= self._state_of(after, before, watch_at=self.now)
        self._update_rollout(after, values)
        if lifecycle.has_finished(before, after):
            self.finished.append(after)
        return after

    def _rollout(self, rollout_id: str) -> tuple[Rollout, int]:
        """A rollout, locked, and how many attempts it has had."""
        statement = (
            select(*raw_columns(ROLLOUTS, ROLLOUT_COLUMNS), ROLLOUTS.c.attempt_count)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.rollout_id == rollout_id)
            .with_for_update(key_share=True)
        )
        row = self._connection.execute(statement).one_or_none()
        if row is None:
            raise RecordNotFoundError(f"there is no rollout {rollout_id!r:.200}")
        return rollout_of(row), row.attempt_count

    def _state_of(self, rollout: Rollout, before: Rollout | None = None, *, watch_at: float | None) -> dict[str, Any]:
        """The columns that go with a rollout's status."""
        position: Any = None
        if lifecycle.is_queued(rollout.status):
            stays = before is not None and lifecycle.is_queued(before.status)
            position = ROLLOUTS.c.queue_position if stays else self._hot.next_queue_position()
        watched = rollout.status in ROLLOUT_ACTIVE and lifecycle.is_limited(rollout.config, self._claim_timeout)
        return {
            "status": rollout.status,
            "end_time": rollout.end_time,
            "queue_position": position,
            "watch_at": watch_at if watched else None,
        }

    def _update_rollout(self, rollout: Rollout, values: Mapping[str, Any]) -> None:
        self._connection.execute(
            update(ROLLOUTS)
            .where(ROLLOUTS.c[PARTITION] == self._partition, ROLLOUTS.c.rollout_id == rollout.rollout_id)
            .values(dict(values))
        )

    def _insert(self, table: Table, values: Mapping[str, Any]) -> None:
        self._connection.execute(insert(table).values({PARTITION: self._partition, **values}))

    def _insert_attempt(self, attempt: Attempt) -> None:
        self._insert(ATTEMPTS, dict(attempt))

    def _update_attempt(self, attempt: Attempt) -> None:
        self._connection.execute(
            update(ATTEMPTS)
            .where(
                ATTEMPTS.c[PARTITION] == self._partition,
                ATTEMPTS.c.rollout_id == attempt.rollout_id,
                ATTEMPTS.c.attempt_id == attempt.attempt_id,
            )
            .values(status=attempt.status, end_time=attempt.end_time)
        )

    def _sync_worker(self, attempt: Attempt) -> None:
        if not attempt.worker_id:
            return
        changes = lifecycle.worker_sync(attempt.status, attempt.rollout_id, attempt.attempt_id, self.now)
        statement = self._dialect.upsert(WORKERS).values(
            {
                PARTITION: self._partition,
                "worker_id": attempt.worker_id,
                SEQ: self._hot.next_order(WORKERS),
                **changes,
            }
        )
        upsert = statement.on_conflict_do_update(index_elements=[PARTITION, "worker_id"], set_=changes)
        self._connection.execute(cast(Executable, upsert))

    # Watchdog

    def _watch_time(self, rollout: Rollout, attempt: Attempt) -> float | None:
        config = rollout.config
        return lifecycle.watch_time(
            config.timeout_seconds,
            config.unresponsive_seconds,
            attempt.start_time,
            attempt.last_heartbeat_time,
            lifecycle.claim_limit(attempt, self._claim_timeout),
        )

    def sweep(self) -> Swept:
        """End attempts that are over their limits, and note when to look again at those that are not."""
        due = (
            select(*raw_columns(ROLLOUTS, ROLLOUT_COLUMNS), ROLLOUTS.c.attempt_count)
            .where(
                ROLLOUTS.c[PARTITION] == self._partition,
                ROLLOUTS.c.watch_at.is_not(None),
                ROLLOUTS.c.watch_at <= self.now,
            )
            .order_by(ROLLOUTS.c.watch_at)
            .limit(SWEEP_ROWS)
            .with_for_update(skip_locked=True, key_share=True)
        )
        rows = self._connection.execute(due).all()
        ended = 0
        for row in sorted(rows, key=lambda row: row[0]):
            rollout = rollout_of(row)
            attempt = self._attempt(rollout.rollout_id, row.attempt_count)
            verdict = (
                None if attempt is None else lifecycle.expired_status(rollout, attempt, self.now, self._claim_timeout)
            )
            if attempt is None or verdict is None:
                self._update_rollout(
                    rollout, {"watch_at": None if attempt is None else self._watch_time(rollout, attempt)}
                )
                continue
            ended += 1
            expired = lifecycle.attempt_with_status(attempt, verdict, self.now)
            after = lifecycle.rollout_after_attempt(rollout, expired, self.now, self._claim_timeout)
            self._update_attempt(expired)
            self._update_rollout(after, self._state_of(after, rollout, watch_at=None))
            self._sync_worker(expired)
            if lifecycle.has_finished(rollout, after):
                self.finished.append(after)
        return Swept(ended, self.finished, len(rows) == SWEEP_ROWS)

    def _attempt(self, rollout_id: str, sequence_id: int) -> Attempt | None:
        statement = (
            select(*raw_columns(ATTEMPTS, ATTEMPT_COLUMNS))
            .where(
                ATTEMPTS.c[PARTITION] == self._partition,
                ATTEMPTS.c.rollout_id == rollout_id,
                ATTEMPTS.c.sequence_id == sequence_id,
            )
            .with_for_update(key_share=True)
        )
        row = self._connection.execute(statement).one_or_none()
        return None if row is None else attempt_of(row)

    # Idempotency keys

    def _write_note(self, note: KeyNote | None, ids: Sequence[Any]) -> None:
        """Write down what was done under a key, in the form in which ids are stored."""
        if note is not None:
            texts = {name: decode_text(getattr(note, name)) for name in ("key", "route", "fingerprint")}
            self._insert(IDEMPOTENCY_KEYS, {**texts, "part": note.part, "ids": json.dumps(ids), "time": self.now})

    def forget_keys(self, seconds: float, most: int) -> int:
        """Remove up to `most` of the keys that are older than that; how many there were."""
        keys = IDEMPOTENCY_KEYS.c
        old = (
            select(keys.key)
            .where(keys[PARTITION] == self._partition, keys.time < self.now - seconds)
            .order_by(keys.time)
            .limit(most)
            # Of several servers each takes others.
            .with_for_update(skip_locked=True)
        )
        found = list(dict.fromkeys(self._connection.scalars(old)))
        if found:
            # All parts of a call go together: without the first one a repeat would do it again.
            self._connection.execute(
                delete(IDEMPOTENCY_KEYS).where(keys[PARTITION] == self._partition, keys.key.in_(found))
            )
        return len(found)

    # Resources

    def write_resources(
        self, resources_id: str | None, resources: NamedResources, note: KeyNote | None = None
    ) -> ResourcesUpdate:
        """Replace the resources of an id, or create them, under a new id for None."""
        written = self._written_resources(resources_id, resources)
        self._write_note(note, [encode_text(written.resources_id)])
        return written

    def _written_resources(self, resources_id: str | None, resources: NamedResources) -> ResourcesUpdate:
        # "Latest" is the order of writes, so writes must have one.
        lock = self._dialect.lock([lock_key(self._partition, "resources")])
        if lock is not None:
            self._connection.execute(lock)
        latest = self._latest_resources()
        current = None if resources_id is None else self._resources(resources_id)
        if current is None:
            written = lifecycle.new_resources(
                new_resources_id() if resources_id is None else resources_id, resources, self.now, latest
            )
            self._insert(
                RESOURCES, {SEQ: self._hot.next_order(RESOURCES), **dict(written), "resources": _plain(resources)}
            )
            return written
        written = lifecycle.next_resources(current, resources, self.now, latest)
        self._connection.execute(
            update(RESOURCES)
            .where(RESOURCES.c[PARTITION] == self._partition, RESOURCES.c.resources_id == resources_id)
            .values(update_time=written.update_time, version=written.version, resources=_plain(resources))
        )
        return written

    def _resources(self, resources_id: str) -> ResourcesUpdate | None:
        return self._one_resources(RESOURCES.c.resources_id == resources_id)

    def _latest_resources(self) -> ResourcesUpdate | None:
        return self._one_resources()

    def _one_resources(self, *conditions: Any) -> ResourcesUpdate | None:
        statement = (
            select(*raw_columns(RESOURCES, RESOURCES_COLUMNS))
            .where(RESOURCES.c[PARTITION] == self._partition, *conditions)
            .order_by(RESOURCES.c.update_time.desc())
            .limit(1)
        )
        row: Row | None = self._connection.execute(statement).one_or_none()
        return None if row is None else resources_of(row)


def _pair(attempt: Attempt) -> tuple[str, str]:
    return encode_text(attempt.rollout_id), encode_text(attempt.attempt_id)


def _columns_of(rollout: Rollout) -> dict[str, Any]:
    """The columns that a caller sets, whatever the rollout's status."""
    return {
        "input": rollout.input,
        "mode": rollout.mode,
        "resources_id": rollout.resources_id,
        "timeout_seconds": rollout.config.timeout_seconds,
        "unresponsive_seconds": rollout.config.unresponsive_seconds,
        "max_attempts": rollout.config.max_attempts,
        "retry_condition": conditions_text(tuple(rollout.config.retry_condition)),
        "metadata": rollout.metadata,
    }


def _plain(resources: NamedResources) -> dict[str, Any]:
    return {name: dict(resource) for name, resource in resources.items()}
