"""CPU time of whole process trees."""

from __future__ import annotations

import psutil


def tree_seconds(pid: int) -> float:
    """User and system seconds that a process, its living children and its reaped ones have used.

    What a process reaped is counted by it, so a child that ends meanwhile is in the sum before and after.
    """
    total = 0.0
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def parent_of(pid: int) -> int | None:
    """The parent of a process of this machine, None when there is no such process here."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None
