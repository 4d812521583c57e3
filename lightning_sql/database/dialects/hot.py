"""What the native store asks of a dialect: its hot operations, and transactions for everything else.

A hot operation takes any number of calls at once. On PostgreSQL it is one statement, on SQLite one short
transaction in one hop to the writer's thread. All or nothing happens, except that a call that cannot be
done (its answer says so) leaves the others alone. Nothing here validates: texts are as
`lightning_sql.database.payload` encodes them, identifiers too.

Rows are tuples in the order of `lightning_sql.database.native`'s `*_COLUMNS`, payloads in them JSON text.
`now` is the time in seconds since the epoch, None for the database's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Connection, Executable, Table

from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.database.reading import Reading
from lightning_sql.records import RolloutStatus

__all__ = [
    "AttemptChange",
    "AttemptChanged",
    "Claim",
    "Enqueued",
    "HotPath",
    "KeyNote",
    "RolloutDraft",
    "Row",
    "SpanBatch",
    "SpanDraft",
    "SpanOutcome",
    "WorkerBeat",
]

R = TypeVar("R")

Row: TypeAlias = Sequence[Any]


class RolloutDraft(NamedTuple):
    """A rollout to be queued."""

    rollout_id: str
    input: str | None
    mode: str | None
    resources_id: str | None
    """None takes the latest resources."""
    timeout_seconds: float | None
    unresponsive_seconds: float | None
    max_attempts: int
    retry_condition: str
    metadata: str | None


class Enqueued(NamedTuple):
    """What the database added to rollouts that were queued."""

    now: float
    resources_id: str | None
    """The latest resources, which those rollouts got that named none."""


class KeyNote(NamedTuple):
    """A call's idempotency key, as a row is to have it."""

    key: str
    route: str
    fingerprint: str
    part: int = 0


class Claim(NamedTuple):
    """A caller that wants rollouts."""

    worker_id: str | None
    attempt_ids: Sequence[str]
    """An id for each rollout that may be claimed, so as many are claimed at most."""
    note: KeyNote | None = None
    """Written down with the rollouts and attempts, if there are any."""


class SpanDraft(NamedTuple):
    """A span to be stored: its row."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: str
    attributes: str
    events: str
    links: str
    start_time: float | None
    end_time: float | None
    context: str | None
    parent: str | None
    resource: str
    extra: str | None


SpanKey: TypeAlias = tuple[str, str, str]
"""The ids of a span: of its rollout, its attempt, and its own."""


class SpanBatch(NamedTuple):
    """The spans of one call, no two of them with the same key."""

    spans: Sequence[SpanDraft]
    strict: bool
    """Whether none is stored when one of them belongs to no attempt."""
    note: KeyNote | None = None
    """Written down with the outcomes, a digit each; only of a batch that is not strict."""


class SpanOutcome(IntEnum):
    """What became of a span."""

    STORED = 0
    DUPLICATE = 1
    UNKNOWN = 2
    """Its rollout or attempt does not exist."""


class AttemptChange(NamedTuple):
    """Changes of an attempt; None leaves a field as it is."""

    rollout_id: str
    attempt_id: str | None
    """None is the latest attempt."""
    status: str | None
    worker_id: str | None
    last_heartbeat_time: float | None
    metadata: str | None


class AttemptChanged(NamedTuple):
    """What an attempt became, and its rollout with it."""

    attempt: Row
    rollout_status: RolloutStatus
    mode: str | None
    """The rollout's."""
    lasted: float | None
    """Seconds from the rollout's start to its end, where this was its end."""


class WorkerBeat(NamedTuple):
    """A heartbeat of a worker; None leaves its statistics as they are."""

    worker_id: str
    heartbeat_stats: str | None


class HotPath(ABC):
    """The way of one partition, and of one event loop, to the database.

    Errors of the driver pass as they are, for `Database.translated`; `CommitUnknownError` where the
    connection broke while a write was under way. Nothing is tried again here.

    A note is one row in the same transaction. Where its key and part are there already, that is a
    duplicate, and nothing is done.
    """

    in_order: ClassVar[bool]
    """Whether of two writes the one that was sent first is done first."""

    @abstractmethod
    async def enqueue(
        self, drafts: Sequence[RolloutDraft], now: float | None, notes: Sequence[tuple[KeyNote, str]] = ()
    ) -> Enqueued:
        """Create rollouts at the end of the queue, in order; each note comes with what it is to say."""

    @abstractmethod
    async def claim(self, claims: Sequence[Claim], now: float | None) -> tuple[float, list[list[Row]]]:
        """Give the front of the queue to callers, in their order, each rollout with a new attempt.

        No two claims are of one worker. The answer is the time, and for each claim the rows of its
        rollouts, with two values more: the new attempt's id and its number.
        """

    @abstractmethod
    async def add_spans(self, batches: Sequence[SpanBatch], now: float | None) -> list[list[SpanOutcome]]:
        """Store spans, with the heartbeat of their attempts; no two batches have a key in common.

        The outcome of each span of each batch. A strict batch with an unknown one among them stored nothing.
        """

    @abstractmethod
    async def number_spans(self, spans: Sequence[SpanKey]) -> list[int | None]:
        """Issue the next numbers of their rollouts to spans, in order.

        None to those that could not be stored as new, because their attempt is unknown, or they are known.
        """

    @abstractmethod
    async def update_attempts(self, changes: Sequence[AttemptChange], now: float | None) -> list[AttemptChanged | None]:
        """Change attempts, and what follows for their rollouts and workers; no two are of one rollout.

        None where there is no such attempt.
        """

    @abstractmethod
    async def issue_numbers(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Issue that many span sequence numbers for each rollout; the last of them for each."""

    @abstractmethod
    async def beat_workers(self, beats: Sequence[WorkerBeat], now: float | None) -> list[Row]:
        """Record heartbeats of different workers; their rows, in order."""

    @abstractmethod
    async def rollouts(self, rollout_ids: Sequence[str], finished: bool) -> list[Row]:
        """The rollouts of these ids that there are, or only the finished ones, in any order.

        Each row continues with the row of its latest attempt, all None when there is none.
        """

    @abstractmethod
    async def fetch(self, statement: Executable) -> Sequence[Row]:
        """The rows of one statement that reads; its columns must have types that need no decoding."""

    @abstractmethod
    async def fetch_bounded(
        self, reading: Reading, values: Mapping[str, Any], most_bytes: int, heavy: Sequence[int]
    ) -> tuple[Sequence[Row], bool]:
        """The rows of a statement until their `heavy` columns have so many bytes; whether that was before the end.

        Where rows do not come one at a time, the statement must see to it itself, by `Dialect.stored_size`.
        """

    @abstractmethod
    async def read(self, work: Callable[[Connection], R]) -> R:
        """Run statements that read, all of one state of the database."""

    @abstractmethod
    async def write(self, work: Callable[[Connection], R]) -> R:
        """Run statements in a transaction, which commits when `work` returns and rolls back when it raises."""

    @abstractmethod
    async def is_over(self, error: CommitUnknownError) -> bool:
        """See to it that a hot operation whose connection broke is over, done or not; False if it may go on."""

    @abstractmethod
    async def took_place(self, error: CommitUnknownError) -> bool | None:
        """Whether a transaction took place whose connection broke; None if nobody can tell.

        Raises:
            CommitUnknownError: it may be told later.
        """

    @abstractmethod
    def next_order(self, table: Table) -> ColumnElement[int]:
        """An expression for the next insertion number of a table."""

    @abstractmethod
    def next_queue_position(self) -> ColumnElement[int]:
        """An expression for the position behind the last one of the queue."""

    @abstractmethod
    def connections(self) -> tuple[int, int]:
        """How many connections are in use, and how many are kept for later."""

    @abstractmethod
    def clock(self) -> ColumnElement[float] | None:
        """An expression for the database's time; None where ours is as good."""

    async def refresh_statistics(self) -> Sequence[str]:
        """Let the database look at tables that have grown much since it last did; their names.

        Until it does, it plans for tables that are empty, and keeps such a plan.
        """
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Close what this way holds."""
