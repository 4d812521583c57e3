"""The storage protocols: `Collection`, `Queue`, `KeyValue`, and the `LightningCollections` that hold them.

They are those of Agent Lightning (CONTRACT.md section 11), so that a store written against its
collections runs on ours, with two additions that the laws of this store need: `Queue.discard` and
`LightningCollections.now`. Each operation is all or nothing, alone or inside `atomic`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel

from lightning_sql.collections.tracking import TrackedCollection
from lightning_sql.filters import FilterOptions, SortOptions
from lightning_sql.records import Attempt, PaginatedResult, ResourcesUpdate, Rollout, Span, Worker

__all__ = [
    "LABELS",
    "AtomicLabel",
    "AtomicMode",
    "Collection",
    "KeyValue",
    "LightningCollections",
    "Queue",
]

T = TypeVar("T", bound=BaseModel)
Q = TypeVar("Q")
K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")

AtomicMode: TypeAlias = Literal["r", "w", "rw"]
AtomicLabel: TypeAlias = Literal[
    "rollouts", "attempts", "spans", "resources", "workers", "rollout_queue", "span_sequence_ids", "generic"
]
LABELS: Final[tuple[AtomicLabel, ...]] = (
    "rollouts",
    "attempts",
    "spans",
    "resources",
    "workers",
    "rollout_queue",
    "span_sequence_ids",
    "generic",
)
"""Every label, in the order in which locks are taken."""


class Collection(TrackedCollection, ABC, Generic[T]):
    """Items of one pydantic type with a primary key, in insertion order.

    Items handed out are snapshots. A wrong item type is a TypeError everywhere.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}[{self.item_type().__name__}]>"

    @abstractmethod
    def primary_keys(self) -> Sequence[str]:
        """The names of the fields that identify an item."""

    @abstractmethod
    def item_type(self) -> type[T]:
        """The pydantic model of the items."""

    @abstractmethod
    async def size(self) -> int:
        """How many items there are."""

    @abstractmethod
    async def query(
        self,
        filter: FilterOptions | None = None,  # noqa: A002 - the protocol's name
        sort: SortOptions | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[T]:
        """The matching items, one page of them; without a sort in insertion order.

        `limit` -1 is unlimited; 0 gives no items and the total.

        Raises:
            InvalidRequestError: an unknown operator, aggregate or order, or a field that cannot be sorted by.
            TypeError: a filter of the wrong shape.
        """

    @abstractmethod
    async def get(
        self,
        filter: FilterOptions | None = None,  # noqa: A002 - the protocol's name
        sort: SortOptions | None = None,
    ) -> T | None:
        """The first matching item, or None. Raises as `query` does."""

    @abstractmethod
    async def insert(self, items: Sequence[T]) -> None:
        """Add items.

        Raises:
            DuplicatedPrimaryKeyError: a key exists already or twice in `items`; nothing was added.
        """

    @abstractmethod
    async def update(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        """Replace items, or only the named fields of them; the complete items that result, in input order.

        Raises:
            RecordNotFoundError: a key does not exist; nothing was changed.
            InvalidRequestError: a name that is no field of the items.
        """

    @abstractmethod
    async def upsert(self, items: Sequence[T], update_fields: Sequence[str] | None = None) -> Sequence[T]:
        """Insert items whose key is new and update the others as `update` does; the items that result, in input order.

        With `update_fields=[]` it is get-or-insert.
        """

    @abstractmethod
    async def delete(self, items: Sequence[T]) -> None:
        """Remove items by their key.

        Raises:
            RecordNotFoundError: a key does not exist; nothing was removed.
        """


class Queue(TrackedCollection, ABC, Generic[Q]):
    """First in, first out; strings or pydantic items, equal by value; an item may stand in it several times."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}[{self.item_type().__name__}]>"

    @abstractmethod
    def item_type(self) -> type[Q]:
        """The type of the items."""

    @abstractmethod
    async def has(self, item: Q) -> bool:
        """Whether an equal item is waiting."""

    @abstractmethod
    async def enqueue(self, items: Sequence[Q]) -> Sequence[Q]:
        """Append items in order, and return them."""

    @abstractmethod
    async def dequeue(self, limit: int = 1) -> Sequence[Q]:
        """Take up to `limit` items from the front; no two callers get the same entry."""

    @abstractmethod
    async def peek(self, limit: int = 1) -> Sequence[Q]:
        """The first `limit` items, left where they are."""

    @abstractmethod
    async def discard(self, items: Sequence[Q]) -> None:
        """Remove every entry that equals one of `items`; what is not queued is ignored."""

    @abstractmethod
    async def size(self) -> int:
        """How many entries are waiting."""


class KeyValue(TrackedCollection, ABC, Generic[K, V]):
    """Values by key, with atomic counters.

    Arithmetic is on ints and floats only: any other argument or stored value, bools included, is a
    TypeError and changes nothing.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    async def has(self, key: K) -> bool:
        """Whether the key has a value."""

    @abstractmethod
    async def get(self, key: K, default: V | None = None) -> V | None:
        """The value of the key, or the default."""

    @abstractmethod
    async def set(self, key: K, value: V) -> None:
        """Give the key a value."""

    @abstractmethod
    async def inc(self, key: K, amount: V) -> V:
        """Add to the value, a missing one counting as zero; the new value.

        Raises:
            TypeError: the amount or the stored value is not numeric.
            UnstorableValueError: the sum does not fit 64 bits.
        """

    @abstractmethod
    async def chmax(self, key: K, value: V) -> V:
        """Raise the value to at least `value`; the resulting value. Raises as `inc` does."""

    @abstractmethod
    async def pop(self, key: K, default: V | None = None) -> V | None:
        """Remove the key; the value it had, or the default."""

    @abstractmethod
    async def size(self) -> int:
        """How many keys have a value."""


class LightningCollections(TrackedCollection, ABC):
    """The seven collections of a store, and transactions over them."""

    async def close(self) -> None:
        """Finish what was begun and let go of every connection."""

    @property
    @abstractmethod
    def rollouts(self) -> Collection[Rollout]:
        """Rollouts by rollout_id."""

    @property
    @abstractmethod
    def attempts(self) -> Collection[Attempt]:
        """Attempts by (rollout_id, attempt_id)."""

    @property
    @abstractmethod
    def spans(self) -> Collection[Span]:
        """Spans by (rollout_id, attempt_id, span_id)."""

    @property
    @abstractmethod
    def resources(self) -> Collection[ResourcesUpdate]:
        """Resources by resources_id."""

    @property
    @abstractmethod
    def workers(self) -> Collection[Worker]:
        """Workers by worker_id."""

    @property
    @abstractmethod
    def rollout_queue(self) -> Queue[str]:
        """The ids of the rollouts that wait for a runner."""

    @property
    @abstractmethod
    def span_sequence_ids(self) -> KeyValue[str, int]:
        """The last sequence number issued, by rollout id."""

    @abstractmethod
    async def now(self) -> float:
        """The time that this store's records go by: of the database where several servers share one."""

    @abstractmethod
    def atomic(
        self,
        *,
        mode: AtomicMode = "rw",
        snapshot: bool = False,
        commit: bool = False,
        labels: Iterable[AtomicLabel] | None = None,
        **kwargs: Any,
    ) -> AbstractAsyncContextManager[Self]:
        """A transaction: the collections it yields see and make all changes, or none when its body raises.

        Writers that share a label (None is every label) exclude each other; locks are taken in the
        order of `LABELS`. `snapshot` makes all reads of a reading context see one state; a writing
        one can count on the collections of its labels alone, and on all with `commit`. Contexts of
        one task do not nest, except reads inside anything. `commit=True` belongs to `execute`.
        """

    @abstractmethod
    async def execute(
        self,
        callback: Callable[[Self], Awaitable[R]],
        *,
        mode: AtomicMode = "rw",
        snapshot: bool = False,
        commit: bool = False,
        labels: Iterable[AtomicLabel] | None = None,
        **kwargs: Any,
    ) -> R:
        """Run `await callback(collections)` inside `atomic`, and return what it returned.

        With `commit`, a transaction that lost against a concurrent one is run again, so the callback
        must be safe to repeat.

        Raises:
            TransactionConflictError: it still loses when its deadline has passed.
        """
