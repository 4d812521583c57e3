"""One client's connection to a service: requests, retries of reads, and errors in our words."""

from __future__ import annotations

import asyncio
import io
import json
import random
from typing import Any, Final, cast

import aiohttp
from pydantic import BaseModel
from yarl import URL

from lightning_sql.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidRequestError,
    LightningError,
    RecordNotFoundError,
    UnstorableValueError,
)

__all__ = ["Transport"]

_RETRY_PAUSES: Final = (0.1, 0.3, 1.0)
"""Seconds before each further try of a read."""
_KEEP_ALIVE_SECONDS: Final = 3.0
"""Less than a server waits on an idle connection, so that a write does not meet one that is just closing."""


def _fields(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return vars(value) | (value.model_extra or {})
    raise InvalidRequestError(f"a {type(value).__name__} has no JSON form")


def _reason(body: bytes) -> str:
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError):
        return ""
    if isinstance(detail, str):
        return detail
    problems = [
        f"{'.'.join(str(step) for step in problem['loc'])}: {problem['msg']}" for problem in cast(list[Any], detail)
    ]
    return "; ".join(problems)


def _error(status: int, reason: str) -> LightningError:
    match status:
        case 400 | 422:
            return InvalidRequestError(reason or None)
        case 401 | 403:
            return ConfigurationError("the service does not accept this token")
        case 404:
            return RecordNotFoundError(reason or None)
        case 413:
            return UnstorableValueError("the request is larger than the service accepts")
        case 408 | 429 | 502 | 503 | 504:
            return DatabaseUnavailableError(f"the service is not available (status {status}) {reason}".rstrip())
        case _:
            return LightningError(f"the service failed with status {status}: {reason}")


class Transport:
    """Requests to one service, in one session, which the first request opens."""

    def __init__(self, base_url: str, token: str | None, timeout: aiohttp.ClientTimeout) -> None:
        self.base_url = base_url.rstrip("/")
        # This client reads what Python writes: non-finite floats as they are, not as null.
        self._headers = {"accept": "application/json; floats=exact"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_session": None}

    async def close(self) -> None:
        """Close the session; a later request opens another one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read(self, method: str, path: str, content: Any = None, *, extra_seconds: float = 0.0) -> Any:
        """The answer to a request that changes nothing, tried again while the service is not available.

        Raises:
            DatabaseUnavailableError: it stays unavailable.
            LightningError: what the service answered, as the error that it stands for.
        """
        for pause in _RETRY_PAUSES:
            try:
                return await self._request(method, path, content, extra_seconds)
            except DatabaseUnavailableError:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        return await self._request(method, path, content, extra_seconds)

    async def find(self, path: str) -> Any:
        """What a path names, or None. Else as `read`."""
        try:
            return await self.read("GET", path)
        except RecordNotFoundError:
            return None

    async def write(self, path: str, content: Any) -> Any:
        """The answer to a request that changes something, tried once. Raises as `read` does."""
        return await self._request("POST", path, content)

    async def _request(self, method: str, path: str, content: Any, extra_seconds: float = 0.0) -> Any:
        headers = self._headers
        body: bytes | None = None
        if content is not None:
            body = json.dumps(content, default=_fields, separators=(",", ":")).encode()
            headers = headers | {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(
            total=None if self._timeout.total is None else self._timeout.total + extra_seconds,
            sock_connect=self._timeout.sock_connect,
        )
        # Already escaped: a second pass would change what is escaped in an id.
        url = URL(self.base_url + path, encoded=True)
        try:
            # A stream, because bytes of more than a megabyte would be sent in one piece.
            data = None if body is None else io.BytesIO(body)
            async with self._open().request(method, url, data=data, headers=headers, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise DatabaseUnavailableError(f"the service at {self.base_url} cannot be reached") from error
        if response.status >= 300:
            raise _error(response.status, _reason(answer))
        return json.loads(answer)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session
