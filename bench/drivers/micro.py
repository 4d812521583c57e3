"""The requests of `bench.micro` that no other driver makes."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import aiohttp
import msgspec
from yarl import URL

from bench.drivers.calls import CallFailedError, Claim
from bench.drivers.lean import LeanCalls
from bench.payloads import enqueue_body
from bench.processes import BenchError

_START: Final = json.dumps(enqueue_body(1)["rollouts"][0]).encode()
_SCRAPER: Final = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


class _Attempt(msgspec.Struct):
    attempt_id: str
    rollout_id: str


class _Started(msgspec.Struct):
    rollout_id: str
    status: str
    attempt: _Attempt


class _Worker(msgspec.Struct):
    worker_id: str
    heartbeat_stats: dict[str, int]


class _Counted(msgspec.Struct):
    total: int


class MicroCalls(LeanCalls):
    """Raw requests to the server at an address, `http://host:port`."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self._metrics = URL(f"{base_url}/v1/prometheus/")

    async def connect(self, connections: int) -> None:
        """Open so many connections to a server that answers.

        Raises:
            BenchError: it does not, or asks for a token.
        """
        url = URL(f"{self._protocol}/statistics")
        try:
            statuses = await asyncio.gather(*(self._get(url) for _ in range(connections)))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise BenchError(f"no store answers at {_address(url)}: {error or type(error).__name__}") from None
        for status, body in statuses:
            if status in (401, 403):
                raise BenchError(f"the store at {_address(url)} asks for a token, and this benchmark sends none")
            if status != 200:
                raise BenchError(f"{_address(url)} answered {status} to {url.path}: {body[:100]!r}")

    async def _get(self, url: URL) -> tuple[int, bytes]:
        async with self._session.get(url) as response:
            return response.status, await response.read()

    async def _get_from(self, url: URL) -> bytes:
        status, body = await self._get(url)
        if status != 200:
            raise CallFailedError(f"{url.path} answered {status}: {body[:200]!r}")
        return body

    async def queued(self) -> int:
        """How many rollouts wait for a runner."""
        query = [("status_in", "queuing"), ("status_in", "requeuing"), ("limit", "1")]
        body = await self._get_from(URL(f"{self._protocol}/rollouts").with_query(query))
        return msgspec.json.decode(body, type=_Counted).total

    async def start(self) -> Claim:
        """Start a rollout with its first attempt."""
        started = msgspec.json.decode(
            await self._post_to(URL(f"{self._protocol}/rollouts"), _START, 201), type=_Started
        )
        if started.status != "preparing" or started.attempt.rollout_id != started.rollout_id:
            raise CallFailedError(f"a rollout that was not started: {started}")
        return Claim(started.rollout_id, started.attempt.attempt_id)

    async def heartbeat(self, worker_id: str, number: int) -> None:
        """Send a worker's heartbeat."""
        body = b'{"heartbeat_stats": {"number": %d}}' % number
        answer = await self._post_to(URL(f"{self._protocol}/workers/{worker_id}"), body, 200)
        _check_worker(answer, worker_id, number)

    async def worker(self, worker_id: str, number: int) -> None:
        """Read a worker, whose last heartbeat had that number."""
        _check_worker(await self._get_from(URL(f"{self._protocol}/workers/{worker_id}")), worker_id, number)

    async def scrape(self) -> bytes:
        """What Prometheus is answered."""
        async with self._session.get(self._metrics, headers=_SCRAPER) as response:
            body = await response.read()
            if response.status == 404:
                raise CallFailedError("the server shows no metrics: start it with --tracker prometheus")
            if response.status != 200 or b"\nagl_http_total" not in body:
                raise CallFailedError(f"{self._metrics.path} answered {response.status}: {body[:200]!r}")
            return body


def _check_worker(answer: bytes, worker_id: str, number: int) -> None:
    worker = msgspec.json.decode(answer, type=_Worker)
    if worker.worker_id != worker_id or worker.heartbeat_stats != {"number": number}:
        raise CallFailedError(f"heartbeat {number} of {worker_id} answered {worker}")


def _address(url: URL) -> str:
    """A server as it may be shown: without a user and a password."""
    return str(url.with_user(None).origin())
