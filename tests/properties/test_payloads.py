"""Law 9: whatever a Python client can send comes back, to the last bit, from every backend and over HTTP."""

import asyncio
import json
import re
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_api.client import LightningClient
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.samples import assert_same, make_span
from tests.backends import COLLECTIONS, POSTGRES, SQLITE, NewStore, ServerThread
from tests.properties.strategies import payloads, short_texts

ATTRIBUTE_LISTS: list[st.SearchStrategy[Any]] = [
    short_texts,
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
]
attributes = st.dictionaries(
    short_texts, st.one_of(*ATTRIBUTE_LISTS, *(st.lists(one, max_size=3) for one in ATTRIBUTE_LISTS)), max_size=4
)


async def round_trip(store: LightningStore, payload: Any, values: dict[str, Any], text: str) -> None:
    metadata = {"payload": payload}
    rollout = await store.start_rollout(payload, metadata=metadata)
    assert_same((rollout.input, rollout.metadata), (payload, metadata))
    key = (rollout.rollout_id, rollout.attempt.attempt_id)
    attempt = await store.update_attempt(*key, metadata=metadata)
    assert_same(attempt.metadata, metadata)
    events: Any = [{"name": text, "attributes": values}]
    span = make_span(*key, "s", name=text, attributes=values, events=events, custom=payload)
    assert_same(await store.add_span(span), span)
    read = await store.get_rollout_by_id(key[0])
    assert read is not None
    assert_same((read.input, read.metadata), (payload, metadata))
    latest = await store.get_latest_attempt(key[0])
    assert latest is not None
    assert_same(latest.metadata, metadata)
    assert_same((await store.query_spans(key[0], name=text, name_contains=text)).items, [span])


HTTP_SQLITE = pytest.param("http-sqlite", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES, *COLLECTIONS, HTTP_SQLITE])
def test_payloads_come_back_exactly(kind: str, new_store: NewStore, request: pytest.FixtureRequest) -> None:
    store = new_store(kind.removeprefix("http-"), scan_debounce_seconds=10.0)

    with asyncio.Runner() as runner, ExitStack() as stack:
        used: LightningStore = store
        if kind.startswith("http-"):
            server: ServerThread = request.getfixturevalue("server")
            server.service.current_store = store
            stack.callback(lambda: runner.run(server.close(store)))
            used = LightningClient(server.address)
        stack.callback(lambda: runner.run(used.close()))

        @settings(max_examples=60)
        @given(payload=payloads, values=attributes, text=short_texts)
        def check(payload: Any, values: dict[str, Any], text: str) -> None:
            if used is not store:
                written = json.dumps([payload, values, text], ensure_ascii=False)
                # JSON has one spelling for two surrogates in a row and for the character that they make up.
                assume(not re.search("[\ud800-\udbff][\udc00-\udfff]", written))
            runner.run(round_trip(used, payload, values, text))

        check()
