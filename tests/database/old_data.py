"""Databases of the release before the native tables, filled with whatever they could hold."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from sqlalchemy import Table, Text, cast, select

from lightning_sql.collections.sql import SqlCollections
from lightning_sql.database import native, schema
from lightning_sql.database.engine import Database
from lightning_sql.database.types import Payload
from lightning_sql.lifecycle import is_queued
from lightning_sql.records import (
    LLM,
    Attempt,
    Event,
    Link,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    Span,
    SpanContext,
    TraceStatus,
)
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, make_span
from tests.database.migrating import run

PARTITIONS = ("default", "\x1ather \u2603")
BEFORE = "0001"

MEGABYTE = ODD_STRINGS["a megabyte"]
TEXTS = {name: string for name, string in ODD_STRINGS.items() if string != MEGABYTE}
PAYLOADS = {name: value for name, value in ODD_PAYLOADS.items() if value != MEGABYTE and not name.startswith("odd")}

CONFIGS = {
    "infinite": RolloutConfig(timeout_seconds=math.inf, unresponsive_seconds=math.inf, max_attempts=2**63 - 1),
    "exact": RolloutConfig(timeout_seconds=0.1 + 0.2, unresponsive_seconds=5e-324),
    "retried": RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"]),
    "limited": RolloutConfig(timeout_seconds=1e9, unresponsive_seconds=1e308, max_attempts=1),
}


def odd_spans(rollout_id: str, attempt_id: str) -> list[Span]:
    """Spans with everything that a column could lose, numbered otherwise than they come."""
    context = SpanContext.model_validate(
        {"trace_id": "t\x00", "span_id": "s", "is_remote": True, "trace_state": {"a\x00": "\ud800"}, "more": [1, None]}
    )
    odd = make_span(
        rollout_id,
        attempt_id,
        "odd",
        sequence_id=9,
        name="\ud800 \x00 name",
        parent_id="\x1aparent",
        status=TraceStatus.model_validate({"status_code": "ERROR", "description": "\x00", "unknown": math.nan}),
        attributes={**TEXTS, "nan": math.nan, "infinities": [math.inf, -math.inf], "minus": -0.0, "big": 10**40},
        events=[Event.model_validate({"name": "e", "attributes": {"\x00": [1.0, 1e22]}, "unknown": {"b": 1, "a": 2}})],
        links=[Link(context=context, attributes={"k": "\udfff"})],
        context=context,
        parent=context,
        start_time=0.1 + 0.2,
        end_time=math.inf,
        **{"unknown": PAYLOADS, "\x1aunknown": None},
    )
    plain = [make_span(rollout_id, attempt_id, f"s{number}", sequence_id=number) for number in (5, 3, 3)]
    spans = [odd, *(span.model_copy(update={"span_id": f"s{index}"}) for index, span in enumerate(plain))]
    spans[2].start_time = spans[2].end_time = None
    return spans


@dataclass
class Old:
    """A store over the collections of one partition; its clock moves with each look."""

    store: CollectionStore
    collections: SqlCollections
    names: dict[str, str] = field(default_factory=dict)
    """Rollout ids, by what is special about them."""

    async def enqueue(self, name: str, payload: Any = None, **fields: Any) -> str:
        rollout = await self.store.enqueue_rollout(payload, **fields)
        self.names[name] = rollout.rollout_id
        return rollout.rollout_id

    async def claim(self, name: str, worker_id: str | None = None) -> Attempt:
        claimed = await self.store.dequeue_rollout(worker_id)
        assert claimed is not None
        assert claimed.rollout_id == self.names[name]
        return claimed.attempt

    async def end(self, name: str, status: Any) -> None:
        await self.store.update_attempt(self.names[name], "latest", status=status)

    async def fill(self) -> None:
        """Put in a little of everything, in a state that takes work to reach."""
        store = self.store
        await store.add_resources({"main": LLM(endpoint="http://e", model="m", sampling_parameters={"t": math.inf})})
        first = await store.add_resources({"p": PromptTemplate(template="\x00 {x}", engine="jinja")})
        for name, config in CONFIGS.items():
            await self.enqueue(name, {"payload": name}, config=config, mode="train")
        await self.enqueue("running", PAYLOADS, metadata={"\x00": math.nan})
        await self.enqueue("done", ODD_STRINGS, resources_id="elsewhere", mode="val")
        await store.add_resources({})
        for name in ("infinite", "exact", "retried", "limited", "running", "done"):
            attempt = await self.claim(name, f"worker of {name}")
            if name in ("exact", "running"):
                spans = odd_spans(self.names[name], attempt.attempt_id)
                await store.add_many_spans(spans[:3])
                await store.add_many_spans(spans[3:])
        await self.end("retried", "failed")
        await self.end("done", "succeeded")
        await self.end("infinite", "failed")
        await self.claim("retried")
        await store.update_attempt(self.names["retried"], "latest", metadata={"b": math.inf, "a": "\x00"})
        await self.end("retried", "timeout")
        await store.start_attempt(self.names["done"], "worker of done")
        await self.end("done", "failed")
        for name in ("last", "cancelled", "doubled", "forgotten", "also forgotten"):
            await self.enqueue(name, metadata={"name": name})
        await store.update_rollout(self.names["cancelled"], status="cancelled")
        await store.update_rollout(self.names["infinite"], status="queuing", metadata=None)
        await store.start_rollout(None, config=CONFIGS["limited"], worker_id="starter")
        await self.collections.rollout_queue.enqueue(["nothing"] * 50)
        await self.enqueue_odd_id('\x1a\u2603 "odd" \\id', CONFIGS["limited"])
        await store.update_resources(first.resources_id, {"main": LLM(endpoint="e2", model="m2")})
        await store.update_worker("beating", {"load": math.nan, "\ud800": [None]})
        await store.update_worker("silent")
        await store.get_many_span_sequence_ids([(self.names["running"], "any"), ("unknown", "any"), ("unknown", "any")])
        # What only others than our store would do.
        queue = self.collections.rollout_queue
        await queue.enqueue([self.names["doubled"], self.names["done"], "nothing", self.names["done"]])
        await queue.discard([self.names["forgotten"], self.names["also forgotten"]])
        await self.collections.span_sequence_ids.set("no counter", "text")  # pyright: ignore[reportArgumentType]

    async def enqueue_odd_id(self, rollout_id: str, config: RolloutConfig) -> None:
        self.names["odd id"] = rollout_id
        await self.collections.rollouts.insert(
            [Rollout(rollout_id=rollout_id, input=1, start_time=1.5, status="requeuing", config=config)]
        )
        await self.collections.rollout_queue.enqueue([rollout_id])

    async def queue(self) -> list[str]:
        """The rollouts that are queued by their status, the first in the queue first; those not in it last."""
        rollouts = {rollout.rollout_id: rollout for rollout in (await self.store.query_rollouts()).items}
        queued = [rollout_id for rollout_id, rollout in rollouts.items() if is_queued(rollout.status)]
        entries = await self.collections.rollout_queue.peek(10_000)
        return list(dict.fromkeys([entry for entry in entries if entry in queued] + queued))

    async def everything(self) -> dict[str, Any]:
        """All that is kept, and would ever come to light."""
        answers = await answers_of(self.store)
        counters = [*(rollout.rollout_id for rollout in answers["rollouts"]), "unknown", "no counter"]
        return answers | {
            "counters": [await self.collections.span_sequence_ids.get(key) for key in counters],
            "queue": await self.queue(),
        }


async def answers_of(store: LightningStore) -> dict[str, Any]:
    """Every record of a store, in the orders in which it gives them."""
    rollouts = (await store.query_rollouts()).items
    ids = [rollout.rollout_id for rollout in rollouts]
    return {
        "rollouts": rollouts,
        "attempts": [(await store.query_attempts(rollout_id)).items for rollout_id in ids],
        "spans": [(await store.query_spans(rollout_id)).items for rollout_id in ids],
        "spans as they came": [(await store.query_spans(rollout_id, sort_by=None)).items for rollout_id in ids],
        "resources": (await store.query_resources()).items,
        "latest resources": await store.get_latest_resources(),
        "workers": (await store.query_workers()).items,
    }


@asynccontextmanager
async def old_store(database_url: str, partition: str) -> AsyncIterator[Old]:
    ticks = count(1_000)
    collections = SqlCollections(Database(database_url), partition=partition, clock=lambda: next(ticks) / 8)
    async with CollectionStore(collections, scan_debounce_seconds=1e9, clock=lambda: 0.0) as store:
        yield Old(store, collections)


async def everything(database_url: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for partition in PARTITIONS:
        async with old_store(database_url, partition) as old:
            found[partition] = await old.everything()
    return found


COUNTERPARTS = {
    native.ROLLOUTS: schema.ROLLOUTS,
    native.ATTEMPTS: schema.ATTEMPTS,
    native.SPANS: schema.SPANS,
    native.RESOURCES: schema.RESOURCES,
    native.WORKERS: schema.WORKERS,
}
OTHER_NAMES = {"extra": schema.EXTRA}


async def rows_of(database_url: str, table: Table, names: Sequence[str]) -> list[Any]:
    """Columns of a table as they are stored, payloads as text, in an order that holds on both sides."""
    columns = [table.c[name] for name in names]
    stored = [cast(column, Text) if isinstance(column.type, Payload) else column for column in columns]
    order = [name for name in (schema.PARTITION, "rollout_id", "attempt_id", schema.SEQ) if name in table.c]
    return await run(database_url, select(*stored).order_by(*(table.c[name] for name in order)))


async def collections_as_stored(database_url: str) -> list[Any]:
    tables = (*COUNTERPARTS.values(), schema.QUEUE, schema.COUNTERS)
    return [await rows_of(database_url, table, list(table.c.keys())) for table in tables]
