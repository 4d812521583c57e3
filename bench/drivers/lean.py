"""The requests of upstream's client as bare bytes on an aiohttp session, answers checked without models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from bench.drivers.calls import CallFailedError, Claim, NotAvailableError
from bench.payloads import SPAN_BYTES, enqueue_body, span_name, span_template

_HEADERS: Final = {"Content-Type": "application/json", "Accept": "*/*", "Accept-Encoding": "identity"}
_FINISHED: Final = b'{"status": "succeeded"}'


class _Rollout(msgspec.Struct):
    rollout_id: str
    status: str


class _Attempt(msgspec.Struct):
    rollout_id: str
    attempt_id: str
    status: str


class _Claimed(msgspec.Struct):
    rollout_id: str
    status: str
    attempt: _Attempt


class _Next(msgspec.Struct):
    sequence_id: int


class _Span(msgspec.Struct):
    rollout_id: str
    attempt_id: str
    span_id: str


class _Page(msgspec.Struct):
    items: list[_Rollout]
    total: int


class _PlainPage(msgspec.Struct):
    items: list[_Rollout]


class _SpanPage(msgspec.Struct):
    items: list[_Span]
    total: int


class _Result(msgspec.Struct):
    status: str


class _Results(msgspec.Struct):
    results: list[_Result]


_ROLLOUTS: Final = msgspec.json.Decoder(list[_Rollout])
_CLAIMS: Final = msgspec.json.Decoder(list[_Claimed])
_NEXT: Final = msgspec.json.Decoder(_Next)
_SPAN: Final = msgspec.json.Decoder(_Span | None)
_ATTEMPT: Final = msgspec.json.Decoder(_Attempt)
_PAGE: Final = msgspec.json.Decoder(_Page)
_PLAIN_PAGE: Final = msgspec.json.Decoder(_PlainPage)
_SPAN_PAGE: Final = msgspec.json.Decoder(_SpanPage)
_RESULTS: Final = msgspec.json.Decoder(_Results)


@cache
def _enqueue(count: int) -> bytes:
    return json.dumps(enqueue_body(count)).encode()


_template = cache(span_template)


def span_body(claim: Claim, number: int, size: int = SPAN_BYTES) -> bytes:
    """The JSON of a span, put together from what was prepared."""
    first, second, third, fourth, last = _template(size)
    rollout, attempt = claim.rollout_id.encode(), claim.attempt_id.encode()
    return b"".join((first, rollout, second, attempt, third, b"%d" % number, fourth, b"%016x" % number, last))


class LeanCalls:
    """Raw requests to the server at an address."""

    def __init__(self, base_url: str) -> None:
        self._protocol = f"{base_url}/v1/agl"
        self._urls = {
            path: URL(f"{self._protocol}{path}")
            for path in (
                *("/queues/rollouts/enqueue", "/queues/rollouts/dequeue", "/spans", "/spans/next"),
                *("/waits/rollouts", "/rollouts/search", "/spans/search"),
            )
        }
        self._own = URL(f"{base_url}/v1/lightning")
        self._session = aiohttp.ClientSession(
            headers=_HEADERS,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=60),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def _post(self, path: str, body: bytes, expected: int = 200) -> bytes:
        return await self._post_to(self._urls[path], body, expected)

    async def _post_to(self, url: URL, body: bytes, expected: int) -> bytes:
        async with self._session.post(url, data=body) as response:
            answer = await response.read()
            if response.status != expected:
                raise CallFailedError(f"{url.path} answered {response.status}: {answer[:200]!r}")
            return answer

    async def enqueue(self, count: int = 1) -> list[str]:
        rollouts = _ROLLOUTS.decode(await self._post("/queues/rollouts/enqueue", _enqueue(count), 201))
        if len(rollouts) != count or any(rollout.status != "queuing" for rollout in rollouts):
            raise CallFailedError(f"enqueueing {count} answered {rollouts}")
        return [rollout.rollout_id for rollout in rollouts]

    async def dequeue(self, worker_id: str, limit: int = 1) -> list[Claim]:
        body = b'{"limit": %d, "worker_id": "%b"}' % (limit, worker_id.encode())
        claims = _CLAIMS.decode(await self._post("/queues/rollouts/dequeue", body))
        for claim in claims:
            if claim.attempt.rollout_id != claim.rollout_id or claim.status != "preparing":
                raise CallFailedError(f"a claim that is none: {claim}")
        return [Claim(claim.rollout_id, claim.attempt.attempt_id) for claim in claims]

    async def next_id(self, claim: Claim) -> int:
        body = b'{"rollout_id": "%b", "attempt_id": "%b"}' % (claim.rollout_id.encode(), claim.attempt_id.encode())
        return _NEXT.decode(await self._post("/spans/next", body)).sequence_id

    async def add_span(self, claim: Claim, number: int) -> None:
        await self._add_span(claim, number, SPAN_BYTES)

    async def _add_span(self, claim: Claim, number: int, size: int) -> None:
        stored = _SPAN.decode(await self._post("/spans", span_body(claim, number, size), 201))
        if stored is None or stored.span_id != span_name(number) or stored.attempt_id != claim.attempt_id:
            raise CallFailedError(f"span {number} of {claim} answered {stored}")

    async def add_many_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        for number in numbers:
            await self._add_span(claim, number, size)

    async def prepare_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        try:
            await self.bulk(claim, numbers, size, lines=False)
        except NotAvailableError:
            await self.add_many_spans(claim, numbers, size)

    async def finish(self, claim: Claim) -> None:
        url = URL(f"{self._protocol}/rollouts/{claim.rollout_id}/attempts/{claim.attempt_id}", encoded=True)
        attempt = _ATTEMPT.decode(await self._post_to(url, _FINISHED, 200))
        if attempt.status != "succeeded" or attempt.attempt_id != claim.attempt_id:
            raise CallFailedError(f"finishing {claim} answered {attempt}")

    async def wait(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        body = json.dumps({"rollout_ids": list(rollout_ids), "timeout": 0.0}).encode()
        rollouts = _ROLLOUTS.decode(await self._post("/waits/rollouts", body))
        return {rollout.rollout_id: rollout.status for rollout in rollouts}

    async def page(self, status: str, limit: int) -> tuple[int, int]:
        query: dict[str, Any] = {
            "status_in": [status],
            "filter_logic": "and",
            "limit": limit,
            "offset": 0,
            "sort_by": "start_time",
            "sort_order": "desc",
        }
        page = _PAGE.decode(await self._post("/rollouts/search", json.dumps(query).encode()))
        _check_statuses(page.items, status)
        return len(page.items), page.total

    async def spans(self, rollout_id: str) -> int:
        query = {
            "rollout_id": rollout_id,
            "limit": -1,
            "offset": 0,
            "filter_logic": "and",
            "sort_by": "sequence_id",
            "sort_order": "asc",
        }
        page = _SPAN_PAGE.decode(await self._post("/spans/search", json.dumps(query).encode()))
        if page.total != len(page.items) or any(item.rollout_id != rollout_id for item in page.items):
            raise CallFailedError(f"{len(page.items)} spans, said to be {page.total}")
        return page.total

    async def bulk(self, claim: Claim, numbers: Sequence[int], size: int, *, lines: bool) -> None:
        bodies = [span_body(claim, number, size) for number in numbers]
        body = b"\n".join(bodies) + b"\n" if lines else b'{"spans": [%b]}' % b",".join(bodies)
        kind = {"Content-Type": "application/x-ndjson"} if lines else {}
        async with self._session.post(self._own / "spans", data=body, headers=kind) as response:
            answer = await response.read()
            _check_known(response.status, "bulk spans")
            if response.status not in (200, 201):
                raise CallFailedError(f"bulk spans answered {response.status}: {answer[:200]!r}")
        results = _RESULTS.decode(answer).results
        if len(results) != len(numbers) or any(result.status != "stored" for result in results):
            raise CallFailedError(f"{len(results)} results for {len(numbers)} spans, not all stored")

    async def plain_page(self, status: str, limit: int) -> int:
        query = {
            "status_in": status,
            "sort_by": "start_time",
            "sort_order": "desc",
            "limit": str(limit),
            "total": "false",
        }
        async with self._session.get(self._own / "rollouts", params=query) as response:
            answer = await response.read()
            _check_known(response.status, "a page without its total")
            if response.status != 200:
                raise CallFailedError(f"a page without its total answered {response.status}: {answer[:200]!r}")
        items = _PLAIN_PAGE.decode(answer).items
        _check_statuses(items, status)
        return len(items)


def _check_known(status: int, what: str) -> None:
    if status in (404, 405):
        raise NotAvailableError(f"{what}: answered {status}")


def _check_statuses(items: Sequence[_Rollout], status: str) -> None:
    if any(item.status != status for item in items):
        raise CallFailedError(f"a page of {status} rollouts holds others")
