"""Where the front of the queue is, as claims have seen it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["QueueFront"]

FULL_SCAN_SECONDS: Final = 0.5
FRONT_AGE_SECONDS: Final = 0.5
FRONT_NOTE_SECONDS: Final = 0.1


class QueueFront:
    """From which queue position on a claim need look.

    What is claimed leaves dead entries at the front of the queue's index, and while an old snapshot is
    open nothing can clear them away: each claim would pass over all of them. Positions only grow, so
    what was the front a while ago has nothing before it, but for two oddities: a rollout that was
    queued by a statement that took longer than that while, and one whose claim was rolled back. A
    claim that looks at the whole queue finds those: now and then, and when there is nothing behind the front.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = -FULL_SCAN_SECONDS
        self._fronts: deque[tuple[float, int]] = deque()
        self._floor = 0

    def floor(self) -> int:
        """The position after which to look; 0 looks at the whole queue."""
        now = self._clock()
        if now - self._looked >= FULL_SCAN_SECONDS:
            self._looked = now
            return 0
        while self._fronts and now - self._fronts[0][0] >= FRONT_AGE_SECONDS:
            self._floor = self._fronts.popleft()[1] - 1
        return self._floor

    def forget(self) -> None:
        """Look at the whole queue until there are new notes that are old enough."""
        self._fronts.clear()
        self._floor = 0

    def seen(self, position: int) -> None:
        """Note the position of the first rollout that a claim found."""
        now = self._clock()
        # Something old came back, or came late: what was noted behind it is no front for what may follow it.
        while self._fronts and self._fronts[-1][1] > position:
            self._fronts.pop()
        self._floor = min(self._floor, position - 1)
        if not self._fronts or now - self._fronts[-1][0] >= FRONT_NOTE_SECONDS:
            self._fronts.append((now, position))
