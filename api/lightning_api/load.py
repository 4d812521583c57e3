"""How much one process has taken on, and when it takes no more.

What is refused is answered at once, with 503 and `Retry-After`, and costs little; what is taken is answered soon,
because not much is before it. Without bounds every call would be taken, and each wait longer than its caller does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from typing_extensions import override

from lightning_sql.errors import OverloadedError

__all__ = ["CLAIM_PATH", "Load", "Places"]

FEW_CALLS: Final = 256
"""So many calls may be worked on at once, however long they take."""
MANY_CALLS: Final = 32
"""While so many are worked on, a process does what it can."""
LINE_SECONDS: Final = 1.0
"""About how long a call may have to wait for those before it."""
LOOK_SECONDS: Final = 0.25
"""How often it is reckoned how many calls end in that time."""
PAUSE_SECONDS: Final = 5.0
"""When nothing has ended for so long, that is not for want of speed."""
MOST_WAITS: Final = 10_000
"""Calls that wait for rollouts to finish, or to be queued, which cost some memory and nothing else."""
MOST_DOWNLOADS: Final = 32
"""Answers of a megabyte or more that are on their way, of each of which up to 8 MB are in memory."""
KEPT_SHARE: Final = 0.25
"""Which share of the places is not for claims. Whoever claims asks again; whoever has work done, and cannot say so
soon, gives up and has done it in vain."""
CLAIM_PATH: Final = "/v1/agl/queues/rollouts/dequeue"


class Places:
    """So many may be at something at once."""

    __slots__ = ("most", "taken")

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    @property
    def are_full(self) -> bool:
        """Whether there is none left."""
        return self.taken >= self.most

    def take(self) -> None:
        """Take one, which must be given back.

        Raises:
            OverloadedError: there is none left.
        """
        if self.are_full:
            raise OverloadedError(f"{self.taken} calls are in flight already; try again later")
        self.taken += 1

    def give_back(self) -> None:
        """Give one back."""
        self.taken -= 1


class Calls(Places):
    """Places of calls, of which there are as many as end in about a second, within bounds.

    What takes a millisecond can stand in a long line; where calls take long, whoever comes next is better told at
    once. How fast they end shows only while many are worked on, for a few say nothing of what a process could do. While
    none ends at all, as when the database is away for a moment, the line may grow.

    Args:
        most: how many there are at most.
        few: how many there always are.
        clock: seconds of any origin.
    """

    __slots__ = ("_clock", "_ended", "_few", "_in_line", "_last", "_lately", "_since")

    def __init__(self, most: int, few: int = FEW_CALLS, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(most)
        self._few = few
        self._clock = clock
        self._in_line = most
        """How many may be worked on, as far as is known."""
        self._lately: deque[float] = deque(maxlen=round(LINE_SECONDS / LOOK_SECONDS))
        """How many calls ended in a second, each time it was reckoned; a pause of a moment is not yet slowness."""
        self._since: float | None = None
        """Since when ends are counted; None while few calls are worked on."""
        self._ended = 0
        self._last = clock()

    @property
    @override
    def are_full(self) -> bool:
        return self.are_full_with(0)

    def are_full_with(self, more: int, kept_share: float = 0.0) -> bool:
        """Whether there would be none left once so many more are taken, and a share of all is kept for others."""
        taken = self.taken + more + int(self._in_line * kept_share)
        if taken < self._in_line:
            return False
        return taken >= self.most or self._clock() - self._last < PAUSE_SECONDS

    @override
    def give_back(self) -> None:
        super().give_back()
        now = self._clock()
        paused = now - self._last >= PAUSE_SECONDS
        self._last = now
        if self.taken < MANY_CALLS:
            self._since = None
            return
        if self._since is None or paused:
            self._since, self._ended = now, 0
            return
        self._ended += 1
        elapsed = now - self._since
        if elapsed >= LOOK_SECONDS:
            self._lately.append(self._ended / elapsed)
            self._in_line = min(self.most, max(self._few, int(max(self._lately) * LINE_SECONDS)))
            self._since, self._ended = now, 0


class Load:
    """What all endpoints of a process have taken on together.

    Args:
        most_calls: how many calls may be worked on at once. A call counts from when its body is there until its
            answer is made: callers who are slow to send or to read take no place of others.
        most_bytes: how large the bodies of all calls in flight may be together.
    """

    __slots__ = ("bytes", "calls", "downloads", "expected", "most_bytes", "refused", "waits")

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self.calls = Calls(most_calls)
        self.waits = Places(MOST_WAITS)
        self.downloads = Places(MOST_DOWNLOADS)
        self.most_bytes = most_bytes
        self.bytes = 0
        self.refused = 0
        """Calls that were refused before they cost anything, and that nobody has counted yet."""
        self.expected = 0
        """Calls that have come in this turn of the event loop, and take their places in the next."""

    @property
    def is_nearly_full(self) -> bool:
        """Whether claims are refused, once the calls that are expected are there; no other is, unless this is so."""
        return self.calls.are_full_with(self.expected, KEPT_SHARE) or self.bytes >= self.most_bytes

    @property
    def will_be_full(self) -> bool:
        """Whether every call is refused, once those that are expected are there."""
        return self.calls.are_full_with(self.expected) or self.bytes >= self.most_bytes

    def is_full(self, path: str) -> bool:
        """Whether a call that would be worked on now is to be refused."""
        kept = KEPT_SHARE if path == CLAIM_PATH else 0.0
        return self.calls.are_full_with(0, kept) or self.bytes >= self.most_bytes

    def expect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reckon with one call more, until those that have come have taken their places."""
        if not self.expected:
            # The turn after the next: in between, each is begun, and that is when most take theirs.
            loop.call_soon(loop.call_soon, self._forget_expected)
        self.expected += 1

    def _forget_expected(self) -> None:
        self.expected = 0

    def check(self, size: int) -> None:
        """See whether there is room for so many bytes more.

        Raises:
            OverloadedError: there is not.
        """
        if self.bytes + size > self.most_bytes:
            raise OverloadedError(f"bodies of {self.bytes} bytes are in flight already; try again later")

    def hold(self, size: int) -> None:
        """Keep so many bytes of a body, which must be dropped again. Raises as `check` does."""
        self.check(size)
        self.bytes += size

    def drop(self, size: int) -> None:
        """Keep so many bytes no longer."""
        self.bytes -= size
