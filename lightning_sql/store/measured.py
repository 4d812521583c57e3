"""Counting and timing what a store does, for whoever gave it a recorder (CONTRACT.md section 10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from lightning_sql.collections.tracking import store_method
from lightning_sql.metrics import (
    BATCH_CALLS,
    COLLECTION_CALLS,
    COLLECTION_LATENCY,
    NOTIFICATION_LAG,
    ROLLOUTS_DURATION,
    ROLLOUTS_FINISHED,
    STORE_CALLS,
    STORE_LATENCY,
    Labels,
    Recorder,
    status_of,
)
from lightning_sql.records import Rollout, RolloutStatus
from lightning_sql.store.interface import LightningStore

__all__ = ["PUBLIC_METHODS", "Statement", "Statements", "measured", "record_finished", "record_lag", "record_outcome"]

S = TypeVar("S", bound=type[LightningStore])

_OF_ROWS: Final = {
    "enqueue_rows": "enqueue_many_rollouts",
    "claim_rows": "dequeue_many_rollouts",
    "add_span_rows": "add_many_spans",
    "import_span_rows": "import_spans",
    "update_attempt_row": "update_attempt",
    "next_number": "get_next_span_sequence_id",
    "beat_worker_row": "update_worker",
    "rollout_row": "get_rollout_by_id",
    "resources_row": "get_resources_by_id",
    "latest_resources_row": "get_latest_resources",
    "finished_rows": "wait_for_rollouts",
    "rollout_page": "query_rollouts",
    "span_page": "query_spans",
}
"""The operations of a `RowStore`, and the store methods that they are."""

_OF_NOBODY: Final = frozenset({"close", "release_waiters", "maintain", "queue_state"})
"""What the service does for itself."""

PUBLIC_METHODS: Final = tuple(
    name
    for name, member in vars(LightningStore).items()
    if iscoroutinefunction(member) and not name.startswith("_") and name not in _OF_NOBODY
)
"""The names of the store's methods in the metrics."""


def measured(store: S) -> S:
    """Let the public methods of a store record how often they are called, what came of it, and how long it took.

    What one of them does by calling another counts once.
    """
    for name in (*PUBLIC_METHODS, *_OF_ROWS):
        method = getattr(store, name, None)
        if method is not None:
            setattr(store, name, _recording(_OF_ROWS.get(name, name), method))
    return store


def _recording(public: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    caller = public, public

    @wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder: Recorder | None = self.recorder
        # Who waits is measured try by try: how long a queue is empty says nothing of the store.
        if recorder is None or store_method.get()[0] != "unknown" or kwargs.get("wait"):
            return await method(self, *args, **kwargs)
        token = store_method.set(caller)
        started = perf_counter()
        failure: BaseException | None = None
        try:
            return await method(self, *args, **kwargs)
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = perf_counter() - started
            store_method.reset(token)
            labels = public, public, status_of(failure)
            recorder.count(STORE_CALLS, labels)
            recorder.observe(STORE_LATENCY, labels, seconds)

    return call


class Statement(NamedTuple):
    """Something that goes to the database for one or several calls of a store method."""

    name: str
    public: str
    """The store method."""
    collections: tuple[str, ...]
    """What it reads and writes."""

    def labels(self, status: str) -> list[Labels]:
        """Those of each of the collections."""
        return [(self.public, self.name, "sql", collection, status) for collection in self.collections]


_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "query_rollouts": ("rollouts", "attempts"),
    "get_rollout_by_id": ("rollouts", "attempts"),
    "wait_for_rollouts": ("rollouts",),
    "start_rollout": ("rollouts", "attempts", "workers"),
    "start_attempt": ("rollouts", "attempts", "workers"),
    "update_rollout": ("rollouts", "rollout_queue"),
    "sweep": ("rollouts", "attempts", "workers"),
    "query_attempts": ("attempts",),
    "get_latest_attempt": ("attempts",),
    "query_spans": ("spans",),
    "query_resources": ("resources",),
    "add_resources": ("resources",),
    "update_resources": ("resources",),
    "get_resources_by_id": ("resources",),
    "get_latest_resources": ("resources",),
    "query_workers": ("workers",),
    "get_worker_by_id": ("workers",),
    "statistics": ("rollouts", "attempts", "spans", "resources", "workers"),
}
"""What store methods ask for that have no statement of their own."""


class Statements:
    """Times the statements of a store.

    Args:
        recorder: who takes it down; None is nobody.
        expected: those that will be sent for joined calls.
    """

    def __init__(self, recorder: Recorder | None, expected: Iterable[Statement] = ()) -> None:
        self.recorder = recorder
        if recorder is not None:
            for statement in expected:
                recorder.expect(BATCH_CALLS, (statement.name,))
                for labels in statement.labels(status_of(None)):
                    recorder.expect(COLLECTION_CALLS, labels)
                    recorder.expect(COLLECTION_LATENCY, labels)

    @contextmanager
    def timed(self, statement: Statement, calls: int | None = None) -> Generator[None]:
        """The body is one statement, for so many calls where calls may join."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        if calls is not None:
            recorder.observe(BATCH_CALLS, (statement.name,), calls)
        started = perf_counter()
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds, status = perf_counter() - started, status_of(failure)
            for labels in statement.labels(status):
                recorder.count(COLLECTION_CALLS, labels)
                recorder.observe(COLLECTION_LATENCY, labels, seconds)

    @contextmanager
    def of_caller(self, name: str) -> Generator[None]:
        """The body is what the store method that runs has to ask the database for."""
        if self.recorder is None:
            yield
            return
        public = store_method.get()[0]
        with self.timed(Statement(name, public, _READ.get(public, ("rollouts",)))):
            yield


def record_outcome(recorder: Recorder, status: RolloutStatus, mode: str | None, seconds: float) -> None:
    """Record that a rollout finished, so many seconds after its start."""
    labels = status, mode or "unknown"
    recorder.count(ROLLOUTS_FINISHED, labels)
    recorder.observe(ROLLOUTS_DURATION, labels, seconds)


def record_finished(recorder: Recorder | None, rollouts: Iterable[Rollout]) -> None:
    """Record rollouts that have just finished."""
    if recorder is not None:
        for rollout in rollouts:
            seconds = 0.0 if rollout.end_time is None else rollout.end_time - rollout.start_time
            record_outcome(recorder, rollout.status, rollout.mode, seconds)


def record_lag(recorder: Recorder, waited_for: int, ends: Iterable[float | None], now: float) -> None:
    """Record how long after the last of so many rollouts ended, at these times, those who waited are told.

    Nothing where some have not ended: then it was their patience that did.
    """
    times = [end for end in ends if end is not None]
    if len(times) == waited_for:
        recorder.observe(NOTIFICATION_LAG, (), max(0.0, now - max(times)))
