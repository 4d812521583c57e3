"""Idempotency keys of the native store: what is written for them, how they join, and how long they are kept."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from lightning_sql.errors import DuplicatedPrimaryKeyError, IdempotencyKeyReusedError
from lightning_sql.records import EnqueueRolloutRequest, IdempotencyKey
from lightning_sql.store import idempotency, sql_store
from lightning_sql.store.rows import span_draft
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.backends import Clock
from tests.native_laws import queue_of, rows_of
from tests.store.native import OpenStore, at_once, key_of, started

KEYS = (
    "SELECT key, part, route, fingerprint, ids FROM idempotency_keys WHERE partition_id = :partition ORDER BY key, part"
)


def a_key(name: str) -> IdempotencyKey:
    return IdempotencyKey(name, "route", "print")


async def test_a_key_is_written_with_ids_and_nothing_else(store: SqlStore) -> None:
    many = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="secret"), EnqueueRolloutRequest(input=2)], idempotency_key=a_key("1")
    )
    claimed = await store.dequeue_many_rollouts(limit=3, worker_id="w", idempotency_key=a_key("2"))
    begun = await store.start_rollout("secret", idempotency_key=a_key("3"))
    again = await store.start_attempt(begun.rollout_id, idempotency_key=a_key("4"))
    await store.update_rollout(begun.rollout_id, input="secret", idempotency_key=a_key("5"))
    resources = await store.add_resources({}, idempotency_key=a_key("6"))
    spans = [make_span(*key_of(begun), "s", 1, attributes={"a": "secret"}), make_span("ro-x", "at-x", "s")]
    await store.import_spans([spans[0]])
    await store.import_spans([*spans, make_span(*key_of(begun), "t", 2)], idempotency_key=a_key("7"))
    await store.dequeue_rollout("w", idempotency_key=a_key("8"))
    rows = await rows_of(store, KEYS)
    assert [tuple(row[:4]) for row in rows] == [(str(number), 0, "route", "print") for number in range(1, 8)]
    assert [json.loads(row[4]) for row in rows] == [
        [rollout.rollout_id for rollout in many],
        [list(key_of(rollout)) for rollout in claimed],
        [list(key_of(begun))],
        [list(key_of(again))],
        [begun.rollout_id],
        [resources.resources_id],
        "120",
    ]


async def test_a_span_of_empty_texts(store: SqlStore) -> None:
    [rollout] = await started(store)
    span = make_span(*key_of(rollout), "", trace_id="", parent_id="", name="")
    for _ in range(2):
        assert (await store.import_spans([span], idempotency_key=a_key("k"))).stored == [span]
    await store.enqueue_rollout(1)
    assert await store.dequeue_rollout("", idempotency_key=a_key("claim")) is not None


async def test_keyed_calls_join(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Counter[str] = Counter()

    def counting(name: str) -> Any:
        send = getattr(store._lanes.hot, name)

        async def counted(*arguments: Any) -> Any:
            sizes[name] += 1
            return await send(*arguments)

        return counted

    for name in ("enqueue", "claim", "add_spans"):
        monkeypatch.setattr(store._lanes.hot, name, counting(name))
    count = 30
    keys = [a_key(f"k{number}") for number in range(3 * count)]
    await at_once(*(store.enqueue_rollout(n, idempotency_key=keys[n]) for n in range(count)))
    claimed = await at_once(
        *(store.dequeue_rollout(f"w{n}", idempotency_key=keys[count + n]) for n in range(count)),
        *(store.dequeue_rollout() for _ in range(3)),
    )
    assert sum(rollout is not None for rollout in claimed) == count
    spans = [make_span(*key_of(rollout), "s") for rollout in claimed if rollout is not None]
    receipts = await at_once(
        *(store.import_spans([span], idempotency_key=key) for span, key in zip(spans, keys[2 * count :], strict=True)),
        *(store.add_span(make_span(*key_of(claimed[0] or claimed[1]), f"more{n}")) for n in range(3)),
    )
    assert [receipt.stored for receipt in receipts[:count]] == [[span] for span in spans]
    assert max(sizes.values()) <= 4, sizes
    assert len(await rows_of(store, KEYS)) == 3 * count


async def test_a_repeat_among_others(store: SqlStore) -> None:
    """It spoils the statement for all that are in it; each of them is then run alone."""
    first = await store.enqueue_rollout("first", idempotency_key=a_key("first"))
    answers = await at_once(
        *(store.enqueue_rollout(number, idempotency_key=a_key(str(number))) for number in range(5)),
        store.enqueue_rollout("first", idempotency_key=a_key("first")),
        *(store.enqueue_rollout(number) for number in range(5, 9)),
        store.enqueue_rollout("other", idempotency_key=a_key("first")._replace(fingerprint="other")),
    )
    assert answers[5] == first
    assert isinstance(answers[-1], IdempotencyKeyReusedError)
    assert [rollout.input for rollout in answers[:-1]] == [0, 1, 2, 3, 4, "first", 5, 6, 7, 8]
    assert len(await queue_of(store)) == 10


async def test_repeats_at_several_servers(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(3)]
    for turn in range(10):
        key = a_key(f"turn {turn}")
        queued = await asyncio.gather(*(store.enqueue_rollout(turn, idempotency_key=key) for store in stores))
        assert len({rollout.rollout_id for rollout in queued}) == 1
        await stores[0].enqueue_rollout("another")
        key = a_key(f"claim {turn}")
        claimed = await asyncio.gather(*(store.dequeue_rollout("w", idempotency_key=key) for store in stores))
        # Whoever came while the first was on its way, and found nothing beside it, need only ask again.
        claimed += [await store.dequeue_rollout("w", idempotency_key=key) for store in stores]
        assert None not in claimed[3:]
        assert len({rollout.attempt.attempt_id for rollout in claimed if rollout is not None}) == 1
        key = a_key(f"attempt {turn}")
        begun = await asyncio.gather(
            *(store.start_attempt(queued[0].rollout_id, idempotency_key=key) for store in stores)
        )
        assert len({rollout.attempt.attempt_id for rollout in begun}) == 1


async def test_keys_are_kept_for_a_day(store: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_store, "FORGET_SECONDS", 0.0)
    monkeypatch.setattr(idempotency, "FORGOTTEN_AT_ONCE", 2)
    [rollout] = await started(store)
    drafts = [span_draft(make_span(*key_of(rollout), "s"))]
    for number in range(5):
        await store.enqueue_rollout(number, idempotency_key=a_key(f"old {number}"))
    for part in range(3):
        await store.add_span_rows(drafts, strict=False, idempotency_key=a_key("parts"), part=part)
    clock.now += 80_000
    await store.enqueue_rollout("young", idempotency_key=a_key("young"))
    await store.maintain()
    assert len(await rows_of(store, KEYS)) == 9
    clock.now += 6_401
    await store.maintain()
    assert [row[0] for row in await rows_of(store, KEYS)] == ["young"]
    assert (await store.enqueue_rollout("young", idempotency_key=a_key("young"))).input == "young"
    again = await store.enqueue_rollout("again", idempotency_key=a_key("old 1"))
    assert again.input == "again"


@pytest.mark.parametrize("name", ["\x00", "\ud800", "\x1a", "\x1a\x00", "ü" * 256, "'; --", "%s :key"])
async def test_any_text_is_a_key(store: SqlStore, name: str) -> None:
    key = IdempotencyKey(name, name, name)
    one = await store.enqueue_rollout(1, idempotency_key=key)
    assert await store.enqueue_rollout(1, idempotency_key=key) == one
    claim = IdempotencyKey(name + "\x1a" if len(name) < 200 else name[1:], name, name)
    claimed = await store.dequeue_rollout(idempotency_key=claim)
    assert claimed is not None
    assert await store.dequeue_rollout(idempotency_key=claim) == claimed
    begun = await store.start_rollout(1, idempotency_key=IdempotencyKey(name[:100] + "start", name, name))
    assert await store.start_rollout(1, idempotency_key=IdempotencyKey(name[:100] + "start", name, name)) == begun


async def test_what_stands_twice_without_a_key_fails(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another duplicate is not taken for a repeat."""
    there = await store.enqueue_rollout("there")
    monkeypatch.setattr("lightning_sql.store.rows.new_rollout_id", lambda: there.rollout_id)
    with pytest.raises(DuplicatedPrimaryKeyError):
        await store.enqueue_rollout("another", idempotency_key=a_key("k"))
    assert await rows_of(store, KEYS) == []


async def test_partitions_have_keys_of_their_own(open_store: OpenStore) -> None:
    one, other = open_store(), open_store(partition="another partition")
    rollouts = [await store.enqueue_rollout(1, idempotency_key=a_key("k")) for store in (one, other)]
    assert rollouts[0].rollout_id != rollouts[1].rollout_id
