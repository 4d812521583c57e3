"""One request, and what all requests of an application share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from litestar.types import ASGIApp, HTTPScope, Receive
from pydantic import TypeAdapter, ValidationError

from lightning_api.compression import CompressionPolicy
from lightning_api.errors import BodyTooLargeError, InvalidPartError
from lightning_api.hangups import Hangups
from lightning_api.load import Load, Places
from lightning_api.payloads import encode_json
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_sql.errors import RecordNotFoundError
from lightning_sql.metrics import Recorder
from lightning_sql.records import IdempotencyKey, Identifier
from lightning_sql.store.interface import LightningStore

if TYPE_CHECKING:
    from lightning_api.settings import Settings

__all__ = ["EXACT_FLOATS", "Call", "ClientGoneError", "Service", "is_json"]

EXACT_FLOATS: Final = b"floats=exact"
"""A parameter of the `Accept` header: write `NaN` and `Infinity` as Python does, where JSON has only null."""

_IDEMPOTENCY_KEY: Final = re.compile(rb"[!-~](?:[ -~]{0,510}[!-~])?")
_IDENTIFIER: Final[TypeAdapter[str]] = TypeAdapter(Identifier)


class ClientGoneError(Exception):
    """The client hung up before its request was complete; nobody is there to answer."""


@dataclass(slots=True)
class Service:
    """What all endpoints of one application share. The store is there between its start and its end."""

    settings: Settings
    current_store: LightningStore | None = None
    draining: bool = False
    """Whether the server is about to stop."""
    compression: CompressionPolicy = field(init=False)
    load: Load = field(init=False)
    hangups: Hangups = field(default_factory=Hangups)
    recorder: Recorder | None = None
    """Who takes down what happens; None is nobody."""
    app: ASGIApp | None = None
    """Everything that a request passes, once the application is put together."""
    samples_database: bool = True
    """Whether this process looks at the queue for the metrics; of several, one is enough."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.compression = CompressionPolicy(settings)
        # One body, and what comes of it when it is decompressed, must always find room.
        self.load = Load(settings.max_requests, max(settings.max_request_bytes, 2 * settings.body_limit))

    @property
    def store(self) -> LightningStore:
        """The open store.

        Raises:
            RuntimeError: the application was not started.
        """
        if self.current_store is None:
            raise RuntimeError("the application's lifespan has not started, so there is no store")
        return self.current_store

    @property
    def dispatch(self) -> ASGIApp:
        """What serves a request.

        Raises:
            RuntimeError: the application is not put together yet.
        """
        if self.app is None:
            raise RuntimeError("the application is not put together yet")
        return self.app

    async def drain(self) -> None:
        """Get ready to stop: waiting callers are answered at once."""
        self.draining = True
        if self.current_store is not None:
            await self.current_store.release_waiters()


class Call:
    """One request, which takes one of `places` once its body is there, if it needs one."""

    __slots__ = ("_body", "_held", "_places", "_receive", "_taken", "path", "scope", "service")

    def __init__(
        self,
        service: Service,
        scope: HTTPScope,
        receive: Receive,
        path: Mapping[str, str],
        places: Places | None = None,
    ) -> None:
        self.service = service
        self.scope = scope
        self._receive = receive
        self._body: bytes | None = None
        self._places = places
        self._taken = False
        self._held = 0
        self.path = path

    def enter(self) -> None:
        """Take a place, once.

        Raises:
            OverloadedError: too many calls have theirs.
        """
        if self._places is not None and not self._taken:
            self._places.take()
            self._taken = True

    def begin_waiting(self) -> None:
        """Take a place among those that wait, instead of the one it has.

        Raises:
            OverloadedError: too many wait already.
        """
        self.leave()
        self._places = self.service.load.waits
        self.enter()

    def leave(self) -> None:
        """Give back the place, if there is one."""
        if self._taken and self._places is not None:
            self._taken = False
            self._places.give_back()

    def hold(self, size: int) -> None:
        """Let so many more bytes count for this call, until it is over.

        Raises:
            OverloadedError: there is no room for them.
        """
        self.service.load.hold(size)
        self._held += size

    def end(self) -> None:
        """Give everything back."""
        self.leave()
        if self._held:
            self.service.load.drop(self._held)
            self._held = 0

    @property
    def store(self) -> LightningStore:
        """The open store."""
        return self.service.store

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, its name in lower case; the first one if there are several."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value
        return None

    @property
    def exact(self) -> bool:
        """Whether the caller asks for `floats=exact`."""
        accepted = self.header(b"accept")
        return accepted is not None and EXACT_FLOATS in accepted

    def reply(self, status: int, answer: Any) -> Reply:
        """The answer in JSON: valid to the letter, unless the caller asks for `floats=exact`."""
        return Reply(status, encode_json(answer, exact=self.exact), JSON_HEADERS)

    async def body(self) -> bytes:
        """The whole request body; whoever has it also has a place.

        Raises:
            BodyTooLargeError: it is larger than the service accepts.
            ClientGoneError: it never arrived in full.
            OverloadedError: there is no room for it, or no place.
        """
        if self._body is None:
            self._body = await self._read_body()
            self.enter()
        return self._body

    async def plain_body(self) -> bytes | None:
        """The request body if it is declared as JSON, or empty; else None. Raises as `body` does."""
        body = await self.body()
        return body if not body or is_json(self.header(b"content-type")) else None

    async def _read_body(self) -> bytes:
        limit = self.service.settings.body_limit
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit():
            if int(announced) > limit:
                raise BodyTooLargeError
            self.service.load.check(int(announced))
        chunk, more = await self._read_part(limit)
        if not more:
            return chunk
        chunks = [chunk]
        while more:
            chunk, more = await self._read_part(limit)
            chunks.append(chunk)
        return b"".join(chunks)

    async def _read_part(self, limit: int) -> tuple[bytes, bool]:
        """The next part of the body, and whether there are more."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        chunk = message.get("body", b"")
        if self._held + len(chunk) > limit:
            raise BodyTooLargeError
        self.hold(len(chunk))
        return chunk, message.get("more_body", False)

    async def idempotency_key(self, asked: bytes | None = None) -> IdempotencyKey | None:
        """The key under which this call may be made again, or None.

        Args:
            asked: what a repeat must ask for as well, if that is less than the whole body.

        Raises:
            InvalidPartError: it is not 1 to 512 printable characters of ASCII.
        """
        text = self.header(b"idempotency-key")
        if text is None:
            return None
        if _IDEMPOTENCY_KEY.fullmatch(text) is None:
            problem = {
                "type": "string_pattern_mismatch",
                "loc": ("idempotency-key",),
                "msg": "An idempotency key is 1 to 512 printable ASCII characters",
                "input": None,
            }
            raise InvalidPartError("header", [problem])
        digest = blake2b(await self.body() if asked is None else asked, digest_size=16).hexdigest()
        return IdempotencyKey(text.decode(), f"{self.scope['method']} {self.scope['path']}", digest)

    @property
    def is_read(self) -> bool:
        """Whether nothing more of the request is to be read."""
        return self._body is not None or self.scope["method"] == "GET"

    async def client_gone(self) -> None:
        """Return when the client hung up. For use once the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def known_id(self, name: str) -> str | None:
        """An id in the path, or None where no record can have such an id."""
        try:
            return _IDENTIFIER.validate_python(self.path[name])
        except ValidationError:
            return None

    def existing_id(self, name: str) -> str:
        """An id in the path that a record must have.

        Raises:
            RecordNotFoundError: no record can have such an id.
        """
        identifier = self.known_id(name)
        if identifier is None:
            raise RecordNotFoundError(f"there is nothing with such a {name}")
        return identifier

    def new_id(self, name: str) -> str:
        """An id in the path that a new record may get.

        Raises:
            InvalidPartError: no record can have such an id.
        """
        try:
            return _IDENTIFIER.validate_python(self.path[name])
        except ValidationError as error:
            details = [{**detail, "loc": (name,)} for detail in error.errors(include_url=False)]
            raise InvalidPartError("path", details) from None


def is_json(content_type: bytes | None) -> bool:
    """Whether a content type declares JSON."""
    if content_type == b"application/json":
        return True
    if content_type is None:
        return False
    main, _, sub = content_type.partition(b";")[0].strip().lower().partition(b"/")
    return main == b"application" and (sub == b"json" or sub.endswith(b"+json"))


PlaceKind: TypeAlias = Literal["calls", "waits", "none"]
"""Calls are worked on, waits are not, and some are always answered, whatever else there is to do."""
