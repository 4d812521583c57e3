"""The store's busiest operations on rows, for a service that need not make records of them.

Rows and drafts hold payloads as JSON text and texts as `lightning_sql.database.payload` encodes them, so
what a caller sent is stored, and what is stored is sent, without being parsed and written anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from lightning_sql.database.dialects.hot import (
    AttemptChange,
    RolloutDraft,
    Row,
    SpanDraft,
    SpanOutcome,
    WorkerBeat,
)
from lightning_sql.records import IdempotencyKey, RolloutStatus
from lightning_sql.store.interface import FilterLogic, SortOrder

__all__ = ["RolloutQuery", "RowPage", "RowStore", "SpanQuery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which rollouts are wanted; fields as of `LightningStore.query_rollouts`."""

    status_in: Sequence[RolloutStatus] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0
    total: bool = True
    """Whether all matches are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanQuery:
    """Which spans are wanted; fields as of `LightningStore.query_spans`."""

    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = "sequence_id"
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0
    total: bool = True
    spliced: bool = False
    """Whether the rows are only to be written as JSON: `SPLICED_SPAN_COLUMNS` instead of `SPAN_COLUMNS`."""


@dataclass(slots=True)
class RowPage:
    """A page of rows, in chunks of bounded size."""

    first: Sequence[Row]
    """The first chunk; for all but long pages the only one. Its rows may continue with other columns."""
    total: int | None
    """How many records match, before paging; None if that was not asked for."""
    rest: AsyncIterator[Sequence[Row]] | None = field(default=None)
    """The other chunks, each of one state of the database; records that were deleted meanwhile are left out."""


class RowStore(ABC):
    """Operations as of `LightningStore`, with the same errors. Nothing is validated but that identifiers exist."""

    @abstractmethod
    async def enqueue_rows(
        self, drafts: Sequence[RolloutDraft], idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Row]:
        """Queue rollouts, all or none; their rows."""

    @abstractmethod
    async def claim_rows(
        self, limit: int, worker_id: str | None, idempotency_key: IdempotencyKey | None = None, *, wait: float = 0.0
    ) -> Sequence[Row]:
        """Claim rollouts; the row of each continues with that of its attempt."""

    @abstractmethod
    async def add_span_rows(
        self, spans: Sequence[SpanDraft], *, strict: bool, idempotency_key: IdempotencyKey | None = None, part: int = 0
    ) -> Sequence[SpanOutcome]:
        """Store spans; what became of each, in order.

        A key goes with spans that are not `strict`; a call that stores them piece by piece numbers the pieces.

        Raises:
            RecordNotFoundError: `strict`, and some rollout or attempt does not exist; nothing was stored.
        """

    @abstractmethod
    async def import_span_rows(
        self, spans: Sequence[SpanDraft], unnumbered: AbstractSet[int]
    ) -> tuple[Sequence[SpanDraft], Sequence[SpanOutcome]]:
        """Store spans; those at the places of `unnumbered` get the next numbers of their rollouts, if they are new.

        The spans with their numbers, and what became of each.
        """

    @abstractmethod
    async def update_attempt_row(self, change: AttemptChange) -> Row:
        """Change an attempt; its row."""

    @abstractmethod
    async def next_number(self, rollout_id: str) -> int:
        """Issue the next span sequence number of a rollout."""

    @abstractmethod
    async def beat_worker_row(self, beat: WorkerBeat) -> Row:
        """Record a worker's heartbeat; its row."""

    @abstractmethod
    async def rollout_row(self, rollout_id: str) -> Row | None:
        """A rollout's row, which continues with that of its latest attempt, all None when there is none."""

    @abstractmethod
    async def resources_row(self, resources_id: str) -> Row | None:
        """The row of an id's resources."""

    @abstractmethod
    async def latest_resources_row(self) -> Row | None:
        """The row of the resources that were written last."""

    @abstractmethod
    async def finished_rows(self, rollout_ids: Sequence[str], timeout: float | None) -> Sequence[Row]:
        """As `wait_for_rollouts`."""

    @abstractmethod
    async def rollout_page(self, query: RolloutQuery) -> RowPage:
        """As `query_rollouts`; rows as of `rollout_row`."""

    @abstractmethod
    async def span_page(self, query: SpanQuery) -> RowPage:
        """As `query_spans`."""
