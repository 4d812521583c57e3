"""How fast a workload would be if nothing but its sleeps took any time."""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush

from bench.presets import Workload
from bench.traces import steps_of

__all__ = ["sleeps_allow"]


@cache
def sleeps_allow(workload: Workload) -> float:
    """Rollouts a second, from the first enqueue until the last one has ended; infinite if none sleeps.

    A batch that waits for the one before leaves runners idle, and so does a last rollout with many rounds: both are in
    it.
    """
    lengths = [
        sum(step.sleep for step in steps_of(task, workload.max_rounds, workload.sleep_seconds))
        for task in range(workload.total_tasks)
    ]
    now = 0.0
    enqueued = begun = finished = 0
    ends: list[float] = []
    while finished < len(lengths):
        while (more := _enqueues(workload, enqueued - finished)) and enqueued < len(lengths):
            enqueued = min(enqueued + more, len(lengths))
        while begun < enqueued and len(ends) < workload.n_runners:
            heappush(ends, now + lengths[begun])
            begun += 1
        now = heappop(ends)
        finished += 1
    return len(lengths) / now if now else float("inf")


def _enqueues(workload: Workload, unfinished: int) -> int:
    """How many rollouts an algorithm enqueues at once while so many are unfinished."""
    if workload.mode == "single":
        return int(unfinished < (workload.concurrency or 1))
    most = (workload.remaining_tasks or 0) if workload.mode == "batch_partial" else 0
    return (workload.batch_size or 1) if unfinished <= most else 0
