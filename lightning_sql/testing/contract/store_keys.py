"""What a repeated call does: nothing, and it is answered as the first was."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from lightning_sql.errors import IdempotencyKeyReusedError, InvalidRequestError, RecordNotFoundError
from lightning_sql.records import EnqueueRolloutRequest, IdempotencyKey, NamedResources, PromptTemplate
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import StoreFixtures, attempted, contents, drain, inputs, rollout_of
from lightning_sql.testing.samples import assert_same, make_span

__all__ = ["IdempotencyContract"]


def fresh_key(fingerprint: str = "") -> IdempotencyKey:
    """A key that no call had yet."""
    return IdempotencyKey(uuid.uuid4().hex, "a route", fingerprint)


class IdempotencyContract(StoreFixtures):
    """Calls with an `idempotency_key` take place once."""

    async def test_enqueueing_again(self, store: LightningStore) -> None:
        key = fresh_key()
        requests = [EnqueueRolloutRequest(input=number, metadata={"n": number}) for number in range(3)]
        first = await store.enqueue_many_rollouts(requests, idempotency_key=key)
        assert_same(await store.enqueue_many_rollouts(requests, idempotency_key=key), first)
        claimed = await drain(store)
        assert inputs(claimed) == [0, 1, 2]
        await store.update_rollout(first[1].rollout_id, status="cancelled")
        again = await store.enqueue_many_rollouts(requests, idempotency_key=key)
        assert [rollout.rollout_id for rollout in again] == [rollout.rollout_id for rollout in first]
        # As they are now.
        assert [rollout.status for rollout in again] == ["preparing", "cancelled", "preparing"]
        assert (await store.query_rollouts()).total == 3

    async def test_another_key_is_another_call(self, store: LightningStore) -> None:
        one = await store.enqueue_rollout("same", idempotency_key=fresh_key())
        two = await store.enqueue_rollout("same", idempotency_key=fresh_key())
        assert one.rollout_id != two.rollout_id
        assert inputs(await drain(store)) == ["same", "same"]

    async def test_claiming_again(self, store: LightningStore) -> None:
        key = fresh_key()
        for number in range(4):
            await store.enqueue_rollout(number)
        first = await store.dequeue_many_rollouts(limit=2, worker_id="w", idempotency_key=key)
        assert inputs(first) == [0, 1]
        assert_same(await store.dequeue_many_rollouts(limit=2, worker_id="w", idempotency_key=key), first)
        ended = first[0]
        await store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status="succeeded")
        later = await store.start_attempt(ended.rollout_id)
        [again, _] = await store.dequeue_many_rollouts(limit=2, worker_id="w", idempotency_key=key)
        # The attempt that was claimed, not the latest one.
        assert again.attempt.attempt_id == ended.attempt.attempt_id != later.attempt.attempt_id
        assert (again.attempt.status, again.status) == ("succeeded", "preparing")
        assert inputs(await drain(store)) == [2, 3]

    async def test_claiming_one_again(self, store: LightningStore) -> None:
        key = fresh_key()
        await store.enqueue_rollout("one")
        await store.enqueue_rollout("two")
        first = attempted(await store.dequeue_rollout("w", idempotency_key=key))
        assert_same(await store.dequeue_rollout("w", idempotency_key=key), first)
        assert inputs(await drain(store)) == ["two"]

    async def test_a_claim_that_found_nothing_looks_again(self, store: LightningStore) -> None:
        key = fresh_key()
        assert await store.dequeue_rollout("w", idempotency_key=key) is None
        assert await store.dequeue_many_rollouts(limit=3, worker_id="w", idempotency_key=key) == []
        await store.enqueue_rollout("late")
        found = attempted(await store.dequeue_rollout("w", idempotency_key=key))
        assert found.input == "late"
        await store.enqueue_rollout("later")
        assert_same(await store.dequeue_rollout("w", idempotency_key=key), found)

    async def test_starting_again(self, store: LightningStore) -> None:
        key = fresh_key()
        first = await store.start_rollout({"a": 1}, worker_id="w", idempotency_key=key)
        assert_same(await store.start_rollout({"a": 1}, worker_id="w", idempotency_key=key), first)
        assert (await store.query_rollouts()).total == 1

    async def test_starting_an_attempt_again(self, store: LightningStore) -> None:
        key = fresh_key()
        rollout = await store.enqueue_rollout(1)
        first = await store.start_attempt(rollout.rollout_id, "w", idempotency_key=key)
        assert_same(await store.start_attempt(rollout.rollout_id, "w", idempotency_key=key), first)
        assert (await store.query_attempts(rollout.rollout_id)).total == 1
        with pytest.raises(RecordNotFoundError):
            await store.start_attempt("ro-none", idempotency_key=fresh_key())

    async def test_updating_a_rollout_again(self, store: LightningStore) -> None:
        key = fresh_key()
        rollout = await store.start_rollout(1)
        queued = await store.update_rollout(rollout.rollout_id, status="queuing", idempotency_key=key)
        assert queued.status == "queuing"
        assert inputs(await drain(store)) == [1]
        again = await store.update_rollout(rollout.rollout_id, status="queuing", idempotency_key=key)
        assert again.status == "preparing"
        assert await store.dequeue_rollout() is None

    async def test_resources_again(self, store: LightningStore) -> None:
        resources: NamedResources = {"prompt": PromptTemplate(template="{x}", engine="f-string")}
        key = fresh_key()
        first = await store.add_resources(resources, idempotency_key=key)
        assert_same(await store.add_resources(resources, idempotency_key=key), first)
        assert (await store.query_resources()).total == 1
        key = fresh_key()
        second = await store.update_resources(first.resources_id, resources, idempotency_key=key)
        assert second.version == 2
        assert_same(await store.update_resources(first.resources_id, resources, idempotency_key=key), second)

    async def test_spans_again(self, store: LightningStore) -> None:
        await store.enqueue_rollout(1)
        claimed = attempted(await store.dequeue_rollout())
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        known = make_span(*ids, "known", 1)
        await store.add_span(known)
        spans = [make_span(*ids, "new", 2), known, make_span(*ids, "newer", 3), make_span("ro-none", "at-none", "x", 4)]
        spans.append(spans[0])
        key = fresh_key()
        first = await store.import_spans(spans, idempotency_key=key)
        assert [span.span_id for span in first.stored] == ["new", "newer"]
        assert (first.duplicates, [span.span_id for span in first.rejected]) == (2, ["x"])
        assert_same(await store.import_spans(spans, idempotency_key=key), first)
        assert (await store.query_spans(claimed.rollout_id)).total == 3
        # Under another key, they are duplicates.
        other = await store.import_spans(spans, idempotency_key=fresh_key())
        assert (other.stored, other.duplicates) == ([], 4)

    async def test_a_key_of_another_call_is_refused(self, store: LightningStore) -> None:
        key = fresh_key("one")
        rollout = await store.enqueue_rollout(1, idempotency_key=key)
        for other in (key._replace(fingerprint="two"), key._replace(route="another")):
            with pytest.raises(IdempotencyKeyReusedError):
                await store.enqueue_rollout(2, idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.dequeue_rollout("w", idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.start_rollout(2, idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.start_attempt(rollout.rollout_id, idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.update_rollout(rollout.rollout_id, status="failed", idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.add_resources({}, idempotency_key=other)
            with pytest.raises(IdempotencyKeyReusedError):
                await store.import_spans([make_span("ro-none", "at-none", "x", 4)], idempotency_key=other)
        assert (await store.query_rollouts()).total == 1
        assert (await rollout_of(store, rollout.rollout_id)).status == "queuing"
        assert (await store.query_resources()).total == 0

    @pytest.mark.parametrize("text", ["", "x" * 513])
    async def test_what_is_no_key(self, store: LightningStore, text: str) -> None:
        with pytest.raises(InvalidRequestError):
            await store.enqueue_rollout(1, idempotency_key=IdempotencyKey(text))
        assert (await store.query_rollouts()).total == 0

    async def test_repeats_at_once(self, store: LightningStore) -> None:
        """Those of one key get one answer, in the middle of calls with other keys and with none."""
        shared, mine = fresh_key(), [fresh_key() for _ in range(6)]
        queued = await asyncio.gather(
            *(store.enqueue_rollout("shared", idempotency_key=shared) for _ in range(6)),
            *(store.enqueue_rollout("mine", idempotency_key=key) for key in mine),
            *(store.enqueue_rollout("nobody's") for _ in range(6)),
        )
        assert len({rollout.rollout_id for rollout in queued[:6]}) == 1
        assert (await store.query_rollouts()).total == 13

        keys = [fresh_key() for _ in range(5)]
        claimed = await asyncio.gather(
            *(store.dequeue_rollout(f"w{number % 5}", idempotency_key=keys[number % 5]) for number in range(15)),
            *(store.dequeue_rollout() for _ in range(3)),
        )
        by_key = [{attempted(claimed[place]).attempt.attempt_id for place in range(n, 15, 5)} for n in range(5)]
        assert [len(ids) for ids in by_key] == [1] * 5
        assert len({attempted(rollout).rollout_id for rollout in claimed}) == 8
        assert len(await drain(store)) == 5

        last = attempted(claimed[-1])
        span = make_span(last.rollout_id, last.attempt.attempt_id, "s", 1)
        key = fresh_key()
        receipts = await asyncio.gather(*(store.import_spans([span], idempotency_key=key) for _ in range(5)))
        assert [receipt.stored for receipt in receipts] == [[span]] * 5

    async def test_a_call_that_failed_can_be_made_again(self, store: LightningStore) -> None:
        key = fresh_key()
        with pytest.raises(RecordNotFoundError):
            await store.update_rollout("ro-none", mode="train", idempotency_key=key)
        rollout = await store.enqueue_rollout(1, idempotency_key=key)
        assert inputs(await drain(store)) == [rollout.input]

    async def test_a_repeat_changes_nothing(self, store: LightningStore) -> None:
        await store.enqueue_rollout(1)
        key = fresh_key()
        claimed = attempted(await store.dequeue_rollout("w", idempotency_key=key))
        before = await contents(store, claimed.rollout_id)
        await store.dequeue_rollout("w", idempotency_key=key)
        assert_same(await contents(store, claimed.rollout_id), before)
