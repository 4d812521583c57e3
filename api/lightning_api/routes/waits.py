"""Waiting for rollouts to finish."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from lightning_api.models import WaitRequest
from lightning_api.operations import Call, ClientGoneError, JsonBody, Operation, operation
from lightning_api.routes.rollouts import without_attempt
from lightning_sql.records import Rollout

__all__ = ["OPERATIONS"]

_LONGEST_SECONDS: Final = 365 * 86400.0
"""An event loop cannot time anything much longer."""


@operation(
    "POST",
    "/v1/agl/waits/rollouts",
    JsonBody[WaitRequest](WaitRequest),
    returns=list[Rollout],
    errors=(503,),
    tag="rollouts",
)
async def wait_for_rollouts(call: Call, request: WaitRequest) -> list[Any]:
    """Wait until all these rollouts are finished, and get those that are."""
    timeout = None if request.timeout is None else min(request.timeout, _LONGEST_SECONDS)
    waiting = asyncio.ensure_future(call.store.wait_for_rollouts(rollout_ids=request.rollout_ids, timeout=timeout))
    hangup = asyncio.ensure_future(call.client_gone())
    try:
        await asyncio.wait({waiting, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientGoneError
        return [without_attempt(rollout) for rollout in waiting.result()]
    finally:
        waiting.cancel()
        hangup.cancel()
        await asyncio.gather(waiting, hangup, return_exceptions=True)


OPERATIONS: Final[tuple[Operation, ...]] = (wait_for_rollouts,)
