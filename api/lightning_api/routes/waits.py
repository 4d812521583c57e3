"""Waiting for rollouts to finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from lightning_api.calls import Call, ClientGoneError
from lightning_api.models import WaitRequest
from lightning_api.operations import JsonBody, Operation, operation
from lightning_api.replies import JSON_HEADERS, Reply
from lightning_api.routes.rollouts import without_attempt
from lightning_sql.records import Rollout
from lightning_sql.store import row_json

__all__ = ["OPERATIONS", "unless_gone"]

T = TypeVar("T")


@operation(
    "POST",
    "/v1/agl/waits/rollouts",
    JsonBody[WaitRequest](WaitRequest),
    returns=list[Rollout],
    errors=(503,),
    tag="rollouts",
    hot=True,
    places="waits",
)
async def wait_for_rollouts(call: Call, request: WaitRequest) -> list[Any] | Reply:
    """Wait until all these rollouts are finished, and get those that are."""
    timeout = request.timeout
    rows = call.store.rows
    if rows is not None:
        found = await unless_gone(call, rows.finished_rows(request.rollout_ids, timeout))
        return Reply(200, row_json.ROLLOUTS.array(found, exact=call.exact), JSON_HEADERS)
    finished = await unless_gone(call, call.store.wait_for_rollouts(rollout_ids=request.rollout_ids, timeout=timeout))
    return [without_attempt(rollout) for rollout in finished]


async def unless_gone(call: Call, work: Coroutine[Any, Any, T]) -> T:
    """What comes of a wait, which ends when its client hangs up.

    Raises:
        ClientGoneError: the client did.
    """
    waiting = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(call.client_gone())
    try:
        await asyncio.wait({waiting, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientGoneError
        return waiting.result()
    finally:
        waiting.cancel()
        hangup.cancel()
        await asyncio.gather(waiting, hangup, return_exceptions=True)


OPERATIONS: Final[tuple[Operation, ...]] = (wait_for_rollouts,)
