"""The calls of an algorithm and of its runners, each counted and timed by its kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import uniform
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from bench.drivers.calls import CallFailedError, Claim
from bench.drivers.lean import LeanCalls
from bench.families import FAILURES, Tally

T = TypeVar("T")

TURNED_AWAY_AT_MOST: Final = 10
"""How often a call may be turned away before that is a failure."""
LONGEST_PAUSE: Final = 5.0
_OTLP: Final = {"Content-Type": "application/x-protobuf"}
_SNAPSHOT: Final = {
    "timestamp": "2026-01-01T00:00:00",
    "host": "bench",
    "os": "Linux-6.1.0-x86_64-with-glibc2.36",
    "cpu_name": "",
    "cpu_cores": 2,
    "cpu_threads": 2,
    "cpu_usage_pct": 51.5,
    "mem_used_gb": 7.25,
    "mem_total_gb": 23.5,
    "mem_pct": 31.0,
    "disk_used_gb": 52.13,
    "disk_total_gb": 251.95,
    "disk_pct": 20.7,
    "bytes_sent_mb": 1024.25,
    "bytes_recv_mb": 2048.5,
}
"""What a heartbeat says of a machine: the fields of the upstream runner's."""
_HEARTBEAT: Final = json.dumps({"heartbeat_stats": _SNAPSHOT}).encode()
_RESOURCES: Final = json.dumps(
    {
        "llm": {
            "resource_type": "llm",
            "endpoint": "http://localhost:8000/v1",
            "model": "policy-7b",
            "api_key": None,
            "sampling_parameters": {"temperature": 0.7},
        }
    }
).encode()


class Work(msgspec.Struct):
    """A rollout that a runner has claimed."""

    rollout_id: str
    resources_id: str | None
    input: Any
    attempt: _Attempt

    @property
    def claim(self) -> Claim:
        """What ends it."""
        return Claim(self.rollout_id, self.attempt.attempt_id)


class _Attempt(msgspec.Struct):
    attempt_id: str


class StoredSpan(msgspec.Struct):
    """What is checked of a span; `attributes` are JSON."""

    span_id: str
    attempt_id: str
    sequence_id: int
    name: str
    attributes: msgspec.Raw


class _Resources(msgspec.Struct):
    resources_id: str


class _Worker(msgspec.Struct):
    worker_id: str


class _SpanPage(msgspec.Struct):
    items: list[StoredSpan]


class _Rollout(msgspec.Struct):
    rollout_id: str
    status: str


class _Page(msgspec.Struct):
    total: int


_WORK: Final = msgspec.json.Decoder(list[Work])
_RESOURCES_UPDATE: Final = msgspec.json.Decoder(_Resources | None)
_WORKER: Final = msgspec.json.Decoder(_Worker)
_ROLLOUTS: Final = msgspec.json.Decoder(list[_Rollout])
_SPANS: Final = msgspec.json.Decoder(_SpanPage)
_PAGE: Final = msgspec.json.Decoder(_Page)


class TurnedAwayError(CallFailedError):
    """The server has too much to do, and says when to come back.

    Attributes:
        after: in how many seconds.
    """

    def __init__(self, path: str, after: float) -> None:
        super().__init__(f"{path} was turned away")
        self.after = after


class RolloutCalls(LeanCalls):
    """The requests that upstream's client makes for an algorithm and for a runner, as bare bytes."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self._base = base_url
        self._traces = URL(f"{base_url}/v1/traces")

    async def claim(self, worker_id: str) -> Work | None:
        """Claim a rollout; None when the queue is empty."""
        body = b'{"limit": 1, "worker_id": "%b"}' % worker_id.encode()
        claimed = _WORK.decode(await self._post("/queues/rollouts/dequeue", body))
        return claimed[0] if claimed else None

    async def resources(self, resources_id: str | None) -> str:
        """Read the resources of a rollout, the latest if it names none; returns their id."""
        url = URL(f"{self._protocol}/resources/{resources_id or 'latest'}", encoded=True)
        async with self._session.get(url) as response:
            found = _RESOURCES_UPDATE.decode(await _read(response, 200))
        if found is None:
            raise CallFailedError(f"{url.path} answered that there are none")
        return found.resources_id

    async def export(self, body: bytes) -> None:
        """Send spans as OTLP."""
        async with self._session.post(self._traces, data=body, headers=_OTLP) as response:
            answer = await _read(response, 200)
        # An answer with something in it says that spans were refused.
        if answer:
            raise CallFailedError(f"/v1/traces answered {answer[:200]!r}")

    async def _post_to(self, url: URL, body: bytes, expected: int) -> bytes:
        async with self._session.post(url, data=body) as response:
            return await _read(response, expected)

    async def heartbeat(self, worker_id: str) -> None:
        """Say that a worker lives, and what its machine is doing."""
        url = URL(f"{self._protocol}/workers/{worker_id}", encoded=True)
        answered = _WORKER.decode(await self._post_to(url, _HEARTBEAT, 200)).worker_id
        if answered != worker_id:
            raise CallFailedError(f"the heartbeat of {worker_id} answered {answered}")

    async def add_resources(self) -> str:
        """Add new resources, which become the latest; returns their id."""
        answer = await self._post_to(URL(f"{self._protocol}/resources"), _RESOURCES, 201)
        found = _RESOURCES_UPDATE.decode(answer)
        assert found is not None
        return found.resources_id

    async def enqueue_inputs(self, inputs: Sequence[str]) -> list[str]:
        """Enqueue a rollout for each input in one request; returns their ids."""
        rest = {"mode": "train", "resources_id": None, "config": None, "metadata": None}
        body = json.dumps({"rollouts": [{"input": one} | rest for one in inputs]}).encode()
        rollouts = _ROLLOUTS.decode(await self._post("/queues/rollouts/enqueue", body, 201))
        if len(rollouts) != len(inputs) or any(rollout.status != "queuing" for rollout in rollouts):
            raise CallFailedError(f"enqueueing {len(inputs)} answered {len(rollouts)} rollouts")
        return [rollout.rollout_id for rollout in rollouts]

    async def queued(self) -> int:
        """How many rollouts are in the queue."""
        query = {"status_in": ["queuing", "requeuing"], "limit": 1, "offset": 0}
        return _PAGE.decode(await self._post("/rollouts/search", json.dumps(query).encode())).total

    async def statuses(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        """The status of each of the rollouts, finished or not."""
        query = {"rollout_id_in": list(rollout_ids), "limit": -1, "offset": 0}
        answer = json.loads(await self._post("/rollouts/search", json.dumps(query).encode()))
        return {item["rollout_id"]: item["status"] for item in answer["items"]}

    async def stored_spans(self, rollout_id: str) -> list[StoredSpan]:
        """All spans of a rollout, by their sequence ids."""
        order = {"sort_by": "sequence_id", "sort_order": "asc", "filter_logic": "and"}
        query = {"rollout_id": rollout_id, "limit": -1, "offset": 0} | order
        return _SPANS.decode(await self._post("/spans/search", json.dumps(query).encode())).items


async def _read(response: aiohttp.ClientResponse, expected: int) -> bytes:
    answer = await response.read()
    if response.status == 503 and (after := response.headers.get("Retry-After")) is not None:
        raise TurnedAwayError(response.url.path, float(after))
    if response.status != expected:
        raise CallFailedError(f"{response.url.path} answered {response.status}: {answer[:200]!r}")
    return answer


def pause_after(error: TurnedAwayError, times: int) -> float:
    """For how many seconds to stay away when a call was turned away after it had been so many times before."""
    return min(error.after * 2**times, LONGEST_PAUSE) * uniform(0.75, 1.25)


class Requests:
    """Makes calls, and counts and times them by their kind.

    A call that is turned away is made again after as long as the server says, twice that the next time, and so on up to
    five seconds; one whose connection broke is made again at once, since a server may close one that was idle at the
    moment at which it is used again. So do upstream's client and its exporter of spans, about; like that client's, a
    claim is not made again: its runner polls anyway.

    Attributes:
        tallies: of the calls by kind; what a call took includes its repetitions.
        repeated: how many were made again because their connection broke.
        turned_away: how often a call was turned away.
    """

    def __init__(self) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.repeated = 0
        self.turned_away = 0

    async def make(self, kind: str, call: Callable[[], Awaitable[T]], *, harmless: bool = True) -> T | None:
        """The answer to a call, None when it failed, which is counted.

        Args:
            harmless: whether to make it twice does no more than to make it once.
        """
        return await self._counted(kind, self._made(call, harmless))

    async def _made(self, call: Callable[[], Awaitable[T]], harmless: bool) -> T:
        broken, refused = not harmless, None
        for times in range(TURNED_AWAY_AT_MOST):
            try:
                return await call()
            except TurnedAwayError as error:
                self.turned_away += 1
                refused = error
                await asyncio.sleep(pause_after(error, times))
            except aiohttp.ClientConnectionError:
                if broken:
                    raise
                broken = True
                self.repeated += 1
        raise CallFailedError(f"{refused or 'a call'} {TURNED_AWAY_AT_MOST} times")

    async def make_once(
        self, kind: str, call: Callable[[], Awaitable[T]], *, kind_of: Callable[[T], str] | None = None
    ) -> T | None:
        """The same for a call that is not made again.

        Args:
            kind_of: the kind it is counted as when that depends on the answer.

        Raises:
            TurnedAwayError: it was, and has not failed.
        """
        try:
            return await self._counted(kind, call(), kind_of)
        except TurnedAwayError:
            self.turned_away += 1
            raise

    async def _counted(self, kind: str, call: Awaitable[T], kind_of: Callable[[T], str] | None = None) -> T | None:
        started = time.perf_counter()
        try:
            answer = await call
        except TurnedAwayError:
            raise
        except FAILURES as error:
            self.tallies[kind].fail(f"{kind}: {type(error).__name__}: {error}")
            return None
        self.tallies[kind_of(answer) if kind_of else kind].succeed(time.perf_counter() - started)
        return answer

    @property
    def failed(self) -> int:
        """How many calls of all kinds failed."""
        return sum(tally.failed for tally in self.tallies.values())

    def as_json(self) -> dict[str, Any]:
        """What another process makes the tallies of with `add_json`."""
        counts = {"repeated": self.repeated, "turned_away": self.turned_away}
        return counts | {"tallies": {kind: tally.as_json() for kind, tally in self.tallies.items()}}

    def add_json(self, given: Mapping[str, Any]) -> None:
        """Count what another process has counted too."""
        self.repeated += given["repeated"]
        self.turned_away += given["turned_away"]
        for kind, tally in given["tallies"].items():
            self.tallies[kind].add(Tally.from_json(tally))
