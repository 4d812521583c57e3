"""A plain model of the store: lists and dictionaries, one call after the other, nothing clever.

It says a second time, and independently of `lightning_sql.lifecycle` and of every backend, what
CONTRACT.md sections 5, 7 and 8 say, so that the two can disagree. Records are dictionaries with the
fields of the real ones; ids are counted (`r1`, `a1`, `s1`), and whoever compares translates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["MissingRecordError", "Record", "StoreModel"]

Record: TypeAlias = dict[str, Any]

QUEUED = ("queuing", "requeuing")
ACTIVE = ("preparing", "running")
FINISHED = ("failed", "succeeded", "cancelled")

DEFAULT_CONFIG: Record = {
    "timeout_seconds": None,
    "unresponsive_seconds": None,
    "max_attempts": 1,
    "retry_condition": [],
}


class MissingRecordError(Exception):
    """The call needs a record that does not exist."""


class StoreModel:
    """The store as a person with pencil and paper would keep it. `now` is set by whoever drives it.

    `claim_timeout` is how many seconds nothing need be heard of an attempt after its claim; None is for ever.
    """

    def __init__(self, now: float, claim_timeout: float | None = None) -> None:
        self.now = now
        self.claim_timeout = claim_timeout
        self.rollouts: list[Record] = []
        self.attempts: list[Record] = []
        self.spans: list[Record] = []
        self.resources: list[Record] = []
        self.workers: list[Record] = []
        self.counters: dict[str, int] = {}
        self.queue: list[tuple[int, str]] = []
        """Batch and id: what one sweep queues again has no order among itself."""
        self._batches = 0
        self._ids = {"r": 0, "a": 0, "s": 0}
        self._last_write: Record | None = None

    # Looking things up

    def _new_id(self, kind: str) -> str:
        self._ids[kind] += 1
        return f"{kind}{self._ids[kind]}"

    def _rollout(self, rollout_id: str) -> Record:
        for rollout in self.rollouts:
            if rollout["rollout_id"] == rollout_id:
                return rollout
        raise MissingRecordError(rollout_id)

    def attempts_of(self, rollout_id: str) -> list[Record]:
        """A rollout's attempts, the oldest first."""
        return [attempt for attempt in self.attempts if attempt["rollout_id"] == rollout_id]

    def _latest(self, rollout_id: str) -> Record | None:
        attempts = self.attempts_of(rollout_id)
        return max(attempts, key=lambda attempt: attempt["sequence_id"]) if attempts else None

    def _attempt(self, rollout_id: str, attempt_id: str) -> Record:
        self._rollout(rollout_id)
        if attempt_id == "latest":
            latest = self._latest(rollout_id)
            if latest is not None:
                return latest
        for attempt in self.attempts_of(rollout_id):
            if attempt["attempt_id"] == attempt_id:
                return attempt
        raise MissingRecordError(attempt_id)

    def _worker(self, worker_id: str) -> Record:
        for worker in self.workers:
            if worker["worker_id"] == worker_id:
                return worker
        fields = (
            "heartbeat_stats",
            "last_heartbeat_time",
            "last_dequeue_time",
            "last_busy_time",
            "last_idle_time",
            "current_rollout_id",
            "current_attempt_id",
        )
        worker: Record = {"worker_id": worker_id, "status": "unknown"} | dict.fromkeys(fields)
        self.workers.append(worker)
        return worker

    def _with_attempt(self, rollout: Record) -> Record:
        latest = self._latest(rollout["rollout_id"])
        return rollout if latest is None else rollout | {"attempt": latest}

    # What follows from what

    def _set_status(self, rollout: Record, status: str, batch: int | None = None) -> None:
        rollout["status"] = status
        rollout["end_time"] = self.now if status in FINISHED else None
        waiting = [id_ for _, id_ in self.queue]
        if status not in QUEUED:
            self.queue = [entry for entry in self.queue if entry[1] != rollout["rollout_id"]]
        elif rollout["rollout_id"] not in waiting:
            self.queue.append((self._next_batch() if batch is None else batch, rollout["rollout_id"]))

    def _next_batch(self) -> int:
        self._batches += 1
        return self._batches

    def _follow_attempt(self, attempt: Record, batch: int | None = None) -> None:
        rollout = self._rollout(attempt["rollout_id"])
        latest = self._latest(attempt["rollout_id"])
        if latest is not attempt or rollout["status"] == "cancelled":
            return
        status = attempt["status"]
        if status in ("failed", "timeout", "unresponsive"):
            config = rollout["config"]
            again = status in config["retry_condition"] and attempt["sequence_id"] < config["max_attempts"]
            if self.claim_timeout is not None and status == "unresponsive" and attempt["last_heartbeat_time"] is None:
                again = again or rollout["status"] not in FINISHED
            status = "requeuing" if again else "failed"
        if rollout["status"] != status:
            self._set_status(rollout, status, batch)

    def _follow_worker(self, attempt: Record) -> None:
        if not attempt["worker_id"]:
            return
        worker = self._worker(attempt["worker_id"])
        if attempt["status"] in ACTIVE:
            worker["status"] = "busy"
            worker["last_busy_time"] = self.now
            worker["current_rollout_id"] = attempt["rollout_id"]
            worker["current_attempt_id"] = attempt["attempt_id"]
        else:
            worker["status"] = "idle" if attempt["status"] in ("succeeded", "failed") else "unknown"
            worker["last_idle_time"] = self.now
            worker["current_rollout_id"] = None
            worker["current_attempt_id"] = None

    def sweep(self) -> None:
        """End the attempts that are over their limits."""
        batch = self._next_batch()
        for rollout in self.rollouts:
            if rollout["status"] not in ACTIVE:
                continue
            attempt = self._latest(rollout["rollout_id"])
            if attempt is None:
                continue
            config = rollout["config"]
            seen = attempt["last_heartbeat_time"]
            if seen is None:
                seen = attempt["start_time"]
            age = self.now - attempt["start_time"]
            silent = attempt["status"] == "preparing" and attempt["last_heartbeat_time"] is None
            if self.claim_timeout is not None and silent and age > self.claim_timeout:
                attempt["status"] = "unresponsive"
            elif config["timeout_seconds"] is not None and age > config["timeout_seconds"]:
                attempt["status"] = "timeout"
            elif config["unresponsive_seconds"] is not None and self.now - seen > config["unresponsive_seconds"]:
                attempt["status"] = "unresponsive"
            else:
                continue
            self._follow_attempt(attempt, batch)
            self._follow_worker(attempt)

    # Rollouts

    def _create(self, request: Mapping[str, Any], status: str) -> Record:
        resources_id = request.get("resources_id")
        if resources_id is None and self._last_write is not None:
            resources_id = self._last_write["resources_id"]
        rollout: Record = {
            "rollout_id": self._new_id("r"),
            "input": copy.deepcopy(request.get("input")),
            "start_time": self.now,
            "end_time": None,
            "mode": request.get("mode"),
            "resources_id": resources_id,
            "status": status,
            "config": copy.deepcopy(request.get("config") or DEFAULT_CONFIG),
            "metadata": copy.deepcopy(request["metadata"]) if request.get("metadata") else {},
        }
        self.rollouts.append(rollout)
        return rollout

    def _begin(self, rollout: Record, worker_id: str | None) -> Record:
        attempt: Record = {
            "rollout_id": rollout["rollout_id"],
            "attempt_id": self._new_id("a"),
            "sequence_id": len(self.attempts_of(rollout["rollout_id"])) + 1,
            "start_time": self.now,
            "end_time": None,
            "status": "preparing",
            "worker_id": worker_id,
            "last_heartbeat_time": None,
            "metadata": None,
        }
        self.attempts.append(attempt)
        self._set_status(rollout, "preparing")
        self._follow_worker(attempt)
        return self._with_attempt(rollout)

    def enqueue(self, requests: Sequence[Mapping[str, Any]]) -> list[Record]:
        """Create and queue rollouts."""
        self.sweep()
        created = [self._create(request, "queuing") for request in requests]
        for rollout in created:
            self.queue.append((self._next_batch(), rollout["rollout_id"]))
        return created

    def start(self, request: Mapping[str, Any], worker_id: str | None) -> Record:
        """Create a rollout that is worked on at once."""
        self.sweep()
        return self._begin(self._create(request, "preparing"), worker_id)

    def dequeue(self, limit: int, worker_id: str | None, order: Sequence[str] = ()) -> list[Record]:
        """Claim from the front; `order` decides among entries that one sweep queued."""
        self.sweep()
        if limit <= 0:
            return []
        rank = {rollout_id: place for place, rollout_id in enumerate(order)}
        self.queue.sort(key=lambda entry: (entry[0], rank.get(entry[1], len(rank))))
        claimed = [self._begin(self._rollout(id_), worker_id) for _, id_ in self.queue[:limit]]
        if worker_id:
            worker = self._worker(worker_id)
            worker["last_dequeue_time"] = self.now
            if not claimed and worker["status"] != "idle":
                worker["status"] = "idle"
                worker["last_idle_time"] = self.now
        return claimed

    def start_attempt(self, rollout_id: str, worker_id: str | None) -> Record:
        """Begin another attempt."""
        self.sweep()
        return self._begin(self._rollout(rollout_id), worker_id)

    def update_rollout(self, rollout_id: str, changes: Mapping[str, Any]) -> Record:
        """Set fields of a rollout."""
        self.sweep()
        rollout = self._rollout(rollout_id)
        rollout.update({name: copy.deepcopy(value) for name, value in changes.items() if name != "status"})
        if "status" in changes:
            self._set_status(rollout, changes["status"])
        return rollout

    def get_rollout(self, rollout_id: str) -> Record | None:
        """A rollout with its latest attempt."""
        self.sweep()
        try:
            return self._with_attempt(self._rollout(rollout_id))
        except MissingRecordError:
            return None

    def query_rollouts(
        self,
        status_in: Sequence[str] | None,
        rollout_id_in: Sequence[str] | None,
        filter_logic: str,
        page: Mapping[str, Any],
    ) -> tuple[list[Record], int]:
        """A page of rollouts, and how many there are."""
        self.sweep()
        tests: list[Callable[[Record], bool]] = []
        if status_in is not None:
            tests.append(lambda rollout: rollout["status"] in status_in)
        if rollout_id_in is not None:
            tests.append(lambda rollout: rollout["rollout_id"] in rollout_id_in)
        found = [self._with_attempt(rollout) for rollout in self.rollouts if _passes(rollout, tests, filter_logic)]
        return _paged(found, page)

    def wait(self, rollout_ids: Sequence[str]) -> list[Record]:
        """Those that are finished, without waiting."""
        self.sweep()
        finished = {rollout["rollout_id"]: rollout for rollout in self.rollouts if rollout["status"] in FINISHED}
        return [finished[rollout_id] for rollout_id in rollout_ids if rollout_id in finished]

    # Attempts

    def query_attempts(self, rollout_id: str, page: Mapping[str, Any]) -> tuple[list[Record], int]:
        """A page of a rollout's attempts."""
        self.sweep()
        return _paged(self.attempts_of(rollout_id), page)

    def latest_attempt(self, rollout_id: str) -> Record | None:
        """The attempt with the highest number."""
        self.sweep()
        return self._latest(rollout_id)

    def update_attempt(self, rollout_id: str, attempt_id: str, changes: Mapping[str, Any]) -> Record:
        """Set fields of an attempt; its rollout and worker follow."""
        self.sweep()
        attempt = self._attempt(rollout_id, attempt_id)
        attempt.update(copy.deepcopy(dict(changes)))
        if changes.get("status") in ("failed", "succeeded"):
            attempt["end_time"] = self.now
        if self.claim_timeout is not None and attempt["last_heartbeat_time"] is None and attempt["status"] in ACTIVE:
            attempt["last_heartbeat_time"] = self.now
        self._follow_attempt(attempt)
        if changes.get("worker_id") or "status" in changes:
            self._follow_worker(attempt)
        return attempt

    # Spans

    def add_spans(self, spans: Sequence[Record]) -> list[Record]:
        """Store spans, all or none; those that were new."""
        for span in spans:
            if span["attempt_id"] == "latest":
                raise MissingRecordError(span["attempt_id"])
            self._attempt(span["rollout_id"], span["attempt_id"])
        stored: list[Record] = []
        for span in spans:
            key = (span["rollout_id"], span["attempt_id"], span["span_id"])
            if any((old["rollout_id"], old["attempt_id"], old["span_id"]) == key for old in self.spans):
                continue
            self.spans.append(span)
            stored.append(span)
            counter = self.counters.get(span["rollout_id"], 0)
            self.counters[span["rollout_id"]] = max(counter, span["sequence_id"])
        for span in stored:
            self._beat(self._attempt(span["rollout_id"], span["attempt_id"]))
        return stored

    def _beat(self, attempt: Record) -> None:
        attempt["last_heartbeat_time"] = self.now
        if attempt["status"] in ("preparing", "unresponsive"):
            attempt["status"] = "running"
        rollout = self._rollout(attempt["rollout_id"])
        alive = attempt["status"] == "running" and self._latest(attempt["rollout_id"]) is attempt
        if alive and rollout["status"] in ("preparing", "requeuing"):
            self._set_status(rollout, "running")

    def next_numbers(self, rollout_ids: Sequence[str]) -> list[int]:
        """Issue sequence numbers."""
        numbers: list[int] = []
        for rollout_id in rollout_ids:
            self.counters[rollout_id] = self.counters.get(rollout_id, 0) + 1
            numbers.append(self.counters[rollout_id])
        return numbers

    def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None,
        filters: Mapping[str, str | None],
        filter_logic: str,
        page: Mapping[str, Any],
    ) -> tuple[list[Record], int]:
        """A page of spans; the name of a filter is a field, perhaps with `_contains` after it."""
        self.sweep()
        if attempt_id == "latest":
            latest = self._latest(rollout_id)
            attempt_id = "" if latest is None else latest["attempt_id"]
        tests = [_span_test(name, value) for name, value in filters.items() if value is not None]
        found = [
            span
            for span in self.spans
            if span["rollout_id"] == rollout_id
            and attempt_id in (None, span["attempt_id"])
            and _passes(span, tests, filter_logic)
        ]
        return _paged(found, page)

    # Resources

    def write_resources(self, resources_id: str | None, resources: Record) -> Record:
        """Add resources (no id), or replace those of an id."""
        if resources_id is not None:
            self.sweep()
        # Whatever the clock says, a later write has a later time.
        time = self.now
        if self._last_write is not None and time <= self._last_write["update_time"]:
            time = math.nextafter(self._last_write["update_time"], math.inf)
        current = self.get_resources(resources_id) if resources_id is not None else None
        if current is None:
            fresh: Record = {
                "resources_id": self._new_id("s") if resources_id is None else resources_id,
                "create_time": time,
                "version": 0,
            }
            current = fresh
            self.resources.append(current)
        current.update(update_time=time, version=current["version"] + 1, resources=copy.deepcopy(resources))
        self._last_write = current
        return current

    def get_resources(self, resources_id: str) -> Record | None:
        """The resources of an id."""
        return next((item for item in self.resources if item["resources_id"] == resources_id), None)

    def latest_resources(self) -> Record | None:
        """What was written last."""
        return self._last_write

    def query_resources(self, page: Mapping[str, Any]) -> tuple[list[Record], int]:
        """A page of resources."""
        return _paged(self.resources, page)

    # Workers

    def update_worker(self, worker_id: str, changes: Mapping[str, Any]) -> Record:
        """A worker's heartbeat."""
        worker = self._worker(worker_id)
        worker["last_heartbeat_time"] = self.now
        worker.update(copy.deepcopy(dict(changes)))
        return worker

    def get_worker(self, worker_id: str) -> Record | None:
        """A worker."""
        return next((worker for worker in self.workers if worker["worker_id"] == worker_id), None)

    def query_workers(
        self, status_in: Sequence[str] | None, contains: str | None, filter_logic: str, page: Mapping[str, Any]
    ) -> tuple[list[Record], int]:
        """A page of workers."""
        self.sweep()
        tests: list[Callable[[Record], bool]] = []
        if status_in is not None:
            tests.append(lambda worker: worker["status"] in status_in)
        if contains is not None:
            tests.append(lambda worker: contains in worker["worker_id"])
        return _paged([worker for worker in self.workers if _passes(worker, tests, filter_logic)], page)


def _span_test(name: str, value: str) -> Callable[[Record], bool]:
    field = name.removesuffix("_contains")
    if field == name:
        return lambda span: span[field] == value
    return lambda span: span[field] is not None and value in span[field]


def _passes(record: Record, tests: Sequence[Callable[[Record], bool]], filter_logic: str) -> bool:
    if not tests:
        return True
    results = [test(record) for test in tests]
    return any(results) if filter_logic == "or" else all(results)


def _paged(records: Sequence[Record], page: Mapping[str, Any]) -> tuple[list[Record], int]:
    """Sort and cut; `page` has `sort_by`, `sort_order`, `limit`, `offset`."""
    field = page.get("sort_by")
    ordered = list(records)
    if field is not None:
        known = [record[field] for record in records if record[field] is not None]
        empty: Any = math.inf if field.endswith("_time") else type(known[0])() if known else 0
        ordered.sort(
            key=lambda record: empty if record[field] is None else record[field],
            reverse=page.get("sort_order") == "desc",
        )
    start, limit = page.get("offset", 0), page.get("limit", -1)
    return ordered[start:] if limit == -1 else ordered[start : start + limit], len(ordered)
