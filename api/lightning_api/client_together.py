"""Calls of a client that go to the service together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from lightning_sql.errors import LightningError

__all__ = ["CALLS_PATH", "Answered", "Asked", "CallBatches", "read_answers", "written"]

CALLS_PATH: Final = "/v1/lightning/calls"
MOST_CALLS: Final = 128
"""How many calls one request takes at most."""
SMALL_BYTES: Final = 64 * 1024
"""A larger body goes alone: what it costs is its size, and others would wait for it."""
MOST_BYTES: Final = 1024 * 1024
"""About how large the bodies of one request are together."""
_TOO_LARGE: Final = 413
"""Said of an answer that does not go together with others."""
_LONGEST_WAIT_SECONDS: Final = 0.02
"""How long calls wait for a request before them, which may be slow, until they go nonetheless."""


_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    body: bytes | None
    key: str | None


class Answered(NamedTuple):
    """An answer."""

    status: int
    retry_after: float
    """Seconds."""
    body: bytes


def written(calls: Sequence[Asked]) -> bytes:
    """The body of a request for several calls: two lines for each."""
    lines: list[bytes] = []
    for call in calls:
        line = {"method": call.method, "path": call.path}
        if call.key is not None:
            line["key"] = call.key
        lines += _encode(line).encode(), b"\n", call.body or b"", b"\n"
    return b"".join(lines)


def read_answers(body: bytes, calls: int) -> list[Answered]:
    """What each of so many calls was answered.

    Raises:
        LightningError: this says something else.
    """
    lines = body.split(b"\n")
    answers: list[Answered] = []
    try:
        if len(lines) != 2 * calls + 1:
            raise ValueError
        for head, content in zip(lines[:-1:2], lines[1::2], strict=True):
            told = json.loads(head.decode())
            answers.append(Answered(told["status"], float(told.get("retry_after", 0.0)), content))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LightningError("the service answers several calls with what cannot be read") from None
    return answers


class CallBatches:
    """The calls of one event loop: those that come while others are on their way go in the next request.

    Args:
        alone: makes a call in a request of its own.
        together: makes several in one; each has an answer, or an error of its own.
    """

    def __init__(
        self,
        alone: Callable[[Asked], Awaitable[Answered]],
        together: Callable[[Sequence[Asked]], Awaitable[Sequence[Answered | Exception]]],
    ) -> None:
        self._alone = alone
        self._together = together
        self._waiting: list[tuple[Asked, asyncio.Future[Answered]]] = []
        self._requests = 0
        """How many are on their way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, asked: Asked) -> Answered:
        """Make a call, as soon as it is its turn."""
        if asked.body is not None and len(asked.body) > SMALL_BYTES:
            return await self._alone(asked)
        if not self._requests:
            self._requests += 1
            try:
                return await self._alone(asked)
            finally:
                self._requests -= 1
                self._send_waiting()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answered] = loop.create_future()
        self._waiting.append((asked, future))
        if self._timer is None:
            self._timer = loop.call_later(_LONGEST_WAIT_SECONDS, self._waited)
        answered = await future
        return await self._alone(asked) if answered.status == _TOO_LARGE else answered

    def _waited(self) -> None:
        self._timer = None
        self._send_waiting()

    def _send_waiting(self) -> None:
        batch = self._next()
        if batch:
            self._requests += 1
            task = asyncio.get_running_loop().create_task(self._send(batch), name="lightning-sql calls")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_WAIT_SECONDS, self._waited)

    def _next(self) -> list[tuple[Asked, asyncio.Future[Answered]]]:
        """The next calls that somebody still waits for."""
        batch: list[tuple[Asked, asyncio.Future[Answered]]] = []
        size = 0
        taken = 0
        for asked, future in self._waiting:
            if len(batch) == MOST_CALLS or size > MOST_BYTES:
                break
            taken += 1
            if not future.done():
                batch.append((asked, future))
                size += len(asked.body or b"")
        del self._waiting[:taken]
        return batch

    async def _send(self, batch: Sequence[tuple[Asked, asyncio.Future[Answered]]]) -> None:
        answers: Sequence[Answered | Exception]
        try:
            try:
                answers = await self._together([asked for asked, _ in batch])
            except Exception as error:  # noqa: BLE001 - it is their callers' error
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue  # whoever waited for it is gone
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            await asyncio.sleep(0)  # their callers may have something to ask for next, which goes together again
        finally:
            for _, future in batch:
                future.cancel()  # unless it is done
            self._requests -= 1
            self._send_waiting()
