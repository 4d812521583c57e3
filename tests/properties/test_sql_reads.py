"""`attributes ->> 'key'` works in SQL on every row, whatever is stored in that one and in the others."""

import asyncio
from typing import Any

import pytest
from hypothesis import given

from lightning_sql.records import Span
from lightning_sql.store.sql_store import SqlStore
from tests.backends import POSTGRES, SQLITE, NewStore
from tests.properties.effort import effort
from tests.properties.strategies import documents, payloads, span_fields
from tests.sql_reads import is_plain, members

KNOWN = {"known": "value"}


@pytest.mark.parametrize("kind", [SQLITE, POSTGRES])
def test_every_document_can_be_read_in_sql(kind: str, new_store: NewStore) -> None:
    store = new_store(kind, scan_debounce_seconds=10.0)
    assert isinstance(store, SqlStore)
    spans = 0

    async def check(fields: dict[str, Any], document: dict[str, Any], payload: Any) -> None:
        nonlocal spans
        started = await store.start_rollout(payload, metadata=document | KNOWN)
        key = (started.rollout_id, started.attempt.attempt_id)
        await store.update_attempt(*key, metadata=document | KNOWN)
        await store.update_worker("w", document | KNOWN)
        fields = fields | KNOWN | {"attributes": fields["attributes"] | KNOWN}
        fields["resource"] = fields["resource"] | {"attributes": fields["resource"]["attributes"] | KNOWN}
        span = Span(rollout_id=key[0], attempt_id=key[1], **fields)
        await store.add_many_spans([span, span.model_copy(update={"span_id": f"{span.span_id[:9]}+"})])
        spans += 2
        found = await members(store, "known", started.rollout_id)
        for column in ("rollouts.metadata", "attempts.metadata", "spans.attributes", "spans.extra"):
            assert set(found[column]) == {"value"}, column
        assert len(found["spans.attributes"]) == 2
        # A name in a document that needs no escape stands there as it is, also where others need one.
        plain = {name: text for name, text in fields["attributes"].items() if is_plain(name) and is_plain(text)}
        for name, text in plain.items():
            assert (await members(store, name, started.rollout_id))["spans.attributes"] == [text] * 2

    with asyncio.Runner() as runner:

        @effort(40)
        @given(fields=span_fields(), document=documents, payload=payloads)
        def each(fields: dict[str, Any], document: dict[str, Any], payload: Any) -> None:
            runner.run(check(fields, document, payload))

        try:
            each()
            found = runner.run(members(store, "known"))
            assert found["spans.attributes"] == ["value"] * spans
            assert found["workers.heartbeat_stats"] == ["value"]
        finally:
            runner.run(store.close())
