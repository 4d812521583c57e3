"""What requests carry, beyond the records themselves."""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from lightning_sql.errors import InvalidRequestError
from lightning_sql.records import (
    UNSET,
    AttemptStatus,
    EnqueueRolloutRequest,
    Identifier,
    PaginatedResult,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Seconds,
    Span,
    WorkerStatus,
)
from lightning_sql.store.interface import FilterLogic, SortOrder

__all__ = [
    "AttemptQuery",
    "AttemptUpdate",
    "DequeueRequest",
    "DuplicateSpan",
    "EnqueueRequest",
    "Listing",
    "NextSequenceRequest",
    "Page",
    "RejectedSpan",
    "ResourcesQuery",
    "RolloutListing",
    "RolloutQuery",
    "RolloutUpdate",
    "SequenceNumber",
    "SpanList",
    "SpanListing",
    "SpanQuery",
    "SpansReceipt",
    "StartAttemptRequest",
    "StartRolloutRequest",
    "Statistics",
    "StoredSpan",
    "WaitRequest",
    "WorkerQuery",
    "WorkerUpdate",
    "changes_of",
]

T = TypeVar("T")

_LARGEST_WINDOW: Final = 2**62
"""No store has more rows; a larger number would not fit a statement's parameter."""


class EnqueueRequest(BaseModel):
    """Rollouts to queue, all or none."""

    rollouts: list[EnqueueRolloutRequest]


class DequeueRequest(BaseModel):
    """How many rollouts to claim, for whom, and how many seconds to wait while the queue is empty."""

    limit: int = 1
    worker_id: Identifier | None = None
    wait: Seconds | None = None


class StartRolloutRequest(EnqueueRolloutRequest):
    """A rollout that is worked on at once."""

    worker_id: Identifier | None = None


class StartAttemptRequest(BaseModel):
    """Who works on the new attempt."""

    worker_id: Identifier | None = None


class RolloutUpdate(BaseModel):
    """Changes of a rollout; an absent field stays as it is."""

    input: Any = None
    mode: RolloutMode | None = None
    resources_id: Identifier | None = None
    status: RolloutStatus | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class AttemptUpdate(BaseModel):
    """Changes of an attempt; an absent field stays as it is."""

    status: AttemptStatus | None = None
    worker_id: Identifier | None = None
    last_heartbeat_time: Seconds | None = None
    metadata: dict[str, Any] | None = None


class WorkerUpdate(BaseModel):
    """A worker's heartbeat, perhaps with what it measured of itself."""

    heartbeat_stats: dict[str, Any] | None = None


class NextSequenceRequest(BaseModel):
    """The attempt whose next span wants a number."""

    rollout_id: Identifier
    attempt_id: Identifier


class SequenceNumber(BaseModel):
    """The number issued."""

    sequence_id: int


class Statistics(BaseModel):
    """Counts of everything stored; a store may count more."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    """Seconds since this process opened the store."""


class WaitRequest(BaseModel):
    """What to wait for, and how many seconds at most; null waits without limit."""

    rollout_ids: list[str]
    timeout: Seconds | None = None


class Page(BaseModel):
    """Which part of a list is wanted, in which order."""

    sort_by: str | None = None
    """A field of the listed records."""
    sort_order: SortOrder = "asc"
    limit: int = -1
    """At least 1, or -1 for no limit."""
    offset: int = 0

    def ordering(self) -> dict[str, Any]:
        """Sorting and paging, as the store's queries take them."""
        return {
            "sort_by": self.sort_by,
            "sort_order": self.sort_order,
            "limit": min(self.limit, _LARGEST_WINDOW),
            "offset": min(self.offset, _LARGEST_WINDOW),
        }

    def as_requested(self, page: PaginatedResult[T]) -> PaginatedResult[T]:
        """A page that repeats the numbers of this request."""
        page.limit, page.offset = self.limit, self.offset
        return page


class RolloutQuery(Page):
    """Filters of rollouts."""

    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None
    filter_logic: FilterLogic = "and"


class RolloutListing(RolloutQuery):
    """Filters of rollouts, and whether all that match are counted."""

    total: bool = True


class AttemptQuery(Page):
    """How to list attempts: by their number, unless another order is asked for."""

    sort_by: str | None = "sequence_id"


class SpanQuery(Page):
    """Filters of spans; `attempt_id` may be `latest`."""

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


class SpanListing(SpanQuery):
    """Filters of spans, and whether all that match are counted."""

    total: bool = True


class Listing(BaseModel, Generic[T]):
    """A page of records."""

    items: list[T]
    limit: int
    """As requested; -1 is unlimited."""
    offset: int
    total: int | None
    """How many records match, before paging; null if they were not counted."""


class SpanList(BaseModel):
    """Spans of any attempts."""

    spans: list[Span]
    unnumbered: list[int] = []
    """The places, from 0 on, of those that get the next numbers of their rollout instead of their own."""


class StoredSpan(BaseModel):
    """The span is stored."""

    status: Literal["stored"]
    sequence_id: int


class DuplicateSpan(BaseModel):
    """The span was stored before; it stays as it was."""

    status: Literal["duplicate"]


class RejectedSpan(BaseModel):
    """The span does not fit its schema, or there is no such attempt."""

    status: Literal["rejected"]
    reason: str


SpanResult: TypeAlias = Annotated[StoredSpan | DuplicateSpan | RejectedSpan, Field(discriminator="status")]


class SpansReceipt(BaseModel):
    """What became of each of some spans, in their order."""

    results: list[SpanResult]
    stored: int
    duplicates: int
    rejected: int


class ResourcesQuery(Page):
    """Filters of resources; all must hold."""

    resources_id: str | None = None
    resources_id_contains: str | None = None


class WorkerQuery(Page):
    """Filters of workers."""

    status_in: list[WorkerStatus] | None = None
    worker_id_contains: str | None = None
    filter_logic: FilterLogic = "and"


def changes_of(update: BaseModel, not_null: frozenset[str]) -> dict[str, Any]:
    """The fields that a request carries, and `UNSET` for those it does not.

    Raises:
        InvalidRequestError: one of `not_null` is null.
    """
    given = update.model_fields_set
    values = update.__dict__
    for name in not_null & given:
        if values[name] is None:
            raise InvalidRequestError(f"{name} cannot be null")
    return {name: values[name] if name in given else UNSET for name in type(update).model_fields}
