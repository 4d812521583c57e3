"""Storing spans: which are new, what numbers they get, whose heartbeat they are."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lightning_sql import lifecycle
from lightning_sql.records import Attempt, Rollout, Span
from lightning_sql.store.transaction import StoreTransaction, latest_of

__all__ = ["SpanImport"]

SpanKey = tuple[str, str, str]


def _key(span: Span) -> SpanKey:
    return span.rollout_id, span.attempt_id, span.span_id


@dataclass(slots=True)
class SpanImport:
    """Spans on their way into a store, sorted out but not yet written."""

    transaction: StoreTransaction
    fresh: list[Span]
    """Spans of known attempts that are not stored yet; of equal ones the first."""
    unnumbered: set[int]
    """Which of `fresh`, by index, need a sequence number."""
    duplicates: int
    rejected: list[Span]
    """Spans whose rollout or attempt does not exist."""
    rollouts: dict[str, Rollout]
    attempts: dict[tuple[str, str], Attempt]

    @classmethod
    async def prepare(
        cls, transaction: StoreTransaction, spans: Sequence[Span], unnumbered: AbstractSet[int] = frozenset()
    ) -> SpanImport:
        """Look up what the spans belong to, and which of them are stored already."""
        collections = transaction.collections
        rollout_ids = list(dict.fromkeys(span.rollout_id for span in spans))
        attempt_ids = list(dict.fromkeys(span.attempt_id for span in spans))
        in_rollouts = {"rollout_id": {"within": rollout_ids}}
        rollouts = {rollout.rollout_id: rollout for rollout in (await collections.rollouts.query(in_rollouts)).items}
        # All attempts of the rollouts, not only those that were named: which one is the latest decides too.
        attempts = {
            (attempt.rollout_id, attempt.attempt_id): attempt
            for attempt in (await collections.attempts.query(in_rollouts)).items
        }
        stored = await collections.spans.query(
            in_rollouts
            | {
                "attempt_id": {"within": attempt_ids},
                "span_id": {"within": list(dict.fromkeys(span.span_id for span in spans))},
            }
        )
        seen = {_key(span) for span in stored.items}
        work = cls(transaction, [], set(), 0, [], rollouts, attempts)
        for index, span in enumerate(spans):
            if span.rollout_id not in rollouts or (span.rollout_id, span.attempt_id) not in attempts:
                work.rejected.append(span)
            elif _key(span) in seen:
                work.duplicates += 1
            else:
                seen.add(_key(span))
                if index in unnumbered:
                    work.unnumbered.add(len(work.fresh))
                work.fresh.append(span)
        return work

    async def store(self) -> list[Span]:
        """Write the new spans with their numbers and heartbeats; they are what is returned."""
        if not self.fresh:
            return []
        await self._number()
        await self.transaction.collections.spans.insert(self.fresh)
        await self._beat()
        return self.fresh

    async def _number(self) -> None:
        places = sorted(self.unnumbered)
        numbers = await self.transaction.issue_span_numbers([self.fresh[index].rollout_id for index in places])
        for index, number in zip(places, numbers, strict=True):
            self.fresh[index] = self.fresh[index].model_copy(update={"sequence_id": number})
        highest: dict[str, int] = {}
        for span in self.fresh:
            highest[span.rollout_id] = max(span.sequence_id, highest.get(span.rollout_id, 0))
        for rollout_id in sorted(highest):
            await self.transaction.collections.span_sequence_ids.chmax(rollout_id, highest[rollout_id])

    async def _beat(self) -> None:
        now = self.transaction.now
        beaten = {
            key: lifecycle.attempt_after_heartbeat(self.attempts[key], now)
            for key in dict.fromkeys((span.rollout_id, span.attempt_id) for span in self.fresh)
        }
        await self.transaction.collections.attempts.update(
            list(beaten.values()), update_fields=["last_heartbeat_time", "status"]
        )
        latest = latest_of(self.attempts.values())
        await self.transaction.save_status(
            (rollout, lifecycle.rollout_after_heartbeat(rollout, attempt, now))
            for (rollout_id, attempt_id), attempt in beaten.items()
            if latest[rollout_id].attempt_id == attempt_id
            for rollout in [self.rollouts[rollout_id]]
        )
