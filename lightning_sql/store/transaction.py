"""One write transaction of a store over its collections: the steps that operations are made of.

Every step keeps the laws that tie records together: a rollout stands in the queue exactly while its
status says so, attempts are numbered without gap, a worker follows its attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from lightning_sql import lifecycle
from lightning_sql.collections.protocols import LightningCollections
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.metrics import Metric
from lightning_sql.records import Attempt, AttemptedRollout, Rollout, Worker

__all__ = ["LATEST", "StoreTransaction", "attempted", "latest_attempts", "latest_of", "rollout_or_error"]

LATEST: Final = "latest"
"""Stands for the id of the attempt with the highest number."""


def attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """The rollout together with an attempt of it."""
    values = {name: getattr(rollout, name) for name in Rollout.model_fields}
    return AttemptedRollout.model_construct(**values, attempt=attempt)


async def latest_attempts(collections: LightningCollections, rollout_ids: Collection[str]) -> dict[str, Attempt]:
    """The attempt with the highest number, by rollout id; rollouts without one are left out."""
    if not rollout_ids:
        return {}
    page = await collections.attempts.query({"rollout_id": {"within": rollout_ids}})
    return latest_of(page.items)


def latest_of(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """Of these attempts the one with the highest number, by rollout id."""
    latest: dict[str, Attempt] = {}
    for attempt in attempts:
        known = latest.get(attempt.rollout_id)
        if known is None or attempt.sequence_id > known.sequence_id:
            latest[attempt.rollout_id] = attempt
    return latest


async def rollout_or_error(collections: LightningCollections, rollout_id: str) -> Rollout:
    """The rollout.

    Raises:
        RecordNotFoundError: there is none of this id.
    """
    rollout = await collections.rollouts.get({"rollout_id": {"exact": rollout_id}})
    if rollout is None:
        raise RecordNotFoundError(f"there is no rollout {rollout_id!r:.200}")
    return rollout


class StoreTransaction:
    """The steps, all at one instant `now` (seconds since the epoch)."""

    def __init__(self, collections: LightningCollections, now: float, claim_timeout: float | None = None) -> None:
        self.collections = collections
        self.claim_timeout = claim_timeout
        self.now = now
        self.finished: list[Rollout] = []
        """The rollouts that got an outcome, for whoever wakes their waiters and counts them after the commit."""
        self.counts: Counter[Metric] = Counter()
        """What else there is to count after the commit."""

    async def save_rollouts(self, changes: Iterable[tuple[Rollout, Rollout]], fields: Sequence[str]) -> None:
        """Write the named fields of rollouts, given before and after, and keep the queue in step with their status."""
        changed = [(before, after) for before, after in changes if before is not after]
        if not changed:
            return
        await self.collections.rollouts.update([after for _, after in changed], update_fields=fields)
        was = {before.rollout_id for before, _ in changed if lifecycle.is_queued(before.status)}
        now = {after.rollout_id for _, after in changed if lifecycle.is_queued(after.status)}
        if left := [after.rollout_id for _, after in changed if after.rollout_id in was - now]:
            await self.collections.rollout_queue.discard(left)
        if entered := [after.rollout_id for _, after in changed if after.rollout_id in now - was]:
            await self.collections.rollout_queue.enqueue(entered)
        self.finished += [after for before, after in changed if lifecycle.has_finished(before, after)]

    async def save_status(self, changes: Iterable[tuple[Rollout, Rollout]]) -> None:
        """Write rollouts of which only the status, and with it the end time, may have changed."""
        await self.save_rollouts(changes, ["status", "end_time"])

    async def take_from_queue(self, limit: int) -> list[Rollout]:
        """Take up to `limit` rollouts from the front of the queue; entries that are stale are dropped on the way."""
        taken: dict[str, Rollout] = {}
        while len(taken) < limit:
            ids = await self.collections.rollout_queue.dequeue(limit - len(taken))
            if not ids:
                break
            page = await self.collections.rollouts.query({"rollout_id": {"within": ids}})
            found = {rollout.rollout_id: rollout for rollout in page.items}
            for rollout_id in ids:
                rollout = found.get(rollout_id)
                if rollout is not None and lifecycle.is_queued(rollout.status):
                    taken.setdefault(rollout_id, rollout)
        return list(taken.values())

    async def begin_attempts(self, rollouts: Sequence[Rollout], worker_id: str | None) -> list[AttemptedRollout]:
        """Give each rollout its next attempt, which makes it `preparing`. The worker is not touched."""
        latest = await latest_attempts(self.collections, [rollout.rollout_id for rollout in rollouts])
        begun: list[tuple[Rollout, Rollout, Attempt]] = []
        for rollout in rollouts:
            previous = latest.get(rollout.rollout_id)
            sequence_id = 1 if previous is None else previous.sequence_id + 1
            attempt = lifecycle.new_attempt(rollout.rollout_id, sequence_id, worker_id, self.now)
            begun.append((rollout, lifecycle.rollout_with_status(rollout, "preparing", self.now), attempt))
        await self.collections.attempts.insert([attempt for _, _, attempt in begun])
        await self.save_status((before, after) for before, after, _ in begun)
        return [attempted(after, attempt) for _, after, attempt in begun]

    async def issue_span_numbers(self, rollout_ids: Sequence[str]) -> list[int]:
        """The next sequence number of each rollout, in order; one that is named twice gets two."""
        counters = self.collections.span_sequence_ids
        wanted = Counter(rollout_ids)
        last = {rollout_id: await counters.inc(rollout_id, count) - count for rollout_id, count in wanted.items()}
        numbers: list[int] = []
        for rollout_id in rollout_ids:
            last[rollout_id] += 1
            numbers.append(last[rollout_id])
        return numbers

    async def save_attempt(self, attempt: Attempt, *, latest: bool, rollout: Rollout, sync_worker: bool) -> None:
        """Write a changed attempt, and what follows for its rollout and, if asked, for its worker."""
        await self.collections.attempts.update([attempt])
        if latest:
            after = lifecycle.rollout_after_attempt(rollout, attempt, self.now, self.claim_timeout)
            await self.save_status([(rollout, after)])
        if sync_worker:
            await self.sync_worker(attempt)

    async def sync_worker(self, attempt: Attempt) -> None:
        """Let the worker of an attempt, if it has one, follow the attempt."""
        if attempt.worker_id:
            worker = await self.worker(attempt.worker_id)
            await self.collections.workers.upsert([lifecycle.worker_after_attempt(worker, attempt, self.now)])

    async def worker(self, worker_id: str) -> Worker:
        """The worker, made up if it was never heard of; not written yet."""
        known = await self.collections.workers.get({"worker_id": {"exact": worker_id}})
        return Worker(worker_id=worker_id) if known is None else known
