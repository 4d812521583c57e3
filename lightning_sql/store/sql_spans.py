"""The native store's spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from typing_extensions import override

from lightning_sql.database.dialects.hot import KeyNote, SpanBatch, SpanDraft, SpanKey, SpanOutcome
from lightning_sql.database.payload import decode_text, encode_text
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import IdempotencyKey, Span
from lightning_sql.store.idempotency import note_of, once
from lightning_sql.store.interface import SpanReceipt, check_import
from lightning_sql.store.rows import span_draft
from lightning_sql.store.sql_lanes import each_once
from lightning_sql.store.sql_reads import SqlReads

__all__ = ["SqlSpans"]


class SqlSpans(SqlReads):
    """The half of `SqlStore` that stores spans and issues their numbers."""

    @override
    async def add_span_rows(
        self, spans: Sequence[SpanDraft], *, strict: bool, idempotency_key: IdempotencyKey | None = None, part: int = 0
    ) -> Sequence[SpanOutcome]:
        if not spans:
            return []
        batch, spread = each_once(spans)
        if idempotency_key is not None:
            return spread(await self._store_once(batch, note_of(idempotency_key, part)))
        outcomes = await self._lanes.spans(SpanBatch(batch, strict))
        if strict and SpanOutcome.UNKNOWN in outcomes:
            lost = batch[outcomes.index(SpanOutcome.UNKNOWN)]
            raise RecordNotFoundError(
                f"there is no attempt {decode_text(lost.attempt_id)!r:.200} "
                f"of a rollout {decode_text(lost.rollout_id)!r:.200}"
            )
        return spread(outcomes)

    async def _store_once(self, batch: Sequence[SpanDraft], note: KeyNote) -> Sequence[SpanOutcome]:
        lanes = self._lanes

        async def recall(outcomes: str) -> Sequence[SpanOutcome]:
            return [SpanOutcome(int(outcome)) for outcome in outcomes]

        return await once(lanes, note, lambda: lanes.spans(SpanBatch(batch, False, note)), recall)

    @override
    async def add_span(self, span: Span) -> Span | None:
        stored = await self.add_many_spans([span])
        return stored[0] if stored else None

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        outcomes = await self.add_span_rows([span_draft(span) for span in spans], strict=True)
        return [span for span, outcome in zip(spans, outcomes, strict=True) if outcome is SpanOutcome.STORED]

    @override
    async def import_spans(
        self,
        spans: Sequence[Span],
        *,
        unnumbered: AbstractSet[int] = frozenset(),
        idempotency_key: IdempotencyKey | None = None,
    ) -> SpanReceipt:
        check_import(unnumbered, idempotency_key)
        drafts = [span_draft(span) for span in spans]
        if unnumbered:
            drafts, outcomes = await self.import_span_rows(drafts, unnumbered)
        else:
            outcomes = await self.add_span_rows(drafts, strict=False, idempotency_key=idempotency_key)
        stored: list[Span] = []
        for span, draft, outcome in zip(spans, drafts, outcomes, strict=True):
            if outcome is SpanOutcome.STORED:
                number = draft.sequence_id
                stored.append(span if span.sequence_id == number else span.model_copy(update={"sequence_id": number}))
        return SpanReceipt(
            stored,
            sum(outcome is SpanOutcome.DUPLICATE for outcome in outcomes),
            [span for span, outcome in zip(spans, outcomes, strict=True) if outcome is SpanOutcome.UNKNOWN],
        )

    @override
    async def import_span_rows(
        self, spans: Sequence[SpanDraft], unnumbered: AbstractSet[int]
    ) -> tuple[Sequence[SpanDraft], Sequence[SpanOutcome]]:
        numbered = await self._numbered(spans, unnumbered)
        return numbered, await self.add_span_rows(numbered, strict=False)

    async def _numbered(self, spans: Sequence[SpanDraft], unnumbered: AbstractSet[int]) -> Sequence[SpanDraft]:
        """The spans, those without a number that can be stored as new with the next ones of their rollout.

        Numbers are issued before the spans are stored, so a span that turns out to be stored by somebody
        else leaves a gap, which is allowed.
        """
        first: dict[SpanKey, int] = {}
        for index, span in enumerate(spans):
            first.setdefault((span.rollout_id, span.attempt_id, span.span_id), index)
        wanted = {key: index for key, index in first.items() if index in unnumbered}
        if not wanted:
            return spans
        answer = list(spans)
        for index, number in zip(wanted.values(), await self._lanes.numbered(list(wanted)), strict=True):
            if number is not None:
                answer[index] = spans[index]._replace(sequence_id=number)
        return answer

    @override
    async def next_number(self, rollout_id: str) -> int:
        key = encode_text(rollout_id)
        return (await self._lanes.numbers({key: 1}))[key]

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self.next_number(rollout_id)

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not rollout_attempt_ids:
            return []
        keys = [encode_text(rollout_id) for rollout_id, _ in rollout_attempt_ids]
        counts = Counter(keys)
        last = await self._lanes.numbers(counts)
        following = {key: last[key] - count for key, count in counts.items()}
        numbers: list[int] = []
        for key in keys:
            following[key] += 1
            numbers.append(following[key])
        return numbers
