"""Upstream's own client, unmodified. Runs in the environment that it is installed in."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.drivers.calls import CallFailedError, Claim
from bench.payloads import SPAN_BYTES, enqueue_body, rollout_input, span
from bench.upstream_package import prepare_upstream_package

prepare_upstream_package()

from agentlightning.store.client_server import LightningStoreClient  # noqa: E402
from agentlightning.types import EnqueueRolloutRequest, Span  # noqa: E402


class UpstreamCalls:
    """`LightningStoreClient` at an address, with its defaults."""

    def __init__(self, base_url: str) -> None:
        self._client = LightningStoreClient(base_url)

    async def close(self) -> None:
        await self._client.close()

    async def enqueue(self, count: int = 1) -> list[str]:
        if count == 1:
            rollouts = [await self._client.enqueue_rollout(rollout_input())]
        else:
            requests = [EnqueueRolloutRequest(**one) for one in enqueue_body(count)["rollouts"]]
            rollouts = await self._client.enqueue_many_rollouts(requests)
        if len(rollouts) != count or any(rollout.status != "queuing" for rollout in rollouts):
            raise CallFailedError(f"enqueueing {count} answered {rollouts}")
        return [rollout.rollout_id for rollout in rollouts]

    async def dequeue(self, worker_id: str, limit: int = 1) -> list[Claim]:
        if limit == 1:
            one = await self._client.dequeue_rollout(worker_id=worker_id)
            claims = [] if one is None else [one]
        else:
            claims = await self._client.dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        if any(claim.status != "preparing" for claim in claims):
            raise CallFailedError(f"a claim that is none among {claims}")
        return [Claim(claim.rollout_id, claim.attempt.attempt_id) for claim in claims]

    async def next_id(self, claim: Claim) -> int:
        return await self._client.get_next_span_sequence_id(claim.rollout_id, claim.attempt_id)

    async def add_span(self, claim: Claim, number: int) -> None:
        stored = await self._client.add_span(_span(claim, number, SPAN_BYTES))
        if stored is None or stored.sequence_id != number or stored.attempt_id != claim.attempt_id:
            raise CallFailedError(f"span {number} of {claim} answered {stored}")

    async def add_many_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        stored = await self._client.add_many_spans([_span(claim, number, size) for number in numbers])
        if [one.sequence_id for one in stored] != list(numbers):
            raise CallFailedError(f"{len(stored)} of {len(numbers)} spans were stored")

    async def prepare_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        await self.add_many_spans(claim, numbers, size)

    async def finish(self, claim: Claim) -> None:
        attempt = await self._client.update_attempt(claim.rollout_id, claim.attempt_id, status="succeeded")
        if attempt.status != "succeeded" or attempt.attempt_id != claim.attempt_id:
            raise CallFailedError(f"finishing {claim} answered {attempt}")

    async def wait(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        rollouts = await self._client.wait_for_rollouts(rollout_ids=list(rollout_ids), timeout=0.0)
        return {rollout.rollout_id: rollout.status for rollout in rollouts}

    async def page(self, status: str, limit: int) -> tuple[int, int]:
        statuses: Any = [status]
        page = await self._client.query_rollouts(
            status_in=statuses, sort_by="start_time", sort_order="desc", limit=limit
        )
        if any(item.status != status for item in page.items):
            raise CallFailedError(f"a page of {status} rollouts holds others")
        return len(page.items), page.total

    async def spans(self, rollout_id: str) -> int:
        page = await self._client.query_spans(rollout_id)
        if page.total != len(page.items):
            raise CallFailedError(f"{len(page.items)} spans, said to be {page.total}")
        return page.total


def _span(claim: Claim, number: int, size: int) -> Span:
    return Span.model_validate(span(claim.rollout_id, claim.attempt_id, number, size))
