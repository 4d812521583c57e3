"""The store of a running service, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel
from typing_extensions import override

from lightning_api.client_transport import Transport
from lightning_sql.errors import InvalidRequestError, RecordNotFoundError
from lightning_sql.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Unset,
    Worker,
    WorkerStatus,
    given,
)
from lightning_sql.store.interface import (
    FilterLogic,
    LightningStore,
    SortOrder,
    SpanReceipt,
    StoreCapabilities,
    StoreStatistics,
)

__all__ = ["LightningClient"]

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


def _is_segment(identifier: str) -> bool:
    surrogates = any("\ud800" <= character <= "\udfff" for character in identifier)
    return identifier not in ("", ".", "..") and "/" not in identifier and not surrogates


def _segment(identifier: str) -> str:
    """An id as one segment of a path.

    Raises:
        InvalidRequestError: it cannot be one.
    """
    if not _is_segment(identifier):
        raise InvalidRequestError(f"the protocol cannot carry the id {identifier!r:.200}")
    return quote(identifier, safe="")


class LightningClient(LightningStore):
    """A store that asks a lightning-sql service (or another server of the protocol) for everything.

    Reads are tried again when the connection breaks or the service answers 503; writes never are, since
    the first one may have taken place. It belongs to the event loop that first used it.

    What the protocol has no words for:
    - `add_many_spans` sends one request for each span, in order. When an attempt turns out not to
      exist, the spans before it are stored already.
    - `import_spans` does too, and goes on after an attempt that does not exist.
    - `sweep` can only trigger the scan that a read begins with, at most one in the service's debounce
      time, and answers 0.
    - an id that is empty or contains `/` can be asked for, but not written under.

    Args:
        base_url: `http://host:port`, without `/v1`.
        token: the bearer token, if the service asks for one.
        request_seconds: longest time for one request; a wait may take longer.
        connect_seconds: longest time for connecting.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        request_seconds: float = 30.0,
        connect_seconds: float = 5.0,
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=connect_seconds)
        self._transport = Transport(base_url, token, timeout)

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
        await self._transport.read("GET", "/readyz")

    @override
    async def sweep(self) -> int:
        await self.query_workers(limit=1)
        return 0

    async def _search(self, path: str, item: type[M], query: dict[str, Any]) -> PaginatedResult[M]:
        found = await self._transport.read("POST", path, query)
        items = [item.model_validate(value) for value in found["items"]]
        return PaginatedResult[Any].model_construct(
            items=items, limit=found["limit"], offset=found["offset"], total=found["total"]
        )

    # Rollouts

    @override
    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        request = {
            "input": input,
            "mode": mode,
            "resources_id": resources_id,
            "config": config,
            "metadata": metadata,
            "worker_id": worker_id,
        }
        return AttemptedRollout.model_validate(await self._transport.write("/v1/agl/rollouts", request))

    @override
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        [rollout] = await self.enqueue_many_rollouts([request])
        return rollout

    @override
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        if not rollouts:
            return []
        request = {"rollouts": list(rollouts)}
        created = await self._transport.write("/v1/agl/queues/rollouts/enqueue", request)
        return [Rollout.model_validate(value) for value in created]

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(worker_id=worker_id)
        return claimed[0] if claimed else None

    @override
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            return []
        request = {"limit": limit, "worker_id": worker_id}
        claimed = await self._transport.write("/v1/agl/queues/rollouts/dequeue", request)
        return [AttemptedRollout.model_validate(value) for value in claimed]

    @override
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}/attempts"
        return AttemptedRollout.model_validate(await self._transport.write(path, {"worker_id": worker_id}))

    def _existing(self, identifier: str) -> str:
        """An id that the service made, as a segment of a path."""
        if not _is_segment(identifier):
            raise RecordNotFoundError(f"there is nothing with the id {identifier!r:.200}")
        return _segment(identifier)

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
        if not _is_segment(rollout_id):
            return None
        found = await self._transport.find(f"/v1/agl/rollouts/{_segment(rollout_id)}")
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
    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: RolloutMode | None | Unset = UNSET,
        resources_id: str | None | Unset = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
    ) -> Rollout:
        changes = given(
            {
                "input": input,
                "mode": mode,
                "resources_id": resources_id,
                "status": status,
                "config": config,
                "metadata": metadata,
            }
        )
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}"
        return Rollout.model_validate(await self._transport.write(path, changes))

    # Attempts

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
        known = rollout_id if _is_segment(rollout_id) else _NOBODY
        path = f"/v1/agl/rollouts/{_segment(known)}/attempts/search"
        return await self._search(path, Attempt, _page(limit, offset, sort_by, sort_order))

    @override
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        if not _is_segment(rollout_id):
            return None
        found = await self._transport.find(f"/v1/agl/rollouts/{_segment(rollout_id)}/attempts/latest")
        return None if found is None else Attempt.model_validate(found)

    @override
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        changes = given(
            {
                "status": status,
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": metadata,
            }
        )
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}/attempts/{self._existing(attempt_id)}"
        return Attempt.model_validate(await self._transport.write(path, changes))

    # Spans

    @override
    async def add_span(self, span: Span) -> Span | None:
        stored = await self._transport.write("/v1/agl/spans", span)
        return None if stored is None else Span.model_validate(stored)

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        answers = [await self.add_span(span) for span in spans]
        return [span for span in answers if span is not None]

    @override
    async def import_spans(self, spans: Sequence[Span], *, unnumbered: AbstractSet[int] = frozenset()) -> SpanReceipt:
        stored: list[Span] = []
        rejected: list[Span] = []
        attempts = await self._attempts_of([spans[index] for index in sorted(unnumbered)])
        for index, offered in enumerate(spans):
            span = offered
            if index in unnumbered:
                # Looked at first, so that a span that is not stored does not use up a number.
                if (span.rollout_id, span.attempt_id) not in attempts:
                    rejected.append(span)
                    continue
                if await self._is_stored(span):
                    continue
                number = await self.get_next_span_sequence_id(span.rollout_id, span.attempt_id)
                span = span.model_copy(update={"sequence_id": number})
            try:
                answer = await self.add_span(span)
            except RecordNotFoundError:
                rejected.append(offered)
                continue
            if answer is not None:
                stored.append(answer)
        return SpanReceipt(stored, len(spans) - len(stored) - len(rejected), rejected)

    async def _attempts_of(self, spans: Sequence[Span]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for rollout_id in dict.fromkeys(span.rollout_id for span in spans if _is_segment(span.rollout_id)):
            found.update((rollout_id, attempt.attempt_id) for attempt in await self.query_attempts(rollout_id))
        return found

    async def _is_stored(self, span: Span) -> bool:
        return (await self.query_spans(span.rollout_id, span.attempt_id, span_id=span.span_id, limit=1)).total > 0

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
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        request = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return cast(int, (await self._transport.write("/v1/agl/spans/next", request))["sequence_id"])

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return [await self.get_next_span_sequence_id(*pair) for pair in rollout_attempt_ids]

    # Resources

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
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return ResourcesUpdate.model_validate(await self._transport.write("/v1/agl/resources", resources))

    @override
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        path = f"/v1/agl/resources/{_segment(resources_id)}"
        return ResourcesUpdate.model_validate(await self._transport.write(path, resources))

    @override
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        if not _is_segment(resources_id) or resources_id == "latest":
            # The path of this id means something else, or nothing.
            page = await self.query_resources(resources_id=resources_id, limit=1)
            return page.items[0] if page.items else None
        found = await self._transport.find(f"/v1/agl/resources/{_segment(resources_id)}")
        return None if found is None else ResourcesUpdate.model_validate(found)

    @override
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        found = await self._transport.find("/v1/agl/resources/latest")
        return None if found is None else ResourcesUpdate.model_validate(found)

    # Workers

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
        if not _is_segment(worker_id):
            page = await self.query_workers(worker_id_contains=worker_id)
            return next((worker for worker in page.items if worker.worker_id == worker_id), None)
        found = await self._transport.find(f"/v1/agl/workers/{_segment(worker_id)}")
        return None if found is None else Worker.model_validate(found)

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        if heartbeat_stats is None:  # pyright: ignore[reportUnnecessaryComparison] - callers need not be typed
            raise TypeError("heartbeat_stats cannot be null")
        if worker_id == "search":
            raise InvalidRequestError("the protocol cannot write a worker of the name 'search'")
        path = f"/v1/agl/workers/{_segment(worker_id)}"
        return Worker.model_validate(await self._transport.write(path, given({"heartbeat_stats": heartbeat_stats})))
