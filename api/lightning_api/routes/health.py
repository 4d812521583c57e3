"""Whether the service is alive, ready, and how much it holds."""

from __future__ import annotations

import asyncio
from typing import Final

from lightning_api.calls import Call
from lightning_api.errors import problem
from lightning_api.models import Statistics
from lightning_api.operations import Nothing, Operation, operation
from lightning_api.replies import Reply
from lightning_sql.errors import LightningError
from lightning_sql.store.interface import StoreStatistics

__all__ = ["OPERATIONS"]

_PING_SECONDS: Final = 2.0


@operation("GET", "/v1/agl/health", Nothing(), returns=dict[str, str], tag="health", places="none")
async def health(_call: Call, _nothing: None) -> dict[str, str]:
    """Whether the process answers; the protocol's clients ask this before they retry."""
    return {"status": "ok"}


@operation("GET", "/v1/agl/statistics", Nothing(), returns=Statistics, errors=(503,), tag="health")
async def statistics(call: Call, _nothing: None) -> StoreStatistics:
    """Count everything stored."""
    return await call.store.statistics()


@operation("GET", "/healthz", Nothing(), returns=dict[str, str], tag="health", places="none")
async def healthz(_call: Call, _nothing: None) -> dict[str, str]:
    """Whether the process answers, for whoever restarts it."""
    return {"status": "ok"}


@operation(
    "GET", "/readyz", Nothing(), returns=dict[str, str], errors=(503,), tag="health", problems=True, places="none"
)
async def readyz(call: Call, _nothing: None) -> dict[str, str] | Reply:
    """Whether calls can be served, for whoever sends them here: the database answers and has the right schema."""
    if call.service.draining:
        return problem(503, "the server is stopping")
    try:
        async with asyncio.timeout(_PING_SECONDS):
            await call.store.ping()
    except TimeoutError:
        return problem(503, "the database does not answer")
    except LightningError:
        return problem(503, "the database is not available, or its schema is not the one that this release needs")
    return {"status": "ready"}


OPERATIONS: Final[tuple[Operation, ...]] = (health, statistics, healthz, readyz)
