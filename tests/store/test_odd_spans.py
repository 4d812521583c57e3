"""Spans of which the shortest way to write or to read them must not be thrown off."""

import json
import math
from typing import Any

import pytest

from lightning_sql.store import row_json
from lightning_sql.store.row_store import SpanQuery
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span

ODD_IDS = ["\x1f", "\x1e", "a\x1fb\x1ec", "\x1f\x1f", "", "\x1a", "\x1aid", '"', "\\", "NULL", "null", "ü😀", "'{}"]
ODD = [*ODD_IDS, "\x00", "\ud800"]


def odd_spans(rollout_id: str, attempt_id: str) -> list[Any]:
    spans = [
        make_span(
            rollout_id,
            attempt_id,
            f"s{number}",
            number,
            name=text,
            trace_id=ODD_IDS[-number % len(ODD_IDS)],
            parent_id=text if text in ODD_IDS else None,
            attributes={"text": text.replace("\ud800", "?"), "number": number, "list": [1.5, 2.5]},
            start_time=None if number % 2 else float(number),
            end_time=math.inf if number % 3 else 1e300,
            **({"more": {"text": text}} if number % 4 == 0 else {}),
        )
        for number, text in enumerate(ODD)
    ]
    return [*spans, make_span(rollout_id, attempt_id, "last", 99, attributes={"infinite": math.inf})]


@pytest.mark.parametrize("at_once", [True, False])
async def test_odd_texts_come_back_as_they_were(store: SqlStore, at_once: bool) -> None:
    rollout = await store.start_rollout(1)
    spans = odd_spans(rollout.rollout_id, rollout.attempt.attempt_id)
    if at_once:
        assert await store.add_many_spans(spans) == spans
    else:
        for span in spans:
            assert await store.add_span(span) == span
    assert list(await store.query_spans(rollout.rollout_id)) == spans
    assert await store.add_many_spans(spans) == []


@pytest.mark.parametrize("limit", [-1, 7])
async def test_spliced_rows_are_written_as_any_others(store: SqlStore, limit: int) -> None:
    rollout = await store.start_rollout(1)
    await store.add_many_spans(odd_spans(rollout.rollout_id, rollout.attempt.attempt_id))
    for sort_by in ("sequence_id", "name", None):
        pages = [
            await store.span_page(
                SpanQuery(rollout_id=rollout.rollout_id, sort_by=sort_by, limit=limit, offset=2, spliced=spliced)
            )
            for spliced in (False, True)
        ]
        plain, spliced = pages
        assert len(plain.first) == len(spliced.first) == (7 if limit > 0 else len(ODD) - 1)
        assert (plain.total, plain.rest) == (spliced.total, spliced.rest) == (len(ODD) + 1, None)
        for exact in (False, True):
            wanted = row_json.SPANS.array(plain.first, exact=exact)
            assert json.dumps(json.loads(row_json.SPLICED_SPANS.array(spliced.first, exact=exact))) == json.dumps(
                json.loads(wanted)
            )
