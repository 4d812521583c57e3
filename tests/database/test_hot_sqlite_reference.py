"""SQLite's hot operations, and cold ones between them, store and answer what `CollectionStore` on memory does."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import update

from lightning_sql import lifecycle
from lightning_sql.collections.memory import MemoryCollections
from lightning_sql.database.dialects.hot import HotPath, SpanOutcome, WorkerBeat
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SPAN_COLUMNS,
    SPAN_SEQUENCES,
    SPANS,
    WORKER_COLUMNS,
    WORKERS,
)
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import (
    ROLLOUT_ACTIVE,
    Attempt,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.rows import (
    attempt_of,
    rollout_draft,
    rollout_of,
    span_draft,
    span_of,
    stored_payload,
    worker_of,
)
from lightning_sql.testing.samples import assert_same, make_span
from tests.database.hot_sqlite import (
    NOW,
    batch,
    change,
    claim,
    create,
    path_to,
    queued,
    stored,
)

pytestmark = pytest.mark.slow


@pytest.fixture
async def hot(tmp_path: Path) -> AsyncIterator[HotPath]:
    hot = path_to(create(tmp_path / "hot.db"))
    yield hot
    await hot.close()


class Pair:
    """A store on memory that works step by step, and the hot path: both get the same calls at the same time."""

    def __init__(self, hot: HotPath, random: Random) -> None:
        self.hot = hot
        self.random = random
        self.now = NOW  # in whole seconds at first, which SQLite keeps as integers
        self.reference = CollectionStore(MemoryCollections(clock=lambda: self.now), scan_debounce_seconds=math.inf)
        self.attempts: list[tuple[str, str]] = []
        self.rollouts: list[str] = []
        self.spans = 0

    async def enqueue(self) -> None:
        requests = [
            EnqueueRolloutRequest(
                input=self.random.choice([None, 1, "x"]),
                config=RolloutConfig(
                    timeout_seconds=self.random.choice([None, 5.0, math.inf]),
                    unresponsive_seconds=self.random.choice([None, 3.0]),
                    max_attempts=self.random.randint(1, 3),
                    retry_condition=self.random.sample(["failed", "timeout", "unresponsive"], 2),
                ),
            )
            for _ in range(self.random.randint(1, 3))
        ]
        created = await self.reference.enqueue_many_rollouts(requests)
        drafts = [
            rollout_draft(request)._replace(rollout_id=rollout.rollout_id)
            for request, rollout in zip(requests, created, strict=True)
        ]
        await self.hot.enqueue(drafts, self.now)
        self.rollouts += [rollout.rollout_id for rollout in created]

    async def claim(self) -> None:
        workers = self.random.sample(["w1", "w2", "w3", None, ""], self.random.randint(1, 3))
        claims = []
        expected = []
        for worker in workers:
            limit = self.random.randint(1, 2)
            claimed = await self.reference.dequeue_many_rollouts(limit=limit, worker_id=worker)
            ids = [rollout.attempt.attempt_id for rollout in claimed]
            self.attempts += [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in claimed]
            claims.append(claim(*ids, *(f"unused {number}" for number in range(limit - len(ids))), worker=worker))
            expected.append([(Rollout(**dict(rollout)), rollout.attempt) for rollout in claimed])
        _, answers = await self.hot.claim(claims, self.now)
        assert_same(
            [[rollout_of(row) for row in rows] for rows in answers],
            [[rollout for rollout, _ in claimed] for claimed in expected],
        )
        assert [[tuple(row[-2:]) for row in rows] for rows in answers] == [
            [(attempt.attempt_id, attempt.sequence_id) for _, attempt in claimed] for claimed in expected
        ]

    async def add_spans(self) -> None:
        batches = []
        expected: list[list[Any] | None] = []
        keys: set[Any] = set()
        for _ in range(self.random.randint(1, 3)):
            spans = []
            for _ in range(self.random.randint(1, 4)):
                unknown = self.random.random() < 0.1
                rollout_id, attempt_id = ("no", "body") if unknown else self.random.choice(self.attempts)
                span_id = str(self.random.randint(0, self.spans) if self.random.random() < 0.3 else self.spans)
                self.spans += 1
                if (rollout_id, attempt_id, span_id) in keys:
                    continue
                keys.add((rollout_id, attempt_id, span_id))
                spans.append(make_span(rollout_id, attempt_id, span_id, self.random.randint(0, 9)))
            strict = self.random.random() < 0.5
            batches.append(batch(*map(span_draft, spans), strict=strict))
            if strict:
                try:
                    found = await self.reference.add_many_spans(spans)
                except RecordNotFoundError:
                    expected.append(None)
                    continue
            else:
                found = (await self.reference.import_spans(spans)).stored
            expected.append([span.span_id for span in found])
        answers = await self.hot.add_spans(batches, self.now)
        for given, outcomes, wanted in zip(batches, answers, expected, strict=True):
            new = [
                span.span_id
                for span, outcome in zip(given.spans, outcomes, strict=True)
                if outcome is SpanOutcome.STORED
            ]
            assert new == (wanted or [])
            assert (SpanOutcome.UNKNOWN in outcomes and given.strict) == (wanted is None)

    async def update_attempts(self) -> None:
        chosen = dict(self.random.sample(self.attempts, min(len(self.attempts), self.random.randint(1, 3))))
        changes = []
        expected = []
        for rollout_id, attempt_id in chosen.items():
            fields: dict[str, Any] = {}
            if self.random.random() < 0.7:
                fields["status"] = self.random.choice(
                    ["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
                )
            if self.random.random() < 0.3:
                fields["worker_id"] = self.random.choice(["w1", "w4", ""])
            if self.random.random() < 0.3:
                fields["last_heartbeat_time"] = self.now - self.random.randint(0, 3)
            if self.random.random() < 0.3:
                fields["metadata"] = {"n": self.random.randint(0, 9)}
            latest = self.random.random() < 0.5
            expected.append(
                await self.reference.update_attempt(rollout_id, "latest" if latest else attempt_id, **fields)
            )
            values = fields | ({"metadata": stored_payload(fields["metadata"])} if "metadata" in fields else {})
            changes.append(change(rollout_id, None if latest else attempt_id, **values))
        answers = await self.hot.update_attempts(changes, self.now)
        assert_same([attempt_of(answer.attempt) for answer in answers if answer is not None], expected)
        for answer, attempt in zip(answers, expected, strict=True):
            rollout = await self.reference.get_rollout_by_id(attempt.rollout_id)
            assert answer is not None
            assert rollout is not None
            assert answer.rollout_status == rollout.status

    async def issue_numbers(self) -> None:
        counts = {rollout_id: self.random.randint(1, 3) for rollout_id in self.random.sample(self.rollouts, 1)}
        wanted = [(rollout_id, "") for rollout_id, count in counts.items() for _ in range(count)]
        issued = await self.reference.get_many_span_sequence_ids(wanted)
        assert list((await self.hot.issue_numbers(counts)).values()) == [max(issued)]

    async def beat_workers(self) -> None:
        beats = []
        expected = []
        for worker_id in self.random.sample(["w1", "w2", "w5"], 2):
            stats = self.random.choice([None, {}, {"cpu": 1}])
            expected.append(
                await self.reference.update_worker(worker_id, **({} if stats is None else {"heartbeat_stats": stats}))
            )
            beats.append(WorkerBeat(worker_id, stored_payload(stats)))
        assert_same([worker_of(row) for row in await self.hot.beat_workers(beats, self.now)], expected)

    async def set_status(self) -> None:
        """A rarer operation, which leads where the hot ones do not."""
        rollout_id = self.random.choice(self.rollouts)
        status: RolloutStatus = self.random.choice(["cancelled", "queuing", "requeuing", "running", "failed"])
        before = await self.reference.get_rollout_by_id(rollout_id)
        after = await self.reference.update_rollout(rollout_id, status=status)
        assert before is not None
        position: Any = None
        if lifecycle.is_queued(status):
            position = ROLLOUTS.c.queue_position
            if not lifecycle.is_queued(before.status):
                position = self.hot.next_queue_position()
        watched = status in ROLLOUT_ACTIVE and lifecycle.is_limited(after.config)
        statement = (
            update(ROLLOUTS)
            .where(ROLLOUTS.c[PARTITION] == "p", ROLLOUTS.c.rollout_id == rollout_id)
            .values(
                status=status,
                end_time=after.end_time,
                queue_position=position,
                watch_at=self.now if watched else None,
            )
        )
        await self.hot.write(lambda connection: connection.execute(statement).close())

    async def compare(self) -> None:
        collections = self.reference.collections
        attempts = [attempt_of(row) for row in await stored(self.hot, ATTEMPTS, *ATTEMPT_COLUMNS)]
        for mine, theirs in (
            (
                [rollout_of(row) for row in await stored(self.hot, ROLLOUTS, *ROLLOUT_COLUMNS, order=SEQ)],
                [Rollout(**dict(rollout)) for rollout in (await collections.rollouts.query()).items],
            ),
            (attempts, (await collections.attempts.query()).items),
            (
                [span_of(row) for row in await stored(self.hot, SPANS, *SPAN_COLUMNS, order=SEQ)],
                (await collections.spans.query()).items,
            ),
            (
                [worker_of(row) for row in await stored(self.hot, WORKERS, *WORKER_COLUMNS, order=SEQ)],
                (await collections.workers.query()).items,
            ),
        ):
            assert_same(mine, list(theirs))
        assert await queued(self.hot) == list(await collections.rollout_queue.peek(10_000))
        numbers = dict(await stored(self.hot, SPAN_SEQUENCES, "rollout_id", "value"))
        for rollout_id in self.rollouts:
            assert numbers.get(rollout_id, 0) == (await collections.span_sequence_ids.get(rollout_id) or 0)
        await self._check_watches({(attempt.rollout_id, attempt.sequence_id): attempt for attempt in attempts})

    async def _check_watches(self, attempts: dict[tuple[str, int], Attempt]) -> None:
        """`watch_at` never comes too late, and is set only where there is something to look at."""
        rows = await stored(self.hot, ROLLOUTS, *ROLLOUT_COLUMNS, "attempt_count", "watch_at", order=SEQ)
        for row in rows:
            rollout, (count, watch_at) = rollout_of(row), row[-2:]
            assert count == max((number for name, number in attempts if name == rollout.rollout_id), default=0)
            if rollout.status not in ROLLOUT_ACTIVE or not lifecycle.is_limited(rollout.config):
                assert watch_at is None
            elif count:
                attempt = attempts[rollout.rollout_id, count]
                due = lifecycle.watch_time(
                    rollout.config.timeout_seconds,
                    rollout.config.unresponsive_seconds,
                    attempt.start_time,
                    attempt.last_heartbeat_time,
                )
                assert due is not None
                assert watch_at <= max(due, self.now)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))])
async def test_the_reference_agrees(hot: HotPath, seed: int) -> None:
    pair = Pair(hot, Random(seed))
    await pair.enqueue()
    await pair.claim()
    operations = [
        pair.enqueue,
        pair.claim,
        pair.claim,
        pair.add_spans,
        pair.add_spans,
        pair.update_attempts,
        pair.update_attempts,
        pair.issue_numbers,
        pair.beat_workers,
        pair.set_status,
    ]
    for _ in range(60):
        pair.now += pair.random.choice([0, 1, pair.random.random()])
        await pair.random.choice(operations)()
        await pair.compare()
    await pair.reference.close()
