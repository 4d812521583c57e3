"""Law 9: whatever a Python client can send comes back, to the last bit, from every backend and over HTTP."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from pydantic import TypeAdapter

from lightning_api.client import LightningClient
from lightning_sql.records import NamedResources, Span
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import assert_same
from tests.backends import COLLECTIONS, POSTGRES, SQLITE, NewStore, ServerThread
from tests.properties.effort import effort
from tests.properties.strategies import documents, payloads, resources, span_fields

HTTP = tuple(pytest.param(f"http-{kind}", marks=pytest.mark.slow) for kind in ("sqlite", "postgres"))
KINDS = pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES, *COLLECTIONS, *HTTP])
NATIVE = pytest.mark.parametrize("kind", [SQLITE, POSTGRES, *HTTP])

named_resources: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


class Rig:
    """A store, used directly or over HTTP, and the event loop in which it is used."""

    def __init__(self, runner: asyncio.Runner, used: LightningStore, over_http: bool) -> None:
        self.runner, self.store, self.over_http = runner, used, over_http

    def sent(self, value: Any) -> Any:
        """A value as it is on the way: JSON has one spelling for two surrogates in a row and for what they make up."""
        return json.loads(json.dumps(value)) if self.over_http else value


@contextmanager
def rig_of(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> Iterator[Rig]:
    over_http = kind.startswith("http-")
    store = new_store(kind.removeprefix("http-"), scan_debounce_seconds=10.0)
    with asyncio.Runner() as runner, ExitStack() as stack:
        used: LightningStore = store
        if over_http:
            server: ServerThread = request.getfixturevalue("server")
            server.service.current_store = store
            stack.callback(lambda: runner.run(server.close(store)))
            used = LightningClient(server.address)
        stack.callback(lambda: runner.run(used.close()))
        yield Rig(runner, used, over_http)


async def payloads_come_back(store: LightningStore, payload: Any, document: dict[str, Any]) -> None:
    started = await store.start_rollout(payload, metadata=document)
    assert_same((started.input, started.metadata), (payload, document))
    key = (started.rollout_id, started.attempt.attempt_id)
    assert_same((await store.update_attempt(*key, metadata=document)).metadata, document)
    latest = await store.get_latest_attempt(key[0])
    assert latest is not None
    assert_same(latest.metadata, document)
    read = await store.get_rollout_by_id(key[0])
    assert read is not None
    assert_same((read.input, read.metadata), (payload, document))

    queued = await store.enqueue_rollout(payload, metadata=document)
    assert_same((queued.input, queued.metadata), (payload, document))
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    assert_same((claimed.input, claimed.metadata), (payload, document))
    for changed in ({"input": document, "metadata": None}, {"input": payload, "metadata": document}):
        updated = await store.update_rollout(queued.rollout_id, **changed)
        assert_same((updated.input, updated.metadata), (changed["input"], changed["metadata"]))
    [found] = (await store.query_rollouts(rollout_id_in=[queued.rollout_id])).items
    assert_same((found.input, found.metadata), (payload, document))

    assert_same((await store.update_worker("w", document)).heartbeat_stats, document)
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert_same(worker.heartbeat_stats, document)


@KINDS
def test_payloads_come_back_exactly(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    with rig_of(kind, new_store, request) as rig:

        @effort(40)
        @given(payload=payloads, document=documents)
        def check(payload: Any, document: dict[str, Any]) -> None:
            rig.runner.run(payloads_come_back(rig.store, rig.sent(payload), rig.sent(document)))

        check()


async def spans_come_back(store: LightningStore, key: tuple[str, str], fields: Any, custom: Any) -> None:
    span = Span(rollout_id=key[0], attempt_id=key[1], **fields)
    assert_same(await store.add_span(span), span)
    assert await store.add_span(span) is None
    assert_same((await store.query_spans(key[0], span_id=span.span_id)).items, [span])
    found = await store.query_spans(key[0], name=span.name, name_contains=span.name, span_id=span.span_id)
    assert_same(found.items, [span])
    # The same in a batch, and with something that no other record has.
    others = [span.model_copy(update={"span_id": f"{number}", "custom": custom}) for number in range(2)]
    assert_same(list(await store.add_many_spans(others)), others)
    assert_same((await store.query_spans(key[0], span_id_contains="", sort_by=None)).items, [span, *others])


@KINDS
def test_spans_come_back_exactly(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    with rig_of(kind, new_store, request) as rig:

        @effort(40)
        @given(fields=span_fields().filter(lambda fields: fields["span_id"] not in ("0", "1")), custom=payloads)
        def check(fields: dict[str, Any], custom: Any) -> None:
            started = rig.runner.run(rig.store.start_rollout(1))
            key = (started.rollout_id, started.attempt.attempt_id)
            rig.runner.run(spans_come_back(rig.store, key, rig.sent(fields), rig.sent(custom)))

        check()


async def resources_come_back(store: LightningStore, named: dict[str, Any]) -> None:
    wanted = named_resources.validate_python(named)
    added = await store.add_resources(wanted)
    assert_same(added.resources, wanted)
    updated = await store.update_resources("mine", wanted)
    assert_same(updated.resources, wanted)
    for found in (
        await store.get_resources_by_id(added.resources_id),
        await store.get_resources_by_id("mine"),
        await store.get_latest_resources(),
        (await store.query_resources(resources_id="mine")).items[0],
    ):
        assert found is not None
        assert_same(found.resources, wanted)


@KINDS
def test_resources_come_back_exactly(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    with rig_of(kind, new_store, request) as rig:

        @effort(40)
        @given(named=resources())
        def check(named: dict[str, Any]) -> None:
            rig.runner.run(resources_come_back(rig.store, rig.sent(named)))

        check()


# What is large, deep, empty or far out is not left to chance.

WIDE = {f"key {number}": number for number in range(10_000)}
EXPLICIT: dict[str, Any] = {
    "a string of 10 MB": "0123456789" * 1_000_000,
    "a string of 10 MB that needs an escape": ("\x00é\n\\" + "0123456789" * 1000) * 1_000,
    "10,000 keys": WIDE,
    "10,000 keys that need an escape": {f"\x00{number}": "\ud800" for number in range(10_000)},
    "10,000 elements": [*range(5_000), *map(float, range(5_000))],
    "edges of 64 bits": [edge + step for edge in (-(2**63), 2**63, 2**64, 2**53, 2**31) for step in (-1, 0, 1)],
    "integers of 400 digits": {"a": 10**399, "b": [-(10**400) + 1]},
    "an integer of 4300 digits": 10**4299,
    "floats": [-0.0, 5e-324, -5e-324, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf"), 2.0**63],
    "nothing": None,
    "empty everything": {"": {}, "list": [], "text": "", "inner": [[], {}, "", {"": ""}]},
    "an empty string": "",
    "an empty list": [],
    "false": False,
    "zero": 0,
}


@NATIVE
@pytest.mark.parametrize("name", EXPLICIT)
def test_extremes_come_back_exactly(name: str, kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    payload = EXPLICIT[name]
    document = payload if isinstance(payload, dict) else {"payload": payload}
    with rig_of(kind, new_store, request) as rig:
        rig.runner.run(payloads_come_back(rig.store, payload, document))
        named = {"llm": {"resource_type": "llm", "endpoint": "", "model": "", "sampling_parameters": document}}
        rig.runner.run(resources_come_back(rig.store, named))


@NATIVE
def test_spans_at_the_edges_come_back_exactly(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    long = "é" * 5_000_000
    empty = {"attributes": {}, "schema_url": ""}
    context = {"trace_id": "", "span_id": "", "is_remote": False, "trace_state": {}}
    common: dict[str, Any] = {"sequence_id": 1, "trace_id": "", "parent_id": "", "name": "", "attributes": {}}
    common |= {"events": [], "links": [], "start_time": None, "end_time": None, "context": None, "parent": None}
    common |= {"status": {"status_code": "UNSET"}, "resource": empty}
    cases: list[dict[str, Any]] = [
        {"span_id": ""},
        {"span_id": "a", "context": context, "parent": context, "links": [{"context": context}]},
        {"span_id": "b", "attributes": {"long": long, **WIDE}, "name": long[:100_000]},
        {"span_id": "c", "events": [{"name": "", "attributes": {}}] * 1_000, "resource": empty | {"attributes": WIDE}},
        *({"span_id": str(time), "start_time": time, "end_time": -time} for time in (1e-9, 1e300, 253402300800.0)),
        {"span_id": "d", "start_time": float("-inf"), "end_time": float("inf")},
        {"span_id": "e", "sequence_id": -(2**63), "attributes": {"edges": EXPLICIT["edges of 64 bits"]}},
        {"span_id": "f", "sequence_id": 2**62 - 1, "attributes": {"floats": EXPLICIT["floats"]}},
    ]
    with rig_of(kind, new_store, request) as rig:
        for case in cases:
            started = rig.runner.run(rig.store.start_rollout(None, metadata={}))
            key = (started.rollout_id, started.attempt.attempt_id)
            rig.runner.run(spans_come_back(rig.store, key, common | case, None))
