"""The rules of rollouts, attempts, workers and resources, as pure functions (CONTRACT.md sections 7 and 8).

Nothing here reads a clock or a store: every function takes what decides and returns what follows.
Where CONTRACT.md section 12 names a better behaviour than the protocol's first server has, the
function says which entry it follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from lightning_sql.identifiers import new_attempt_id, new_rollout_id
from lightning_sql.records import (
    ATTEMPT_ACTIVE,
    ROLLOUT_ACTIVE,
    ROLLOUT_FINISHED,
    ROLLOUT_QUEUED,
    Attempt,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    WorkerStatus,
)

__all__ = [
    "ATTEMPT_ENDED",
    "HEARTBEAT_ATTEMPT",
    "HEARTBEAT_ROLLOUT",
    "OUTCOME",
    "WORKER_STATUS",
    "attempt_after_heartbeat",
    "attempt_heard_of",
    "attempt_with_status",
    "claim_limit",
    "dequeue_sync",
    "end_time_of",
    "expired_status",
    "heartbeat_after_update",
    "is_finished",
    "is_limited",
    "is_queued",
    "new_attempt",
    "new_resources",
    "new_rollout",
    "next_resources",
    "outcome_status",
    "rollout_after_attempt",
    "rollout_after_heartbeat",
    "rollout_with_status",
    "status_after_attempt",
    "status_after_heartbeat",
    "watch_time",
    "worker_after_attempt",
    "worker_after_claim",
    "worker_after_empty_dequeue",
    "worker_after_heartbeat",
    "worker_follows",
    "worker_sync",
]

OUTCOME: Final[dict[AttemptStatus, RolloutStatus]] = {
    "preparing": "preparing",
    "running": "running",
    "succeeded": "succeeded",
}
"""What the status of its latest attempt makes of a rollout; any other status is a failure, which may be retried."""

WORKER_STATUS: Final[dict[AttemptStatus, WorkerStatus]] = {
    "preparing": "busy",
    "running": "busy",
    "succeeded": "idle",
    "failed": "idle",
    "timeout": "unknown",
    "unresponsive": "unknown",
}
"""What the status of its attempt makes of a worker (section 8); a busy one is tied to the attempt, others to none."""

ATTEMPT_ENDED: Final[frozenset[AttemptStatus]] = frozenset({"failed", "succeeded"})
"""Statuses that stamp an attempt's end time; the watchdog's verdicts do not (section 12, entry 14)."""

HEARTBEAT_ATTEMPT: Final[dict[AttemptStatus, AttemptStatus]] = {"preparing": "running", "unresponsive": "running"}
"""What a heartbeat makes of an attempt; a status that is not a key stays."""

HEARTBEAT_ROLLOUT: Final[dict[RolloutStatus, RolloutStatus]] = {"preparing": "running", "requeuing": "running"}
"""What a sign of life of its latest attempt makes of a rollout; a status that is not a key stays."""


def is_queued(status: RolloutStatus) -> bool:
    """Whether a rollout of this status stands in the queue."""
    return status in ROLLOUT_QUEUED


def is_finished(status: RolloutStatus) -> bool:
    """Whether a rollout of this status has an outcome."""
    return status in ROLLOUT_FINISHED


def has_finished(before: Rollout, after: Rollout) -> bool:
    """Whether a change of a rollout gave it an outcome, or another one."""
    return after.status != before.status and is_finished(after.status)


def end_time_of(status: RolloutStatus, now: float) -> float | None:
    """The end time of a rollout that takes this status now."""
    return now if is_finished(status) else None


def outcome_status(
    attempt_status: AttemptStatus, sequence_id: int, max_attempts: int, retry_condition: Collection[str]
) -> RolloutStatus:
    """The rollout status that follows from the status and number of its latest attempt (section 7.5)."""
    outcome = OUTCOME.get(attempt_status)
    if outcome is not None:
        return outcome
    return "requeuing" if attempt_status in retry_condition and sequence_id < max_attempts else "failed"


def new_rollout(
    request: EnqueueRolloutRequest, status: RolloutStatus, latest_resources_id: str | None, now: float
) -> Rollout:
    """A rollout as it is created (section 7.1); without resources of its own it gets the latest, if there are any."""
    return Rollout(
        rollout_id=new_rollout_id(),
        input=request.input,
        start_time=now,
        mode=request.mode,
        resources_id=latest_resources_id if request.resources_id is None else request.resources_id,
        status=status,
        config=RolloutConfig() if request.config is None else request.config.model_copy(deep=True),
        metadata={} if request.metadata is None else request.metadata,
    )


def rollout_with_status(rollout: Rollout, status: RolloutStatus, now: float) -> Rollout:
    """The rollout with this status: an outcome stamps its end, any other status clears it (section 12, entry 11)."""
    return rollout.model_copy(update={"status": status, "end_time": end_time_of(status, now)})


def status_after_attempt(
    status: RolloutStatus,
    attempt_status: AttemptStatus,
    sequence_id: int,
    max_attempts: int,
    retry_condition: Collection[str],
    *,
    lost: bool = False,
) -> RolloutStatus:
    """As `rollout_after_attempt`, from bare values to a rollout's status.

    `lost`: claims have a limit, and nothing was heard of this attempt. If it is unresponsive, it was a claim whose
    caller never had it: the rollout is queued again whatever its retry settings, unless it has an outcome.
    """
    if status == "cancelled":
        return status
    if lost and attempt_status == "unresponsive" and not is_finished(status):
        return "requeuing"
    return outcome_status(attempt_status, sequence_id, max_attempts, retry_condition)


def rollout_after_attempt(
    rollout: Rollout, attempt: Attempt, now: float, claim_timeout: float | None = None
) -> Rollout:
    """The rollout after an update of its latest attempt; the same object when nothing follows.

    A cancelled rollout stays cancelled: only an explicit status or a new attempt leaves it (section 12, entry 11).
    """
    config = rollout.config
    status = status_after_attempt(
        rollout.status,
        attempt.status,
        attempt.sequence_id,
        config.max_attempts,
        config.retry_condition,
        lost=claim_timeout is not None and attempt.last_heartbeat_time is None,
    )
    return rollout if status == rollout.status else rollout_with_status(rollout, status, now)


def new_attempt(rollout_id: str, sequence_id: int, worker_id: str | None, now: float) -> Attempt:
    """Attempt number `sequence_id` of a rollout, starting now."""
    return Attempt(
        rollout_id=rollout_id,
        attempt_id=new_attempt_id(),
        sequence_id=sequence_id,
        start_time=now,
        worker_id=worker_id,
    )


def attempt_with_status(attempt: Attempt, status: AttemptStatus, now: float) -> Attempt:
    """The attempt with this status; its end time is stamped by `failed` and `succeeded` and else left as it is."""
    changes: dict[str, Any] = {"status": status}
    if status in ATTEMPT_ENDED:
        changes["end_time"] = now
    return attempt.model_copy(update=changes)


def attempt_heard_of(attempt: Attempt, now: float) -> Attempt:
    """The attempt after an update, where claims have a limit: its first heartbeat, unless it does not live."""
    heartbeat = heartbeat_after_update(attempt.status, attempt.last_heartbeat_time, now)
    return attempt.model_copy(update={"last_heartbeat_time": heartbeat})


def heartbeat_after_update(status: AttemptStatus, last_heartbeat_time: float | None, now: float) -> float | None:
    """As `attempt_heard_of`, from bare values to the attempt's last heartbeat."""
    return now if last_heartbeat_time is None and status in ATTEMPT_ACTIVE else last_heartbeat_time


def attempt_after_heartbeat(attempt: Attempt, now: float) -> Attempt:
    """The attempt after a span of it was stored (section 7.6): alive again unless its end is known."""
    status = HEARTBEAT_ATTEMPT.get(attempt.status, attempt.status)
    return attempt.model_copy(update={"last_heartbeat_time": now, "status": status})


def status_after_heartbeat(status: RolloutStatus, attempt_status: AttemptStatus) -> RolloutStatus:
    """As `rollout_after_heartbeat`, from bare values to a rollout's status."""
    return HEARTBEAT_ROLLOUT.get(status, status) if attempt_status == "running" else status


def rollout_after_heartbeat(rollout: Rollout, attempt: Attempt, now: float) -> Rollout:
    """The rollout after its latest attempt got a heartbeat; the same object when nothing follows.

    `attempt` is as the heartbeat left it. A dead one (`failed`, `timeout`, `succeeded`) cannot undo a
    retry (section 12, entry 10).
    """
    status = status_after_heartbeat(rollout.status, attempt.status)
    return rollout if status == rollout.status else rollout_with_status(rollout, status, now)


def is_limited(config: RolloutConfig, claim_timeout: float | None = None) -> bool:
    """Whether the watchdog has anything to look for in a rollout of this config."""
    limits = (config.timeout_seconds, config.unresponsive_seconds, claim_timeout)
    return any(limit is not None for limit in limits)


def watch_time(
    timeout_seconds: float | None,
    unresponsive_seconds: float | None,
    start_time: float,
    last_heartbeat_time: float | None,
    claim_timeout: float | None = None,
) -> float | None:
    """The earliest time at which an attempt can be over a limit of its rollout; None when it has no limit.

    `claim_timeout` is how long nothing need be heard after a claim, None once something was heard of the attempt.
    """
    last_sign = start_time if last_heartbeat_time is None else last_heartbeat_time
    limits = [
        begun + limit
        for begun, limit in (
            (start_time, timeout_seconds),
            (last_sign, unresponsive_seconds),
            (start_time, claim_timeout),
        )
        if limit is not None
    ]
    due = [limit for limit in limits if not math.isnan(limit)]
    return min(due) if due else None


def claim_limit(attempt: Attempt, claim_timeout: float | None) -> float | None:
    """The limit on the silence after a claim, None when it holds no longer for this attempt."""
    return claim_timeout if attempt.status == "preparing" and attempt.last_heartbeat_time is None else None


def expired_status(
    rollout: Rollout, attempt: Attempt, now: float, claim_timeout: float | None = None
) -> AttemptStatus | None:
    """The watchdog's verdict on the latest attempt of a rollout, or None (section 7.8).

    A claim that came to nobody is not judged as an attempt: its own limit comes before those of the rollout.
    """
    if rollout.status not in ROLLOUT_ACTIVE:
        return None
    silence = claim_limit(attempt, claim_timeout)
    if silence is not None and now - attempt.start_time > silence:
        return "unresponsive"
    config = rollout.config
    if config.timeout_seconds is not None and now - attempt.start_time > config.timeout_seconds:
        return "timeout"
    last_sign = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
    if config.unresponsive_seconds is not None and now - last_sign > config.unresponsive_seconds:
        return "unresponsive"
    return None


def worker_follows(changes: Mapping[str, Any]) -> bool:
    """Whether an attempt update with these changes is passed on to the attempt's worker (section 8)."""
    return bool(changes.get("worker_id")) or "status" in changes


def worker_sync(status: AttemptStatus, rollout_id: str, attempt_id: str, now: float) -> dict[str, Any]:
    """What changes in the worker that an attempt is tied to, after the attempt changed (section 8)."""
    if status in ATTEMPT_ACTIVE:
        return {
            "status": WORKER_STATUS[status],
            "last_busy_time": now,
            "current_rollout_id": rollout_id,
            "current_attempt_id": attempt_id,
        }
    return {
        "status": WORKER_STATUS[status],
        "last_idle_time": now,
        "current_rollout_id": None,
        "current_attempt_id": None,
    }


def worker_after_attempt(worker: Worker, attempt: Attempt, now: float) -> Worker:
    """The worker that an attempt is tied to, after the attempt changed (section 8)."""
    return worker.model_copy(update=worker_sync(attempt.status, attempt.rollout_id, attempt.attempt_id, now))


def dequeue_sync(last_attempt: tuple[str, str] | None, worker_status: WorkerStatus, now: float) -> dict[str, Any]:
    """What changes in a worker that dequeued; it got attempts, the last of these ids (rollout, attempt), or nothing.

    Of several claims it is tied to the last. After an empty dequeue its current ids are left (section 12, entry 13).
    """
    changes: dict[str, Any] = {"last_dequeue_time": now}
    if last_attempt is not None:
        changes |= worker_sync("preparing", *last_attempt, now)
    elif worker_status != "idle":
        changes |= {"status": "idle", "last_idle_time": now}
    return changes


def worker_after_claim(worker: Worker, last_attempt: Attempt, now: float) -> Worker:
    """The worker after a dequeue that gave it something."""
    claimed = last_attempt.rollout_id, last_attempt.attempt_id
    return worker.model_copy(update=dequeue_sync(claimed, worker.status, now))


def worker_after_empty_dequeue(worker: Worker, now: float) -> Worker:
    """The worker after a dequeue that found nothing."""
    return worker.model_copy(update=dequeue_sync(None, worker.status, now))


def worker_after_heartbeat(worker: Worker, now: float, stats: dict[str, Any] | None) -> Worker:
    """The worker after a heartbeat of its own; `stats` None keeps what was reported before."""
    changes: dict[str, Any] = {"last_heartbeat_time": now}
    if stats is not None:
        changes["heartbeat_stats"] = stats
    return worker.model_copy(update=changes)


def _write_time(now: float, latest: ResourcesUpdate | None) -> float:
    """A time for a write of resources that is later than every write before it.

    "Latest" is the order of writes, not of clocks (section 12, entry 30), so a clock that stands
    still or steps back is overruled by the smallest step that a float can make.
    """
    return now if latest is None else max(now, math.nextafter(latest.update_time, math.inf))


def new_resources(
    resources_id: str, resources: NamedResources, now: float, latest: ResourcesUpdate | None
) -> ResourcesUpdate:
    """Version 1 of a set of resources; `latest` is the most recently written set of all, if any."""
    written = _write_time(now, latest)
    return ResourcesUpdate(
        resources_id=resources_id, create_time=written, update_time=written, version=1, resources=resources
    )


def next_resources(
    current: ResourcesUpdate, resources: NamedResources, now: float, latest: ResourcesUpdate | None
) -> ResourcesUpdate:
    """The next version of a set of resources; `latest` is the most recently written set of all, if any."""
    return ResourcesUpdate(
        resources_id=current.resources_id,
        create_time=current.create_time,
        update_time=_write_time(now, latest),
        version=current.version + 1,
        resources=resources,
    )
