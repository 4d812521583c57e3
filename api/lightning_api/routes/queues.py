"""The queue of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from lightning_api.calls import Call
from lightning_api.load import CLAIM_PATH
from lightning_api.models import DequeueRequest, EnqueueRequest
from lightning_api.operations import JsonBody, Operation, operation
from lightning_api.payloads import encode_json
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_api.routes.rollouts import without_attempt
from lightning_api.routes.waits import unless_gone
from lightning_sql.records import AttemptedRollout, IdempotencyKey, Rollout
from lightning_sql.store import documents, row_json
from lightning_sql.store.row_store import RowStore

__all__ = ["OPERATIONS"]

T = TypeVar("T")

_LARGEST_CLAIM: Final = 2**31 - 1


async def _key(call: Call, limit: int, worker_id: str | None) -> IdempotencyKey | None:
    """The key of a claim. A repeat may wait for longer, or less long."""
    return await call.idempotency_key(encode_json([limit, worker_id]))


async def _claimed(call: Call, wait: float, claim: Callable[[float], Coroutine[Any, Any, T]]) -> T:
    """What is claimed, after a wait if one is asked for."""
    if not wait > 0:
        return await claim(0.0)
    # It costs nothing until there is something for it, and then no more than a claim.
    call.begin_waiting()
    return await unless_gone(call, claim(wait))


async def _enqueue_rows(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    drafts = documents.read_rollouts(body) if body else None
    if drafts is None:
        return None
    queued = await rows.enqueue_rows(drafts, await call.idempotency_key())
    return Reply(201, row_json.ROLLOUTS.array(queued, exact=call.exact), JSON_HEADERS)


@operation(
    "POST",
    "/v1/agl/queues/rollouts/enqueue",
    JsonBody[EnqueueRequest](EnqueueRequest),
    returns=list[Rollout],
    status=201,
    errors=(503,),
    tag="queues",
    lean=_enqueue_rows,
    keyed=True,
)
async def enqueue_rollouts(call: Call, request: EnqueueRequest) -> list[Any]:
    """Create rollouts and append them to the queue, all or none."""
    key = await call.idempotency_key()
    rollouts = await call.store.enqueue_many_rollouts(request.rollouts, idempotency_key=key)
    return [without_attempt(rollout) for rollout in rollouts]


async def _claim_rows(call: Call, rows: RowStore) -> Reply | None:
    body = await call.plain_body()
    wanted = None if body is None else documents.read_claim(body)
    if wanted is None:
        return None
    limit = min(wanted.limit, _LARGEST_CLAIM)
    if limit < 1:
        return Reply(200, b"[]", JSON_HEADERS)
    key = await _key(call, limit, wanted.worker_id)
    claimed = await _claimed(call, wanted.wait, lambda wait: rows.claim_rows(limit, wanted.worker_id, key, wait=wait))
    return Reply(200, row_json.ATTEMPTED_ROLLOUTS.array(claimed, exact=call.exact), JSON_HEADERS)


@operation(
    "POST",
    CLAIM_PATH,
    JsonBody[DequeueRequest](DequeueRequest, default=DequeueRequest),
    returns=list[AttemptedRollout],
    errors=(503,),
    tag="queues",
    lean=_claim_rows,
    keyed=True,
)
async def dequeue_rollouts(call: Call, request: DequeueRequest) -> Sequence[AttemptedRollout]:
    """Claim the oldest queued rollouts, each with a new attempt."""
    limit = min(request.limit, _LARGEST_CLAIM)
    if limit < 1:
        return []
    store, worker_id = call.store, request.worker_id
    key = await _key(call, limit, worker_id)
    return await _claimed(
        call,
        request.wait or 0.0,
        lambda wait: store.dequeue_many_rollouts(limit=limit, worker_id=worker_id, wait=wait, idempotency_key=key),
    )


OPERATIONS: Final[tuple[Operation, ...]] = (enqueue_rollouts, dequeue_rollouts)
