"""Many calls of the protocol in one request, each as if it had come alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Literal, cast
from urllib.parse import unquote

import msgspec
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope
from typing_extensions import override

from lightning_api.calls import Call
from lightning_api.errors import InvalidPartError, problem_of, reply_to_error
from lightning_api.operations import Input, Operation, operation
from lightning_api.replies import Headers, Reply
from lightning_api.routes.bulk import NDJSON

__all__ = ["CALLS_PATH", "MOST_CALLS", "OPERATIONS"]

CALLS_PATH: Final = "/v1/lightning/calls"
MOST_CALLS: Final = 128
"""How many calls one request may have."""
MOST_ANSWER_BYTES: Final = 1024 * 1024
"""How much of what a call reads goes together with other answers. Alone, it need not be in memory as a whole."""
_INHERITED: Final = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "litestar_app", "app")
"""What a call has of the request that it came in: nothing that has to do with where that is routed to."""
_INHERITED_HEADERS: Final = frozenset({b"host", b"accept", b"authorization"})


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """What is asked for; the body is in the next line."""

    method: Literal["GET", "POST"]
    path: str
    """With the query, escaped as in a request."""
    key: str | None = None
    """The idempotency key."""


_decoder: Final = msgspec.json.Decoder(_Line)


def _invalid(kind: str, place: int, message: str) -> InvalidPartError:
    return InvalidPartError("body", [{"type": kind, "loc": (place,), "msg": message, "input": None}])


class _CallLines(Input[list[tuple[_Line, bytes]]]):
    """Two lines for each call: what it asks for, and its body, which may be empty."""

    @override
    async def read(self, call: Call) -> list[tuple[_Line, bytes]]:
        lines = (await call.body()).split(b"\n")
        if not lines[-1]:
            lines.pop()
        if not lines or len(lines) > 2 * MOST_CALLS:
            raise _invalid("too_long" if lines else "too_short", 0, f"There must be 1 to {MOST_CALLS} calls")
        if len(lines) % 2:
            raise _invalid("missing", len(lines), "Every call has two lines, the second of which may be empty")
        return [(_line(place, lines[place]), lines[place + 1]) for place in range(0, len(lines), 2)]


def _line(place: int, text: bytes) -> _Line:
    try:
        line = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _invalid("value_error", place, "Input should be an object of method, path and perhaps key") from None
    if not (
        line.path.startswith("/v1/agl/") and line.path.isascii() and line.path.isprintable() and " " not in line.path
    ):
        raise _invalid("value_error", place, "The path should be one below /v1/agl/, escaped as in a request")
    if line.key is not None and not (line.key.isascii() and line.key.isprintable()):
        raise _invalid("value_error", place, "An idempotency key is 1 to 512 printable ASCII characters")
    return line


def _scope(inherited: Mapping[str, Any], headers: Headers, line: _Line) -> HTTPScope:
    path, _, query = line.path.partition("?")
    if line.key is not None:
        headers = (*headers, (b"idempotency-key", line.key.encode()))
    own = {"method": line.method, "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()}
    return cast(HTTPScope, {**inherited, **own, "headers": headers, "state": {}})


class _Answer:
    """Takes what one call is answered.

    Args:
        most_bytes: how large it may be; None is as large as it is.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.too_large = asyncio.Event()
        self._most_bytes = most_bytes
        self._size = 0
        self._status = 0
        self._retry_after: int | None = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            for name, value in message["headers"]:
                if name == b"retry-after" and value.isdigit():
                    self._retry_after = int(value)
        elif message["type"] == "http.response.body":
            self._size += len(message["body"])
            if self._most_bytes is not None and self._size > self._most_bytes:
                self._parts.clear()
                self.too_large.set()
                return
            self._parts.append(message["body"])

    def lines(self) -> bytes:
        """The two lines of the answer."""
        if self.too_large.is_set():
            return b'{"status":413}\n{"detail":"the answer is to be asked for alone"}\n'
        # A line break that JSON has outside of its texts is a space.
        body = b"".join(self._parts).replace(b"\n", b" ")
        if self._retry_after is None:
            return b'{"status":%d}\n%b\n' % (self._status, body)
        return b'{"status":%d,"retry_after":%d}\n%b\n' % (self._status, self._retry_after, body)


def _receiver(body: bytes, gone: asyncio.Event) -> Receive:
    is_read = False

    async def receive() -> Any:
        nonlocal is_read
        if is_read:
            # That the client has gone is else the affair of the request that this call came in.
            await gone.wait()
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _answered(app: ASGIApp, scope: HTTPScope, body: bytes) -> bytes:
    answer = _Answer(MOST_ANSWER_BYTES if _is_repeatable(scope) else None)
    try:
        await app(cast(Scope, scope), _receiver(body, answer.too_large), cast(Any, answer.send))
    except Exception as error:  # noqa: BLE001 - the other calls have their answers, and the log the rest
        answer = _Answer()
        await reply_to_error(error).send(cast(Any, answer.send))
    return answer.lines()


def _is_repeatable(scope: HTTPScope) -> bool:
    """Whether a call only reads, so that it may be made again alone."""
    return scope["method"] == "GET" or scope["path"].endswith(("/search", "/waits/rollouts"))


def _to_error(_call: Call, error: Exception) -> Reply:
    return problem_of(error)


@operation(
    "POST",
    CALLS_PATH,
    _CallLines(),
    media_type=NDJSON,
    errors=(422, 503),
    to_error=_to_error,
    problems=True,
    hot=True,
    places="none",  # each of them takes its own
)
async def call_together(call: Call, lines: list[tuple[_Line, bytes]]) -> Reply:
    """Make several calls at once; each has a status of its own, 413 where a large answer is to be asked for alone."""
    outer = cast(Mapping[str, Any], call.scope)
    inherited = {name: outer[name] for name in _INHERITED if name in outer}
    json = (b"content-type", b"application/json")
    headers = (*(header for header in call.scope["headers"] if header[0] in _INHERITED_HEADERS), json)
    app = call.service.dispatch
    answers = await asyncio.gather(*(_answered(app, _scope(inherited, headers, line), body) for line, body in lines))
    return Reply(200, b"".join(answers), ((b"content-type", NDJSON.encode()),))


OPERATIONS: Final[tuple[Operation, ...]] = (call_together,)
