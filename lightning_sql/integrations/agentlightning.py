"""The store inside an Agent Lightning process: for `Trainer`, its execution strategies and its server.

Needs the extra `agentlightning`.
"""

# It has no stubs, but it is typed.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast

from agentlightning.store.base import UNSET as NOT_GIVEN
from agentlightning.store.base import LightningStore, LightningStoreCapabilities, LightningStoreStatistics, Unset
from agentlightning.store.collection.base import DuplicatedPrimaryKeyError
from agentlightning.types import (
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
    TaskInput,
    Worker,
    WorkerStatus,
)
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel
from typing_extensions import override

from lightning_sql import records
from lightning_sql.collections.sql import ItemTypes, SqlCollections
from lightning_sql.database.engine import Database
from lightning_sql.database.migrate import Migrations
from lightning_sql.errors import ConfigurationError
from lightning_sql.store.factory import is_memory
from lightning_sql.store.sql_store import SqlStore

__all__ = ["SqlLightningStore", "sql_collections"]

Theirs = TypeVar("Theirs", bound=BaseModel)


def _database(database_url: str, wait_seconds: float) -> Database:
    if is_memory(database_url):
        raise ConfigurationError("memory is no SQL database; Agent Lightning has its own InMemoryLightningStore")
    return Database(database_url, wait_seconds=wait_seconds)


class SqlLightningStore(LightningStore):
    """A store of Agent Lightning's own kind, in an SQL database.

    It may be used from any number of event loops and threads at once; each loop has connections of its own, which
    are closed with it. It may be forked, and pickled: a copy has the settings, and opens connections of its own.
    Errors are those of `lightning_sql.errors`; those about arguments are `ValueError`s too.

    Args:
        database_url: `sqlite:///file` or `postgresql://host/name`. An empty database gets its schema, and an SQLite
            file of an older release is upgraded, when the store is first used.
        partition: one training run, or one tenant; stores of different partitions see nothing of each other.
        scan_debounce_seconds: least time between two watchdog scans that calls trigger.
        claim_timeout_seconds: after how long an attempt of which nothing was heard since it was begun is given up
            and its rollout queued again, whatever its retry settings; None is never.
        database_wait_seconds: how long a call waits for a database that is away before it fails.
        migrate: whether an old PostgreSQL schema may be upgraded, too.

    Raises:
        ConfigurationError: not the URL of an SQL database.
    """

    def __init__(
        self,
        database_url: str,
        *,
        partition: str = "default",
        scan_debounce_seconds: float = 10.0,
        claim_timeout_seconds: float | None = None,
        database_wait_seconds: float = 40.0,
        migrate: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = {
            "database_url": database_url,
            "partition": partition,
            "scan_debounce_seconds": scan_debounce_seconds,
            "claim_timeout_seconds": claim_timeout_seconds,
            "database_wait_seconds": database_wait_seconds,
            "migrate": migrate,
        }
        self._url = database_url
        self._migrate = migrate
        self._store = SqlStore(
            _database(database_url, database_wait_seconds),
            partition=partition,
            scan_debounce_seconds=scan_debounce_seconds,
            claim_timeout_seconds=claim_timeout_seconds,
        )
        self._prepared_in: int | None = None
        """The process that has seen the schema."""

    def __getstate__(self) -> dict[str, Any]:
        return self._settings

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __repr__(self) -> str:
        return f"<SqlLightningStore over {self._store!r}>"

    async def _opened(self) -> SqlStore:
        if self._prepared_in != os.getpid():
            # Whoever comes at the same moment does it too: it is safe from anywhere, and cheap the second time.
            await Migrations(self._url).prepare(migrate=self._migrate)
            self._prepared_in = os.getpid()
        return self._store

    async def close(self) -> None:
        """Finish what was begun on this event loop, and close its connections. A later call opens others."""
        await self._store.close()

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    @override
    async def statistics(self) -> LightningStoreStatistics:
        counted = await (await self._opened()).statistics()
        return cast(LightningStoreStatistics, {**counted, "name": type(self).__name__})

    # Rollouts

    @override
    async def start_rollout(
        self,
        input: TaskInput,
        mode: Literal["train", "val", "test"] | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        store = await self._opened()
        started = await store.start_rollout(input, mode, resources_id, _config(config), metadata, worker_id)
        return _given(AttemptedRollout, started)

    @override
    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: Literal["train", "val", "test"] | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        store = await self._opened()
        return _given(Rollout, await store.enqueue_rollout(input, mode, resources_id, _config(config), metadata))

    @override
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        requests = [
            records.EnqueueRolloutRequest(
                input=request.input,
                mode=request.mode,
                resources_id=request.resources_id,
                config=_config(request.config),
                metadata=request.metadata,
            )
            for request in rollouts
        ]
        return [_given(Rollout, rollout) for rollout in await (await self._opened()).enqueue_many_rollouts(requests)]

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        return _maybe(AttemptedRollout, await (await self._opened()).dequeue_rollout(worker_id))

    @override
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        claimed = await (await self._opened()).dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        return [_given(AttemptedRollout, rollout) for rollout in claimed]

    @override
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        return _given(AttemptedRollout, await (await self._opened()).start_attempt(rollout_id, worker_id))

    @override
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> Sequence[Rollout]:
        page = await (await self._opened()).query_rollouts(
            status_in=status_in,
            rollout_id_in=rollout_id_in,
            rollout_id_contains=rollout_id_contains,
            filter_logic=filter_logic,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
            status=status,
            rollout_ids=rollout_ids,
        )
        return _page(page, [_rollout(rollout) for rollout in page.items])

    @override
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        rollout = await (await self._opened()).get_rollout_by_id(rollout_id)
        return None if rollout is None else _rollout(rollout)

    @override
    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[Rollout]:
        finished = await (await self._opened()).wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)
        return [_given(Rollout, rollout) for rollout in finished]

    @override
    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = NOT_GIVEN,
        mode: RolloutMode | None | Unset = NOT_GIVEN,
        resources_id: str | None | Unset = NOT_GIVEN,
        status: RolloutStatus | Unset = NOT_GIVEN,
        config: RolloutConfig | Unset = NOT_GIVEN,
        metadata: dict[str, Any] | None | Unset = NOT_GIVEN,
    ) -> Rollout:
        updated = await (await self._opened()).update_rollout(
            rollout_id,
            input=_unless_unset(input),
            mode=_unless_unset(mode),
            resources_id=_unless_unset(resources_id),
            status=_unless_unset(status),
            config=_unless_unset(config if isinstance(config, Unset) else _config(config)),
            metadata=_unless_unset(metadata),
        )
        return _given(Rollout, updated)

    # Attempts

    @override
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[Attempt]:
        page = await (await self._opened()).query_attempts(
            rollout_id, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset
        )
        return _page(page, [_given(Attempt, attempt) for attempt in page.items])

    @override
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return _maybe(Attempt, await (await self._opened()).get_latest_attempt(rollout_id))

    @override
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = NOT_GIVEN,
        worker_id: str | Unset = NOT_GIVEN,
        last_heartbeat_time: float | Unset = NOT_GIVEN,
        metadata: dict[str, Any] | None | Unset = NOT_GIVEN,
    ) -> Attempt:
        updated = await (await self._opened()).update_attempt(
            rollout_id,
            attempt_id,
            status=_unless_unset(status),
            worker_id=_unless_unset(worker_id),
            last_heartbeat_time=_unless_unset(last_heartbeat_time),
            metadata=_unless_unset(metadata),
        )
        return _given(Attempt, updated)

    # Spans

    @override
    async def add_span(self, span: Span) -> Span | None:
        return _maybe(Span, await (await self._opened()).add_span(_span(span)))

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        stored = await (await self._opened()).add_many_spans([_span(span) for span in spans])
        return [_given(Span, span) for span in stored]

    @override
    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        store = await self._opened()
        return _maybe(Span, await store.add_otel_span(rollout_id, attempt_id, readable_span, sequence_id))

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
        filter_logic: Literal["and", "or"] = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
    ) -> Sequence[Span]:
        page = await (await self._opened()).query_spans(
            rollout_id,
            attempt_id,
            trace_id=trace_id,
            trace_id_contains=trace_id_contains,
            span_id=span_id,
            span_id_contains=span_id_contains,
            parent_id=parent_id,
            parent_id_contains=parent_id_contains,
            name=name,
            name_contains=name_contains,
            filter_logic=filter_logic,
            limit=limit,
            offset=offset,
            sort_by=sort_by,
            sort_order=sort_order,
        )
        return _page(page, [_given(Span, span) for span in page.items])

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await (await self._opened()).get_next_span_sequence_id(rollout_id, attempt_id)

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return await (await self._opened()).get_many_span_sequence_ids(rollout_attempt_ids)

    # Resources

    @override
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[ResourcesUpdate]:
        page = await (await self._opened()).query_resources(
            resources_id=resources_id,
            resources_id_contains=resources_id_contains,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )
        return _page(page, [_given(ResourcesUpdate, resources) for resources in page.items])

    @override
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return _given(ResourcesUpdate, await (await self._opened()).add_resources(_plain(resources)))

    @override
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        store = await self._opened()
        return _given(ResourcesUpdate, await store.update_resources(resources_id, _plain(resources)))

    @override
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return _maybe(ResourcesUpdate, await (await self._opened()).get_resources_by_id(resources_id))

    @override
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return _maybe(ResourcesUpdate, await (await self._opened()).get_latest_resources())

    # Workers

    @override
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[Worker]:
        page = await (await self._opened()).query_workers(
            status_in=status_in,
            worker_id_contains=worker_id_contains,
            filter_logic=filter_logic,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )
        return _page(page, [_given(Worker, worker) for worker in page.items])

    @override
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return _maybe(Worker, await (await self._opened()).get_worker_by_id(worker_id))

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = NOT_GIVEN) -> Worker:
        store = await self._opened()
        return _given(Worker, await store.update_worker(worker_id, _unless_unset(heartbeat_stats)))


def sql_collections(
    database_url: str, *, partition: str = "default", database_wait_seconds: float = 40.0
) -> SqlCollections:
    """Collections in an SQL database for Agent Lightning's own `CollectionBasedLightningStore`.

    Its schema must be there: `lightning-sql migrate up`, or `prepare_database`.

    Raises:
        ConfigurationError: not the URL of an SQL database.
    """
    return SqlCollections(
        _database(database_url, database_wait_seconds),
        partition=partition,
        item_types=ItemTypes(Rollout, Attempt, Span, ResourcesUpdate, Worker),
        duplicate_error=DuplicatedPrimaryKeyError,
    )


def _plain(value: Any) -> Any:
    """Records of theirs, alone or by name, as plain data."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in cast("dict[str, Any]", value).items()}
    return value


def _config(config: RolloutConfig | None) -> records.RolloutConfig | None:
    return None if config is None else records.RolloutConfig.model_validate(config.model_dump())


def _span(span: Span) -> records.Span:
    return records.Span.model_validate(span.model_dump())


def _unless_unset(value: Any) -> Any:
    return records.UNSET if isinstance(value, Unset) else value


def _given(theirs: type[Theirs], record: BaseModel) -> Theirs:
    """A record of ours as one of theirs."""
    return theirs.model_validate(record.model_dump())


def _maybe(theirs: type[Theirs], record: BaseModel | None) -> Theirs | None:
    return None if record is None else _given(theirs, record)


def _rollout(rollout: records.Rollout) -> Rollout:
    return _given(AttemptedRollout if isinstance(rollout, records.AttemptedRollout) else Rollout, rollout)


def _page(page: records.PaginatedResult[Any], items: Sequence[Theirs]) -> PaginatedResult[Theirs]:
    return PaginatedResult(items=items, limit=page.limit, offset=page.offset, total=page.total)
