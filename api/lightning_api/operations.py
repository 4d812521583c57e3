"""What a route is: a method and a path, what it reads, what it answers, and the code between.

Litestar routes to an operation; the endpoint itself is bare ASGI. Litestar's own per-request
machinery would cost about as much as the work of a call, and the protocol's bodies, nulls and errors
are not the ones that it would produce. An operation may have a lean way besides, from the bytes of a
body to rows of the store and back, for requests that are as clients write them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl

from litestar.types import HTTPScope, Receive, Scope, Send
from pydantic import BaseModel, TypeAdapter, ValidationError

from lightning_api.calls import Call, ClientGoneError, Service, is_json
from lightning_api.compression import COMPRESS_BYTES
from lightning_api.counting import note_route
from lightning_api.errors import NOT_JSON, InvalidPartError, reply_to_error
from lightning_api.payloads import decode_json
from lightning_api.replies import Reply, Stream
from lightning_api.sending import send_large, send_stream
from lightning_sql.errors import OverloadedError
from lightning_sql.store.row_store import RowStore

if TYPE_CHECKING:
    pass

__all__ = [
    "Endpoint",
    "JsonBody",
    "Lean",
    "Nothing",
    "Operation",
    "QueryString",
    "operation",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
M = TypeVar("M", bound=BaseModel)

Method: TypeAlias = Literal["GET", "POST"]

PlaceKind: TypeAlias = Literal["calls", "waits", "none"]
DOWNLOAD_BYTES: Final = 1024 * 1024
"""An answer of this size counts as a download."""


class Input(Protocol[T_co]):
    """Where an operation takes its input from."""

    async def read(self, call: Call) -> T_co:
        """The validated input.

        Raises:
            InvalidPartError: it does not fit its schema.
        """
        ...


class Nothing:
    """No input but the path; a body is ignored."""

    async def read(self, call: Call) -> None:
        """Nothing to read."""


class JsonBody(Generic[T]):
    """A JSON body.

    Args:
        schema: the type it must have.
        default: makes what stands for an absent or null body; without it the body is required.
        more_types: the schemas of the other media types in which it may be written.
    """

    def __init__(
        self,
        schema: Any,
        *,
        default: Callable[[], T] | None = None,
        more_types: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.schema = schema
        self.default = default
        self.more_types = more_types or {}
        self._adapter: TypeAdapter[T] = TypeAdapter(schema)

    async def read(self, call: Call) -> T:
        """The body, checked as FastAPI checks it (CONTRACT.md section 1)."""
        raw = await call.body()
        if not raw:
            if self.default is not None:
                return self.default()
            raise InvalidPartError("body", [{"type": "missing", "loc": (), "msg": "Field required", "input": None}])
        value = decode_json(raw) if is_json(call.header(b"content-type")) else NOT_JSON
        if value is None and self.default is not None:
            return self.default()
        try:
            return self._adapter.validate_python(value, from_attributes=True)
        except ValidationError as error:
            raise InvalidPartError.of("body", error) from None


class QueryString(Generic[M]):
    """Query parameters; those whose field is a list may be repeated, of others the last one counts."""

    def __init__(self, model: type[M]) -> None:
        self.model = model
        properties: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
        self._lists = frozenset(
            name
            for name, schema in properties.items()
            if any(branch.get("type") == "array" for branch in (schema, *schema.get("anyOf", ())))
        )

    async def read(self, call: Call) -> M:
        """The parameters."""
        values: dict[str, Any] = {}
        raw = call.scope["query_string"]
        if raw:
            for name, value in parse_qsl(raw.decode("latin-1"), keep_blank_values=True):
                if name in self._lists:
                    values.setdefault(name, []).append(value)
                else:
                    values[name] = value
        try:
            return self.model.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            for detail in details:
                if detail["type"] == "missing":
                    detail["input"] = None
            raise InvalidPartError("query", cast(list[dict[str, Any]], details)) from None


Lean: TypeAlias = Callable[[Call, RowStore], Awaitable[Reply | None]]
"""Answers a request from rows, or gives None where the handler must look at it; until then nothing has happened."""


def _to_error(_call: Call, error: Exception) -> Reply:
    return reply_to_error(error)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: everything that serving and documenting it takes."""

    name: str
    method: Method
    path: str
    """With parameters in braces: `/workers/{worker_id}`."""
    source: Input[Any]
    handler: Callable[[Call, Any], Awaitable[Any]]
    """From a call and its input to what is answered: a `Reply`, or something with a JSON form."""
    summary: str
    status: int = 200
    returns: Any = None
    """The type of the answer, for its schema."""
    errors: tuple[int, ...] = ()
    """Statuses of failures that only some operations have: 400, 404, 503."""
    tag: str = "store"
    to_error: Callable[[Call, Exception], Reply] = _to_error
    media_type: str = "application/json"
    lean: Lean | None = None
    """The shorter way of most requests, where the store has rows."""
    problems: bool = False
    """Whether failures are answered as problem details."""
    hot: bool = False
    """Whether it is called so often that finding its route is worth a shortcut."""
    keyed: bool = False
    """Whether it takes an idempotency key."""
    places: PlaceKind = "calls"
    """What it counts as while it is in flight."""


def operation(
    method: Method,
    path: str,
    source: Input[T],
    *,
    returns: Any = None,
    status: int = 200,
    errors: Sequence[int] = (),
    tag: str = "store",
    to_error: Callable[[Call, Exception], Reply] = _to_error,
    media_type: str = "application/json",
    lean: Lean | None = None,
    problems: bool = False,
    hot: bool = False,
    keyed: bool = False,
    places: PlaceKind = "calls",
) -> Callable[[Callable[[Call, T], Awaitable[Any]]], Operation]:
    """Make a coroutine function the handler of a route. Its docstring becomes the summary."""

    def declare(handler: Callable[[Call, T], Awaitable[Any]]) -> Operation:
        return Operation(
            name=handler.__name__,
            method=method,
            path=path,
            source=source,
            handler=handler,
            summary=(handler.__doc__ or "").strip(),
            status=status,
            returns=returns,
            errors=tuple(errors),
            tag=tag,
            media_type=media_type,
            to_error=to_error,
            lean=lean,
            problems=problems,
            hot=hot or lean is not None,
            keyed=keyed,
            places=places,
        )

    return declare


class Endpoint:
    """An operation as an ASGI application.

    Args:
        declared: the operation.
        service: what it works on.
        fixed: path parameters that the path has as literal segments.
    """

    __slots__ = ("_fixed", "_operation", "_places", "_service")

    def __init__(self, declared: Operation, service: Service, fixed: Mapping[str, str] | None = None) -> None:
        self._operation = declared
        self._service = service
        self._fixed = fixed
        load = service.load
        self._places = {"calls": load.calls, "waits": load.waits, "none": None}[declared.places]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service = self._service
        path: Mapping[str, str] = scope["path_params"]
        parameters = {**path, **self._fixed} if self._fixed else path
        if service.recorder is not None:
            note_route(scope, self._operation.path, parameters)
        call = Call(service, cast(HTTPScope, scope), receive, parameters, self._places)
        try:
            reply = await self._reply(call)
            if reply is not None:
                await self._send(call, reply, send)
        finally:
            call.end()

    async def _reply(self, call: Call) -> Reply | Stream | None:
        """The answer; None if nobody is there any more to take it."""
        declared = self._operation
        hangups = self._service.hangups
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        hangups.begin(call, task)
        try:
            if declared.method == "GET":  # of which nobody reads a body
                call.enter()
            reply: Reply | Stream | None = None
            if declared.lean is not None and (rows := self._service.store.rows) is not None:
                reply = await declared.lean(call, rows)
            if reply is None:
                answer = await declared.handler(call, await declared.source.read(call))
                reply = answer if isinstance(answer, Reply | Stream) else call.reply(declared.status, answer)
        except ClientGoneError:
            return None
        except asyncio.CancelledError:
            if not hangups.left(call):
                raise
            task.uncancel()
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer, and the log the rest
            return declared.to_error(call, error)
        finally:
            hangups.end(call)
        return reply

    async def _send(self, call: Call, reply: Reply | Stream, send: Send) -> None:
        """Send the answer, in whose way no other call is: whoever takes it slowly takes no place of theirs."""
        call.leave()
        if isinstance(reply, Reply) and len(reply.body) < COMPRESS_BYTES:
            await reply.send(send)
            return
        coding = self._service.compression.coding(call.scope)
        if isinstance(reply, Reply) and len(reply.body) < DOWNLOAD_BYTES:
            await send_large(reply, send, coding)
            return
        downloads = self._service.load.downloads
        try:
            downloads.take()
        except OverloadedError as error:
            if isinstance(reply, Stream):
                await reply.close()
            await self._operation.to_error(call, error).send(send)
            return
        try:
            if isinstance(reply, Stream):
                await send_stream(reply, send, coding, call.client_gone)
            else:
                await send_large(reply, send, coding)
        finally:
            downloads.give_back()
