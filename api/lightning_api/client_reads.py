"""What a client asks a service without changing anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel
from typing_extensions import override

from lightning_api.client_transport import Transport
from lightning_sql.errors import InvalidRequestError
from lightning_sql.records import (
    Attempt,
    AttemptedRollout,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Span,
    Worker,
    WorkerStatus,
)
from lightning_sql.store.interface import FilterLogic, LightningStore, SortOrder, StoreCapabilities, StoreStatistics

__all__ = ["ClientReads", "is_segment", "segment"]

M = TypeVar("M", bound=BaseModel)

_WAIT_SECONDS: Final = 30.0
"""Longest single request of a wait: what lies between client and server may cut a connection that is silent."""
_NOBODY: Final = "-"
"""An id that no rollout has."""
_TIMER_SECONDS: Final = 0.05
"""How much earlier than asked a wait at its deadline may seem to return."""


def _rollout(value: Any) -> Rollout:
    return (AttemptedRollout if "attempt" in value else Rollout).model_validate(value)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _page(limit: int, offset: int, sort_by: str | None, sort_order: SortOrder) -> dict[str, Any]:
    # `sort_by` is always sent: null is how the protocol is told not to sort by its own default.
    return {"limit": limit, "offset": offset, "sort_by": sort_by, "sort_order": sort_order}


def is_segment(identifier: str) -> bool:
    """Whether an id can be one segment of a path."""
    surrogates = any("\ud800" <= character <= "\udfff" for character in identifier)
    return identifier not in ("", ".", "..") and "/" not in identifier and not surrogates


def segment(identifier: str) -> str:
    """An id as one segment of a path.

    Raises:
        InvalidRequestError: it cannot be one.
    """
    if not is_segment(identifier):
        raise InvalidRequestError(f"the protocol cannot carry the id {identifier!r:.200}")
    return quote(identifier, safe="")


class ClientReads(LightningStore):
    """The reading half of `LightningClient`."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        request_seconds: float = 30.0,
        connect_seconds: float = 5.0,
        retry_seconds: float = 90.0,
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=connect_seconds)
        self._transport = Transport(base_url, token, timeout, retry_seconds)

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return self._transport.base_url

    @override
    async def close(self) -> None:
        await self._transport.close()

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return {"thread_safe": False, "async_safe": True, "zero_copy": True, "otlp_traces": True}

    def otlp_traces_endpoint(self) -> str:
        """The URL that OpenTelemetry exporters send traces to."""
        return f"{self.base_url}/v1/traces"

    @override
    async def statistics(self) -> StoreStatistics:
        return cast(StoreStatistics, await self._transport.read("GET", "/v1/agl/statistics"))

    @override
    async def ping(self) -> None:
        await self._transport.once("GET", "/readyz")

    async def _search(self, path: str, item: type[M], query: dict[str, Any]) -> PaginatedResult[M]:
        found = await self._transport.read("POST", path, query)
        items = [item.model_validate(value) for value in found["items"]]
        return PaginatedResult[Any].model_construct(
            items=items, limit=found["limit"], offset=found["offset"], total=found["total"]
        )

    @override
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        query = {
            "status_in": status if status_in is None else status_in,
            "rollout_id_in": rollout_ids if rollout_id_in is None else rollout_id_in,
            "rollout_id_contains": rollout_id_contains,
            "filter_logic": filter_logic,
        } | _page(limit, offset, sort_by, sort_order)
        found = await self._transport.read("POST", "/v1/agl/rollouts/search", query)
        return PaginatedResult[Any].model_construct(
            items=[_rollout(value) for value in found["items"]],
            limit=found["limit"],
            offset=found["offset"],
            total=found["total"],
        )

    @override
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        if not is_segment(rollout_id):
            return None
        found = await self._transport.find(f"/v1/agl/rollouts/{segment(rollout_id)}")
        return None if found is None else _rollout(found)

    @override
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            seconds = _WAIT_SECONDS if deadline is None else min(_WAIT_SECONDS, max(0.0, deadline - now))
            request = {"rollout_ids": list(rollout_ids), "timeout": seconds}
            found = await self._transport.read("POST", "/v1/agl/waits/rollouts", request, extra_seconds=seconds)
            finished = [Rollout.model_validate(value) for value in found]
            # An answer before the time that was asked for means that nothing is left to wait for.
            early = time.monotonic() - now < seconds - _TIMER_SECONDS
            if early or len(finished) == len(rollout_ids) or (deadline is not None and time.monotonic() >= deadline):
                return finished

    @override
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        known = rollout_id if is_segment(rollout_id) else _NOBODY
        path = f"/v1/agl/rollouts/{segment(known)}/attempts/search"
        return await self._search(path, Attempt, _page(limit, offset, sort_by, sort_order))

    @override
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        if not is_segment(rollout_id):
            return None
        found = await self._transport.find(f"/v1/agl/rollouts/{segment(rollout_id)}/attempts/latest")
        return None if found is None else Attempt.model_validate(found)

    @override
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        query = {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "trace_id": trace_id,
            "trace_id_contains": trace_id_contains,
            "span_id": span_id,
            "span_id_contains": span_id_contains,
            "parent_id": parent_id,
            "parent_id_contains": parent_id_contains,
            "name": name,
            "name_contains": name_contains,
            "filter_logic": filter_logic,
        } | _page(limit, offset, sort_by, sort_order)
        return await self._search("/v1/agl/spans/search", Span, query)

    @override
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        # The one list that has no search by POST, so its parameters go into the URL.
        query = _present(
            {"resources_id": resources_id, "resources_id_contains": resources_id_contains}
            | _page(limit, offset, sort_by, sort_order)
        )
        text = "&".join(f"{name}={quote(str(value), safe='', errors='surrogatepass')}" for name, value in query.items())
        found = await self._transport.read("GET", f"/v1/agl/resources?{text}")
        return PaginatedResult[Any].model_construct(
            items=[ResourcesUpdate.model_validate(value) for value in found["items"]],
            limit=found["limit"],
            offset=found["offset"],
            total=found["total"],
        )

    @override
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        if not is_segment(resources_id) or resources_id == "latest":
            # The path of this id means something else, or nothing.
            page = await self.query_resources(resources_id=resources_id, limit=1)
            return page.items[0] if page.items else None
        found = await self._transport.find(f"/v1/agl/resources/{segment(resources_id)}")
        return None if found is None else ResourcesUpdate.model_validate(found)

    @override
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        found = await self._transport.find("/v1/agl/resources/latest")
        return None if found is None else ResourcesUpdate.model_validate(found)

    @override
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        query = {
            "status_in": status_in,
            "worker_id_contains": worker_id_contains,
            "filter_logic": filter_logic,
        } | _page(limit, offset, sort_by, sort_order)
        return await self._search("/v1/agl/workers/search", Worker, query)

    @override
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        if not is_segment(worker_id):
            page = await self.query_workers(worker_id_contains=worker_id)
            return next((worker for worker in page.items if worker.worker_id == worker_id), None)
        found = await self._transport.find(f"/v1/agl/workers/{segment(worker_id)}")
        return None if found is None else Worker.model_validate(found)
