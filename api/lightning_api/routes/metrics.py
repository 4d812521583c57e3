"""What Prometheus scrapes."""

from __future__ import annotations

import asyncio
from typing import Final

from lightning_api.calls import Call
from lightning_api.metrics import METRICS_PATH, PrometheusRecorder
from lightning_api.operations import Nothing, Operation, operation
from lightning_api.replies import Reply
from lightning_sql.errors import RecordNotFoundError

__all__ = ["OPERATIONS"]


@operation(
    "GET",
    f"{METRICS_PATH}/",
    Nothing(),
    returns=str,
    tag="health",
    media_type="text/plain",
    hot=True,
    places="none",
)
async def metrics(call: Call, _nothing: None) -> Reply:
    """All metrics of the server, of all its processes, in Prometheus' exposition format."""
    recorder = call.service.recorder
    if not isinstance(recorder, PrometheusRecorder):
        raise RecordNotFoundError("there are no metrics")
    accept = (call.header(b"accept") or b"").decode("latin-1")
    body, content_type = await asyncio.to_thread(recorder.exposition, accept)
    return Reply(200, body, ((b"content-type", content_type.encode()),))


OPERATIONS: Final[tuple[Operation, ...]] = (metrics,)
