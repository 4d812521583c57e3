"""The queue of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lightning_api.models import DequeueRequest, EnqueueRequest
from lightning_api.operations import Call, JsonBody, Operation, operation
from lightning_api.routes.rollouts import without_attempt
from lightning_sql.records import AttemptedRollout, Rollout

__all__ = ["OPERATIONS"]

_LARGEST_CLAIM: Final = 2**31 - 1


@operation(
    "POST",
    "/v1/agl/queues/rollouts/enqueue",
    JsonBody[EnqueueRequest](EnqueueRequest),
    returns=list[Rollout],
    status=201,
    errors=(503,),
    tag="queues",
)
async def enqueue_rollouts(call: Call, request: EnqueueRequest) -> list[Any]:
    """Create rollouts and append them to the queue, all or none."""
    rollouts = await call.store.enqueue_many_rollouts(request.rollouts)
    return [without_attempt(rollout) for rollout in rollouts]


@operation(
    "POST",
    "/v1/agl/queues/rollouts/dequeue",
    JsonBody[DequeueRequest](DequeueRequest, default=DequeueRequest),
    returns=list[AttemptedRollout],
    errors=(503,),
    tag="queues",
)
async def dequeue_rollouts(call: Call, request: DequeueRequest) -> Sequence[AttemptedRollout]:
    """Claim the oldest queued rollouts, each with a new attempt."""
    limit = min(request.limit, _LARGEST_CLAIM)
    if limit < 1:
        return []
    return await call.store.dequeue_many_rollouts(limit=limit, worker_id=request.worker_id)


OPERATIONS: Final[tuple[Operation, ...]] = (enqueue_rollouts, dequeue_rollouts)
