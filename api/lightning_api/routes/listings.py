"""Pages of rollouts and spans as the protocol has them, but where nobody need count what matches."""

from __future__ import annotations

from typing import Any, Final

from lightning_api.calls import Call
from lightning_api.errors import problem_of
from lightning_api.models import Listing, RolloutListing, SpanListing
from lightning_api.operations import Operation, QueryString, operation
from lightning_api.replies import Reply, Stream
from lightning_api.routes.rollouts import find_rollouts
from lightning_api.routes.spans import find_spans
from lightning_sql.records import AttemptedRollout, Rollout, Span

__all__ = ["OPERATIONS"]


def _to_error(_call: Call, error: Exception) -> Reply:
    return problem_of(error)


def _listing(page: Any, total: bool) -> Any:
    if isinstance(page, Reply | Stream) or total:
        return page
    return {"items": page.items, "limit": page.limit, "offset": page.offset, "total": None}


@operation(
    "GET",
    "/v1/lightning/rollouts",
    QueryString(RolloutListing),
    returns=Listing[AttemptedRollout | Rollout],
    errors=(400, 503),
    tag="listings",
    to_error=_to_error,
    problems=True,
)
async def list_rollouts(call: Call, query: RolloutListing) -> Any:
    """List rollouts, with `total=false` in a time that does not grow with how many there are."""
    return _listing(await find_rollouts(call, query, total=query.total), query.total)


@operation(
    "GET",
    "/v1/lightning/spans",
    QueryString(SpanListing),
    returns=Listing[Span],
    errors=(400, 503),
    tag="listings",
    to_error=_to_error,
    problems=True,
)
async def list_spans(call: Call, query: SpanListing) -> Any:
    """List the spans of a rollout, or of one of its attempts."""
    return _listing(await find_spans(call, query, total=query.total), query.total)


OPERATIONS: Final[tuple[Operation, ...]] = (list_rollouts, list_spans)
