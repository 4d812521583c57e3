"""The store: every operation that algorithms, runners and dashboards call, with its contract.

Signatures are those of Agent Lightning's LightningStore, so that code written for one runs on the
other. Rules are in `lightning_sql.lifecycle`; CONTRACT.md section 7 is where they come from.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, Self, TypeAlias, TypedDict

from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
from lightning_sql.metrics import Recorder
from lightning_sql.otel import ReadableSpan, span_from_sdk
from lightning_sql.records import (
    IDENTIFIER_BYTES,
    ROLLOUT_ACTIVE,
    ROLLOUT_QUEUED,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    IdempotencyKey,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Unset,
    Worker,
    WorkerStatus,
)

if TYPE_CHECKING:
    from lightning_sql.store.row_store import RowStore

__all__ = [
    "KEPT_SECONDS",
    "FilterLogic",
    "LightningStore",
    "QueueState",
    "SortOrder",
    "SpanReceipt",
    "StoreCapabilities",
    "StoreStatistics",
    "Usage",
    "check_import",
    "check_key",
    "refuse_null",
]

FilterLogic: TypeAlias = Literal["and", "or"]
SortOrder: TypeAlias = Literal["asc", "desc"]


KEPT_SECONDS: Final = 86_400.0
"""How long an idempotency key is kept after its call."""


def check_key(key: IdempotencyKey) -> None:
    """Check an idempotency key.

    Raises:
        InvalidRequestError: it is empty or too long.
    """
    if not 0 < len(key.key.encode(errors="surrogatepass")) <= IDENTIFIER_BYTES:
        raise InvalidRequestError(f"an idempotency key has 1 to {IDENTIFIER_BYTES} bytes")


def check_import(unnumbered: AbstractSet[int], key: IdempotencyKey | None) -> None:
    """Check that spans without a number are not to be stored under a key.

    Raises:
        InvalidRequestError: they are; a repeat would not know the numbers.
    """
    if unnumbered and key is not None:
        raise InvalidRequestError("spans without a number cannot be stored under an idempotency key")


def refuse_null(changes: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that an update sets none of these fields to None.

    Raises:
        InvalidRequestError: it does.
    """
    for name in names:
        if name in changes and changes[name] is None:
            raise InvalidRequestError(f"{name} cannot be null")


class StoreCapabilities(TypedDict):
    """What a store can do beyond the operations."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class StoreStatistics(TypedDict):
    """What a store counts."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: NotRequired[float]
    """Seconds since this store object was made."""


@dataclass(frozen=True, slots=True)
class SpanReceipt:
    """What became of the spans of one import."""

    stored: Sequence[Span]
    """The new ones, in order, with the sequence numbers they were stored under."""
    duplicates: int
    """How many were stored before, or stood earlier in the same import."""
    rejected: Sequence[Span]
    """Those whose rollout or attempt does not exist."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """How work stands, at some moment."""

    queued: int
    """Rollouts in the queue."""
    oldest_seconds: float
    """How long ago the oldest of them was enqueued; 0 if there is none."""
    running: int
    """Rollouts that somebody works on."""
    due: int
    """Rollouts that the watchdog has to look at, because they may be over a limit; 0 where nobody counts them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process asks of the database, at this moment."""

    connections_in_use: int = 0
    connections_idle: int = 0
    calls_waiting: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many calls wait to be sent, by the statement that they wait for."""


class LightningStore(ABC):
    """The control plane of agent training.

    A call that returned is stored, a call that raised changed nothing. Every method may raise
    `DatabaseUnavailableError`; other errors are named where they belong. Reads of unknown ids give
    None or an empty page. Paging everywhere: `limit` -1 is unlimited, else at least 1, `offset` at
    least 0, or `InvalidRequestError`; so is a `sort_by` that is no sortable field.

    A call that is given an `idempotency_key` takes place once, however often it is made: a repeat is
    answered with the records of the first as they are now, and `IdempotencyKeyReusedError` says that the
    key belongs to another call. Keys are kept for a day.
    """

    recorder: Recorder | None = None
    """Who takes down what the store does; None is nobody."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Finish what was begun and let go of every connection; waiting callers get what is finished."""

    async def release_waiters(self) -> None:  # noqa: B027 - most stores have nobody waiting inside
        """Let `wait_for_rollouts` return what is finished, now and from now on: the store is about to close."""

    async def maintain(self) -> None:  # noqa: B027 - most stores keep themselves
        """Look after the store's surroundings; a server calls this every few seconds."""

    async def queue_state(self) -> QueueState:
        """How work stands."""
        queued = await self.query_rollouts(status_in=sorted(ROLLOUT_QUEUED), sort_by="start_time", limit=1)
        running = await self.query_rollouts(status_in=sorted(ROLLOUT_ACTIVE), limit=1)
        oldest = max(0.0, time.time() - queued.items[0].start_time) if queued.items else 0.0
        return QueueState(queued.total, oldest, running.total, due=0)

    def usage(self) -> Usage:
        """What the running event loop asks of the database."""
        return Usage()

    @property
    def rows(self) -> RowStore | None:
        """The same store on rows, where it has them."""
        return None

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""

    @abstractmethod
    async def statistics(self) -> StoreStatistics:
        """Counts of everything stored, and the uptime in seconds."""

    @abstractmethod
    async def ping(self) -> None:
        """Return when the store can serve.

        Raises:
            DatabaseUnavailableError: it cannot.
        """

    @abstractmethod
    async def sweep(self) -> int:
        """End every attempt that is over its limits (the watchdog); how many there were."""

    # Rollouts

    @abstractmethod
    async def start_rollout(
        self,
        input: Any,  # noqa: A002 - the protocol's name
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> AttemptedRollout:
        """Create a rollout that is worked on at once: `preparing`, with attempt 1, never queued.

        Without `resources_id` it gets the latest resources, if there are any.
        """

    @abstractmethod
    async def enqueue_rollout(
        self,
        input: Any,  # noqa: A002 - the protocol's name
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        """Create a rollout and append it to the queue. Without `resources_id` it gets the latest resources."""

    @abstractmethod
    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Rollout]:
        """Create and queue rollouts, all or none, in order."""

    @abstractmethod
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, wait: float = 0.0, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout | None:
        """Claim the rollout at the front of the queue with a new attempt, or None.

        While the queue is empty, it waits for one up to `wait` seconds, or until the store lets its waiters go.
        """

    @abstractmethod
    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float = 0.0,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts in queue order, each with a new attempt; nothing for a limit below 1.

        Leaving the queue, the attempt, the rollout's `preparing` and the worker's `busy` are one
        transaction, and no queue entry goes to two callers. As `dequeue_rollout`, it waits for the first one.
        """

    @abstractmethod
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout:
        """Begin another attempt of a rollout, whatever its status and `max_attempts`; it leaves the queue.

        Raises:
            RecordNotFoundError: no such rollout.
        """

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        """A page of rollouts, those that were attempted as `AttemptedRollout`; by default in order of creation.

        `status` and `rollout_ids` are older names of `status_in` and `rollout_id_in`, which win.
        """

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """The rollout, as `AttemptedRollout` when it was attempted."""

    @abstractmethod
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until all known rollouts among these are finished, at most `timeout` seconds (None: no limit).

        Gives the finished ones, in the order of `rollout_ids`, repeats included. Unknown ids are not waited for.
        """

    @abstractmethod
    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,  # noqa: A002 - the protocol's name
        mode: RolloutMode | None | Unset = UNSET,
        resources_id: str | None | Unset = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        """Set fields of a rollout as they are given; the status may go from any value to any.

        A status that is queued appends the rollout to the queue unless it is in it, every other
        takes it out. Attempts and workers stay as they are.

        Raises:
            RecordNotFoundError: no such rollout.
        """

    # Attempts

    @abstractmethod
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """A page of a rollout's attempts."""

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The attempt with the highest sequence number."""

    @abstractmethod
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        """Set fields of an attempt (`latest` names the one with the highest number); its rollout and worker follow.

        Raises:
            RecordNotFoundError: no such rollout or attempt.
        """

    # Spans

    @abstractmethod
    async def add_span(self, span: Span) -> Span | None:
        """Store a span, which is a heartbeat of its attempt; None when it is stored already.

        Raises:
            RecordNotFoundError: no such rollout or attempt.
        """

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans of any attempts, all or none; those that were new, in order, duplicates left out.

        Raises:
            RecordNotFoundError: some rollout or attempt does not exist.
        """

    @abstractmethod
    async def import_spans(
        self,
        spans: Sequence[Span],
        *,
        unnumbered: AbstractSet[int] = frozenset(),
        idempotency_key: IdempotencyKey | None = None,
    ) -> SpanReceipt:
        """Store the spans whose attempt exists and report the others, in one transaction.

        The spans whose index is in `unnumbered` have no sequence number of their own: the new ones
        among them get the next numbers of their rollout, in order.

        Raises:
            InvalidRequestError: `unnumbered` together with a key: a repeat would not know the numbers.
        """

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK; without `sequence_id` it gets the next number. Else as `add_span`."""
        span = span_from_sdk(readable_span, rollout_id, attempt_id, sequence_id or 0)
        receipt = await self.import_spans([span], unnumbered={0} if sequence_id is None else frozenset())
        if receipt.rejected:
            raise RecordNotFoundError(f"there is no attempt {attempt_id!r} of a rollout {rollout_id!r}")
        return receipt.stored[0] if receipt.stored else None

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """A page of a rollout's spans, of one attempt (`latest`: the newest) or of all."""

    @abstractmethod
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Issue the next sequence number of a rollout's spans; the first is 1, gaps are allowed."""

    @abstractmethod
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Issue a number for each (rollout_id, attempt_id), in order."""

    # Resources

    @abstractmethod
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """A page of resources, by default in order of creation."""

    @abstractmethod
    async def add_resources(
        self, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        """Store resources under a new id, as version 1; they become the latest."""

    @abstractmethod
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        """Replace the resources of an id and count its version up, or create it; they become the latest."""

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources of an id."""

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources that were written last."""

    # Workers

    @abstractmethod
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """A page of workers, by default in the order in which they were first seen."""

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """The worker, or None if it was never heard of."""

    @abstractmethod
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        """Record a worker's heartbeat, with what it measures of itself; a new worker is created.

        Raises:
            TypeError: `heartbeat_stats` is None.
        """
