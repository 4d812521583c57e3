"""One client's connection to a service: requests, retries, and errors in our words."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel
from yarl import URL

from lightning_api.client_together import CALLS_PATH, Answered, Asked, CallBatches, read_answers, written
from lightning_sql.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    IdempotencyKeyReusedError,
    InvalidRequestError,
    LightningError,
    RecordNotFoundError,
    UnstorableValueError,
)
from lightning_sql.loops import PerLoop

__all__ = ["Transport", "displayed_address", "encoded"]

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0
_UNAVAILABLE: Final = frozenset({408, 429, 502, 503, 504})
_PROTOCOL: Final = "/v1/agl/"
_LINES: Final = "application/x-ndjson"
_REUSED: Final = "idempotency_key_reused"
"""The type of the problem that is `IdempotencyKeyReusedError`."""
_KEEP_ALIVE_SECONDS: Final = 3.0
"""Less than a server waits on an idle connection, so that a write does not meet one that is just closing."""


def displayed_address(url: str) -> str:
    """The address of a service as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _fields(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return vars(value) | (value.model_extra or {})
    raise InvalidRequestError(f"a {type(value).__name__} has no JSON form")


_encode: Final = json.JSONEncoder(default=_fields, separators=(",", ":")).encode


def encoded(content: Any) -> bytes:
    """Something as the body of a request.

    Raises:
        InvalidRequestError: it has no JSON form.
    """
    try:
        return _encode(content).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"this cannot be written as JSON: {error}") from error


def _reason(body: bytes) -> tuple[str, bool]:
    """What a failure says, and whether it is that an idempotency key belongs to another call."""
    try:
        content = json.loads(body)
        detail = content["detail"]
        problems: Any = content.get("errors", ()) if isinstance(detail, str) else detail
        reused = any(problem.get("type") == _REUSED for problem in problems)
        if isinstance(detail, str):
            return detail, reused
        return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems), reused
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", False


def _error(status: int, body: bytes) -> LightningError:
    reason, reused = _reason(body)
    match status:
        case 422 if reused:
            return IdempotencyKeyReusedError()
        case 400 | 422:
            return InvalidRequestError(reason or None)
        case 401 | 403:
            return ConfigurationError("the service does not accept this token")
        case 404:
            return RecordNotFoundError(reason or None)
        case 413:
            return UnstorableValueError("the request is larger than the service accepts")
        case _:
            return LightningError(f"the service failed with status {status}: {reason}")


def _new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class _UnavailableError(DatabaseUnavailableError):
    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds."""

    def again(self) -> _UnavailableError:
        """The same for somebody else, since each raises one of their own."""
        other = _UnavailableError(str(self), self.retry_after)
        other.__cause__ = self.__cause__
        return other


class Transport:
    """Requests to one service, in a session for each event loop, which its first request opens.

    A request is made again while the service cannot be reached or answers that it is not available, as
    long as `retry_seconds` after it failed first.

    Raises:
        ConfigurationError: the URL names a user and there is a token, where only one of them can be sent.
    """

    def __init__(self, base_url: str, token: str | None, timeout: aiohttp.ClientTimeout, retry_seconds: float) -> None:
        self.base_url = base_url.rstrip("/")
        # This client reads what Python writes: non-finite floats as they are, not as null.
        self._headers = {"accept": "application/json; floats=exact"}
        if token is not None:
            if "@" in urlsplit(self.base_url).netloc:
                raise ConfigurationError("the address of the service names a user: give it a token or a user, not both")
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._retry_seconds = retry_seconds
        self._takes_calls = True
        """Whether the service takes many calls in one request, as far as is known."""
        self._connect_nowhere()

    def _connect_nowhere(self) -> None:
        self._sessions = PerLoop(_new_session, self.close)
        self._batches = PerLoop(lambda: CallBatches(self._request, self._together))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_sessions", "_batches")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect_nowhere()

    async def close(self) -> None:
        """Close the session of this event loop; a later request opens another one."""
        session = self._sessions.get()
        if session is not None:
            await self._sessions.forget()
            await session.close()

    async def read(self, method: str, path: str, content: Any = None, *, extra_seconds: float = 0.0) -> Any:
        """The answer to a request that changes nothing.

        Raises:
            DatabaseUnavailableError: the service stays unavailable.
            LightningError: what the service answered, as the error that it stands for.
        """
        answer, _ = await self._persistently(method, path, content, None, extra_seconds)
        return answer

    async def find(self, path: str) -> Any:
        """What a path names, or None. Else as `read`."""
        try:
            answer, _ = await self._persistently("GET", path, None, None)
        except RecordNotFoundError:
            return None
        return answer

    async def once(self, method: str, path: str) -> Any:
        """As `read`, but not made again."""
        return self._content(await self._request(Asked(method, path, None, None)))

    async def write(self, path: str, content: Any, *, key: str | None = None) -> Any:
        """The answer to a request that changes something, which the service can tell from others by a key.

        Raises as `read` does.
        """
        answer, _ = await self._persistently("POST", path, content, key)
        return answer

    async def write_again(
        self,
        path: str,
        content: Any,
        *,
        key: str | None = None,
        repeatable: bool = True,
        extra_seconds: float = 0.0,
    ) -> tuple[Any, bool]:
        """As `write`; the answer, and whether it is that of a repeat, so that an earlier try may have taken place.

        What is not `repeatable` is made again only if it was never sent.
        """
        return await self._persistently("POST", path, content, key, extra_seconds, repeatable=repeatable)

    async def _persistently(
        self,
        method: str,
        path: str,
        content: Any,
        key: str | None,
        extra_seconds: float = 0.0,
        *,
        repeatable: bool = True,
    ) -> tuple[Any, bool]:
        # Written once, so that a repeat is the same to the last byte.
        body = content if content is None or isinstance(content, bytes) else encoded(content)
        asked = Asked(method, path, body, key)
        # What waits on purpose would keep others waiting, and what is large goes better alone.
        joins = not extra_seconds and path.startswith(_PROTOCOL)
        deadline: float | None = None
        pause = _FIRST_PAUSE_SECONDS
        repeated = False
        while True:
            try:
                if joins and self._takes_calls:
                    answered = await self._batches.here().call(asked)
                else:
                    answered = await self._request(asked, extra_seconds)
                answer = self._content(answered)
            except _UnavailableError as error:
                wait = max(pause, error.retry_after) * random.uniform(0.5, 1.0)
                unsent = isinstance(error.__cause__, aiohttp.ClientConnectorError)
                if deadline is None:
                    # From now on: what waits on purpose may have been under way for long.
                    deadline = time.monotonic() + self._retry_seconds
                if time.monotonic() + wait > deadline or not (repeatable or unsent):
                    raise DatabaseUnavailableError(str(error)) from error.__cause__
                await asyncio.sleep(wait)
            else:
                return answer, repeated
            repeated = True
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _request(self, asked: Asked, extra_seconds: float = 0.0) -> Answered:
        """Raises `_UnavailableError` if there is no answer."""
        headers = self._headers
        if asked.body is not None:
            headers = headers | {"content-type": _LINES if asked.path == CALLS_PATH else "application/json"}
        if asked.key is not None:
            headers = headers | {"idempotency-key": asked.key}
        timeout = self._timeout
        if extra_seconds and timeout.total is not None:
            timeout = aiohttp.ClientTimeout(total=timeout.total + extra_seconds, sock_connect=timeout.sock_connect)
        # Already escaped: a second pass would change what is escaped in an id.
        url = URL(self.base_url + asked.path, encoded=True)
        try:
            # A stream, because bytes of more than a megabyte would be sent in one piece.
            data = None if asked.body is None else io.BytesIO(asked.body)
            async with self._sessions.here().request(
                asked.method, url, data=data, headers=headers, timeout=timeout
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            where = displayed_address(self.base_url)
            raise _UnavailableError(f"the service at {where} cannot be reached") from error
        retry_after = response.headers.get("retry-after", "")
        return Answered(response.status, float(retry_after) if retry_after.isdecimal() else 0.0, answer)

    async def _together(self, calls: Sequence[Asked]) -> Sequence[Answered | Exception]:
        """What each of several calls is answered, asked for in one request if the service takes that."""
        if len(calls) > 1 and self._takes_calls:
            try:
                answered = await self._request(Asked("POST", CALLS_PATH, written(calls), None))
            except _UnavailableError as error:
                return [error.again() for _ in calls]
            if answered.status == 200:
                return read_answers(answered.body, len(calls))
            if answered.status in _UNAVAILABLE:
                return [answered] * len(calls)
            if answered.status in (404, 405):  # another server of the protocol, which does not have this
                self._takes_calls = False
            # Alone, what is wrong with a call has a name.
        return await asyncio.gather(*(self._alone(asked) for asked in calls))

    async def _alone(self, asked: Asked) -> Answered | Exception:
        try:
            return await self._request(asked)
        except _UnavailableError as error:
            return error

    @staticmethod
    def _content(answered: Answered) -> Any:
        """What an answer says.

        Raises:
            DatabaseUnavailableError: the service is not available.
            LightningError: what the service answered, as the error that it stands for.
        """
        status, retry_after, body = answered
        if status in _UNAVAILABLE:
            reason, _ = _reason(body)
            raise _UnavailableError(f"the service is not available (status {status}) {reason}".rstrip(), retry_after)
        if status >= 300:
            raise _error(status, body)
        return json.loads(body.decode(errors="surrogatepass"))
