"""The laws that no call, in no order and however many at once, may break."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import (
    ROLLOUT_QUEUED,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    Span,
)
from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import (
    PATIENCE,
    StoreFixtures,
    attempt_of,
    attempted,
    contents,
    drain,
    inputs,
    retrying,
    rollout_of,
    worker_of,
)
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, assert_same, make_span

__all__ = ["BatchContract", "ConcurrencyContract", "PayloadContract", "QueueLawContract", "ServiceContract"]


async def numbers_of(store: LightningStore, rollout_id: str) -> list[int]:
    """The numbers of a rollout's attempts."""
    return [attempt.sequence_id for attempt in await store.query_attempts(rollout_id)]


class ServiceContract(StoreFixtures):
    """What a store says about itself, and that a call that failed changed nothing."""

    async def test_capabilities(self, store: LightningStore) -> None:
        capabilities = store.capabilities
        assert set(capabilities) == {"thread_safe", "async_safe", "zero_copy", "otlp_traces"}
        assert all(type(value) is bool for value in capabilities.values())
        assert capabilities["async_safe"]
        await store.ping()

    async def test_statistics(self, store: LightningStore) -> None:
        def counts(statistics: Any) -> list[int]:
            return [statistics[f"total_{name}"] for name in ("rollouts", "attempts", "spans", "resources", "workers")]

        first = await store.statistics()
        assert first["name"]
        assert counts(first) == [0, 0, 0, 0, 0]
        started = await store.start_rollout(1, worker_id="w")
        await store.enqueue_rollout(2)
        await store.start_attempt(started.rollout_id)
        await store.start_attempt(started.rollout_id)
        for name in "abcd":
            await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, name))
        for name in "abcde":
            await store.update_resources(name, {})
        second = await store.statistics()
        assert counts(second) == [2, 3, 4, 5, 1]
        assert second.get("uptime", 0.0) >= first.get("uptime", 0.0) >= 0.0

    async def test_a_bad_value_changes_nothing(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        await store.enqueue_rollout(2)
        key = (started.rollout_id, started.attempt.attempt_id)
        before = await contents(store, started.rollout_id)
        wrong: Any = object()
        nan = float("nan")
        long_id = "w" * 3000
        calls: list[Any] = [
            lambda: store.update_rollout(key[0], status=wrong),
            lambda: store.update_rollout(key[0], input=5, mode=wrong),
            lambda: store.update_rollout(key[0], input=5, resources_id="a\x00b"),
            lambda: store.update_attempt(*key, metadata={"x": 1}, status=wrong),
            lambda: store.update_attempt(*key, metadata={"x": 1}, last_heartbeat_time=nan),
            lambda: store.update_attempt(*key, status="failed", worker_id="a\x00b"),
            lambda: store.update_attempt(*key, status="failed", worker_id=long_id),
            lambda: store.start_rollout(3, mode=wrong),
            lambda: store.start_rollout(3, worker_id="\ud800"),
            lambda: store.start_attempt(key[0], worker_id="a\x00b"),
            lambda: store.dequeue_rollout(worker_id="a\x00b"),
            lambda: store.dequeue_rollout(worker_id=long_id),
            lambda: store.enqueue_rollout(3, resources_id=long_id),
            lambda: store.update_resources("a\x00b", {}),
            lambda: store.update_worker(long_id, {"x": 1}),
        ]
        for number, call in enumerate(calls):
            with pytest.raises((ValueError, TypeError)):
                await call()
            assert await contents(store, started.rollout_id) == before, number
        assert inputs(await drain(store)) == [2]


class BatchContract(StoreFixtures):
    """Batches of spans, law 10 among them; not for a client of the protocol, which sends spans one by one."""

    async def test_a_batch_with_one_bad_span_stores_none(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        key = (started.rollout_id, started.attempt.attempt_id)
        before = await contents(store, started.rollout_id)
        spans = [make_span(*key, "a", 5), make_span(key[0], "at-00000000", "lost", 6), make_span(*key, "b", 7)]
        with pytest.raises(RecordNotFoundError):
            await store.add_many_spans(spans)
        assert await contents(store, started.rollout_id) == before
        assert await store.get_next_span_sequence_id(*key) == 1

    async def test_thousands_of_spans_in_one_call(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        key = (started.rollout_id, started.attempt.attempt_id)
        spans = [make_span(*key, f"s{number}", number) for number in range(1, 1501)]
        receipt = await store.import_spans(spans)
        assert [span.span_id for span in receipt.stored] == [span.span_id for span in spans]
        page = await store.query_spans(started.rollout_id, limit=2, offset=1000)
        assert ([span.sequence_id for span in page], page.total) == ([1001, 1002], 1500)
        assert await store.get_next_span_sequence_id(started.rollout_id, "any") == 1501


class QueueLawContract(StoreFixtures):
    """Laws 2 and 4: a rollout is in the queue exactly while its status says so, and once."""

    async def test_new_life_takes_a_retry_out_of_the_queue(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, config=retrying())
        await store.update_attempt(started.rollout_id, "latest", status="unresponsive")
        assert (await rollout_of(store, started.rollout_id)).status == "requeuing"
        await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "s"))
        assert (await rollout_of(store, started.rollout_id)).status == "running"
        assert await store.dequeue_rollout() is None
        assert await numbers_of(store, started.rollout_id) == [1]

    async def test_and_when_it_is_lost_again_it_is_queued_once(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, config=retrying())
        waiting = await store.enqueue_rollout(2)
        for number in range(3):
            await store.update_attempt(started.rollout_id, "latest", status="unresponsive")
            await store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, f"s{number}"))
        await store.update_attempt(started.rollout_id, "latest", status="unresponsive")
        claimed = await drain(store)
        assert [item.rollout_id for item in claimed] == [waiting.rollout_id, started.rollout_id]

    async def test_start_attempt_takes_it_out_of_the_queue(self, store: LightningStore) -> None:
        first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
        await store.start_attempt(first.rollout_id)
        assert [item.rollout_id for item in await drain(store)] == [second.rollout_id]
        await store.update_rollout(first.rollout_id, status="requeuing")
        await store.start_attempt(first.rollout_id)
        await store.update_rollout(first.rollout_id, status="requeuing")
        assert [item.attempt.sequence_id for item in await drain(store)] == [3]

    async def test_a_status_back_and_forth_keeps_one_entry(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout(1)
        statuses: list[Any] = ["running", "queuing", "requeuing", "queuing", "cancelled", "requeuing", "queuing"]
        for status in statuses:
            await store.update_rollout(rollout.rollout_id, status=status)
        assert [item.rollout_id for item in await drain(store)] == [rollout.rollout_id]
        await store.update_rollout(rollout.rollout_id, status="queuing")
        await store.update_rollout(rollout.rollout_id, status="succeeded")
        assert await drain(store) == []

    async def test_a_fresh_entry_does_not_jump_the_queue(self, store: LightningStore) -> None:
        """An entry that was given up is gone: what is queued again waits behind what came in between."""
        first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
        await store.update_rollout(first.rollout_id, status="running")
        await store.update_rollout(first.rollout_id, status="queuing")
        assert [item.rollout_id for item in await drain(store)] == [second.rollout_id, first.rollout_id]

    async def test_a_claim_of_many_skips_what_left_the_queue(self, store: LightningStore) -> None:
        rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(6)])
        for number in (0, 2, 3):
            await store.update_rollout(rollouts[number].rollout_id, status="cancelled")
        assert inputs(await store.dequeue_many_rollouts(limit=2)) == [1, 4]
        assert inputs(await store.dequeue_many_rollouts(limit=2)) == [5]

    @pytest.mark.parametrize("seed", range(4))
    async def test_after_any_calls_the_queue_is_what_the_status_says(self, store: LightningStore, seed: int) -> None:
        chance = random.Random(seed)
        rollouts = [await store.enqueue_rollout(number, config=retrying(9)) for number in range(4)]
        attempts: list[Any] = ["running", "failed", "succeeded", "unresponsive", "timeout"]
        statuses: list[Any] = ["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
        for step in range(60):
            rollout_id = chance.choice(rollouts).rollout_id
            latest = await store.get_latest_attempt(rollout_id)
            match chance.randrange(6):
                case 0:
                    await store.dequeue_rollout()
                case 1:
                    await store.update_rollout(rollout_id, status=chance.choice(statuses))
                case 2:
                    await store.start_attempt(rollout_id)
                case 3 if latest is not None:
                    number = chance.randint(1, latest.sequence_id)
                    attempt = await attempt_of(store, rollout_id, number)
                    await store.add_span(make_span(rollout_id, attempt.attempt_id, f"s{step}"))
                case _ if latest is not None:
                    number = chance.randint(1, latest.sequence_id)
                    attempt = await attempt_of(store, rollout_id, number)
                    await store.update_attempt(rollout_id, attempt.attempt_id, status=chance.choice(attempts))
                case _:
                    await store.dequeue_many_rollouts(limit=2)
        queued = [item.rollout_id for item in await store.query_rollouts(status_in=list(ROLLOUT_QUEUED))]
        assert sorted(item.rollout_id for item in await drain(store)) == sorted(queued)
        for rollout in rollouts:
            numbers = await numbers_of(store, rollout.rollout_id)
            assert numbers == list(range(1, len(numbers) + 1))


class ConcurrencyContract(StoreFixtures):
    """Laws 2, 3, 5 and 8, with many callers at once."""

    async def test_every_entry_is_claimed_once(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(60)])

        async def work(number: int) -> list[AttemptedRollout]:
            mine: list[AttemptedRollout] = []
            while batch := await store.dequeue_many_rollouts(limit=1 + number % 3, worker_id=f"w{number}"):
                mine += batch
            return mine

        async with asyncio.timeout(PATIENCE):
            shares = await asyncio.gather(*(work(number) for number in range(8)))
        assert sorted(item.input for share in shares for item in share) == list(range(60))
        for number, share in enumerate(shares):
            assert all(item.attempt.worker_id == f"w{number}" for item in share)
            assert inputs(share) == sorted(inputs(share))
        for rollout in await store.query_rollouts():
            assert attempted(rollout).attempt.sequence_id == 1

    async def test_a_rollout_is_never_neither_queued_nor_attempted(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=number, config=retrying(2)) for number in range(15)]
        )
        working = True

        async def work() -> None:
            while (claimed := await store.dequeue_rollout()) is not None:
                await store.update_attempt(claimed.rollout_id, "latest", status="failed")

        async def watch() -> int:
            looks = 0
            while working:
                for rollout in await store.query_rollouts():
                    if isinstance(rollout, AttemptedRollout):
                        count = rollout.attempt.sequence_id
                        expected = {
                            "preparing": ("preparing", count),
                            "failed": ("failed", 2),
                            "requeuing": ("failed", 1),
                        }
                        assert (rollout.attempt.status, count) == expected[rollout.status]
                    else:
                        assert rollout.status == "queuing"
                looks += 1
                await asyncio.sleep(0)
            return looks

        async with asyncio.timeout(PATIENCE):
            watcher = asyncio.create_task(watch())
            await asyncio.gather(*(work() for _ in range(4)))
            working = False
            assert await watcher > 0
        assert {rollout.status for rollout in await store.query_rollouts()} == {"failed"}

    async def test_a_claim_given_up_loses_nothing(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(30)])
        chance = random.Random(5)
        for _ in range(15):
            claim = asyncio.create_task(store.dequeue_rollout(worker_id="w"))
            await asyncio.sleep(chance.random() * 0.004)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
        async with asyncio.timeout(PATIENCE):
            await drain(store)
        for rollout in await store.query_rollouts():
            assert (rollout.status, attempted(rollout).attempt.sequence_id) == ("preparing", 1)

    async def test_attempts_are_numbered_without_gap(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout(1)
        async with asyncio.timeout(PATIENCE):
            begun = await asyncio.gather(*(store.start_attempt(rollout.rollout_id, f"w{n}") for n in range(12)))
        assert sorted(item.attempt.sequence_id for item in begun) == list(range(1, 13))
        assert await numbers_of(store, rollout.rollout_id) == list(range(1, 13))
        assert len({item.attempt.attempt_id for item in begun}) == 12
        assert await store.dequeue_rollout() is None

    async def test_a_span_sent_many_times_is_stored_once(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        key = (started.rollout_id, started.attempt.attempt_id)

        async def send(number: int) -> list[Span]:
            spans = [make_span(*key, f"s{(number + step) % 6}", number + 1) for step in range(3)]
            return list(await store.add_many_spans(spans))

        async with asyncio.timeout(PATIENCE):
            answers = [
                span for batch in await asyncio.gather(*(send(number) for number in range(12))) for span in batch
            ]
        assert sorted(span.span_id for span in answers) == [f"s{number}" for number in range(6)]
        stored = await store.query_spans(started.rollout_id, sort_by="span_id")
        assert_same(stored.items, sorted(answers, key=lambda span: span.span_id))

    async def test_updates_at_once_all_count(self, store: LightningStore) -> None:
        started = await store.start_rollout(1, worker_id="w")
        changes: dict[str, Any] = {"input": 2, "mode": "val", "resources_id": "r", "metadata": {"x": 1}}
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(
                *(store.update_rollout(started.rollout_id, **{name: value}) for name, value in changes.items()),
                store.update_attempt(started.rollout_id, "latest", status="running"),
                store.update_attempt(started.rollout_id, "latest", metadata={"y": 1}),
                store.update_worker("w", {"z": 1}),
                store.add_span(make_span(started.rollout_id, started.attempt.attempt_id, "s")),
            )
        rollout = attempted(await store.get_rollout_by_id(started.rollout_id))
        assert {name: getattr(rollout, name) for name in changes} == changes
        assert (rollout.status, rollout.attempt.status, rollout.attempt.metadata) == ("running", "running", {"y": 1})
        assert rollout.attempt.last_heartbeat_time is not None
        worker = await worker_of(store, "w")
        assert (worker.status, worker.heartbeat_stats, worker.current_rollout_id) == (
            "busy",
            {"z": 1},
            started.rollout_id,
        )

    async def test_everything_at_once(self, store: LightningStore) -> None:
        """Runners, a canceller, retries and spans together: no entry is lost and no number repeats."""
        total = 24
        config = retrying(3)
        numbers: list[int] = []

        async def produce() -> None:
            for number in range(total):
                await store.enqueue_rollout(number, config=config)

        async def run(name: str) -> None:
            chance = random.Random(name)
            idle = 0
            while idle < 20:
                claimed = await store.dequeue_rollout(worker_id=name)
                if claimed is None:
                    idle += 1
                    await asyncio.sleep(0.002)
                    continue
                idle = 0
                key = (claimed.rollout_id, claimed.attempt.attempt_id)
                for _ in range(2):
                    number = await store.get_next_span_sequence_id(*key)
                    numbers.append(number)
                    await store.add_span(make_span(*key, f"{key[1]}-{number}", number))
                outcome: Any = chance.choice(["succeeded", "failed", "timeout", "succeeded"])
                await store.update_attempt(*key, status=outcome)

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(produce(), *(run(f"w{number}") for number in range(5)))
        attempts = 0
        for rollout in await store.query_rollouts():
            counted = await numbers_of(store, rollout.rollout_id)
            assert counted == list(range(1, len(counted) + 1))
            assert rollout.status in ("succeeded", "failed")
            assert len(counted) == 3 or rollout.status == "succeeded"
            spans = [span.sequence_id for span in await store.query_spans(rollout.rollout_id)]
            assert spans == list(range(1, 2 * len(counted) + 1))
            attempts += len(counted)
        assert len(numbers) == 2 * attempts
        assert {worker.status for worker in await store.query_workers()} == {"idle"}


class PayloadContract(StoreFixtures):
    """Law 9: what goes in comes out."""

    @pytest.mark.parametrize("payload", ODD_PAYLOADS)
    async def test_payloads_come_back_exactly(self, store: LightningStore, payload: str) -> None:
        value = ODD_PAYLOADS[payload]
        metadata = {"value": value}
        enqueued = await store.enqueue_rollout(value, metadata=metadata)
        assert_same((enqueued.input, enqueued.metadata), (value, metadata))
        claimed = attempted(await store.dequeue_rollout())
        assert_same((claimed.input, claimed.metadata), (value, metadata))
        updated = await store.update_rollout(claimed.rollout_id, input=[value], metadata={})
        assert_same((updated.input, updated.metadata), ([value], {}))
        attempt = await store.update_attempt(claimed.rollout_id, "latest", metadata=metadata)
        assert_same(attempt.metadata, metadata)
        worker = await store.update_worker("w", metadata)
        assert_same(worker.heartbeat_stats, metadata)
        assert_same(await store.get_worker_by_id("w"), worker)
        again = attempted(await store.get_rollout_by_id(claimed.rollout_id))
        assert_same(Rollout(**{name: getattr(again, name) for name in Rollout.model_fields}), updated)
        assert_same(again.attempt, attempt)
        span = make_span(claimed.rollout_id, claimed.attempt.attempt_id, "s", custom=value)
        assert_same(await store.add_span(span), span)
        assert_same((await store.query_spans(claimed.rollout_id)).items, [span])
        [waited] = await self.waited(store, claimed.rollout_id)
        assert_same(waited.input, [value])

    async def waited(self, store: LightningStore, rollout_id: str) -> list[Rollout]:
        """A rollout as a wait gives it."""
        await store.update_rollout(rollout_id, status="succeeded")
        return await store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=0)

    @pytest.mark.parametrize("text", ODD_STRINGS)
    async def test_texts_of_spans_and_resources_come_back_exactly(self, store: LightningStore, text: str) -> None:
        value = ODD_STRINGS[text]
        started = await store.start_rollout(1)
        fields: dict[str, Any] = {
            "name": value,
            "status": {"status_code": "OK", "description": value, "more": {value: value}},
            "attributes": {value: value, "list": [value, value]},
            "events": [{"name": value, "attributes": {value: [1]}}],
            "resource": {"attributes": {value: True}, "schema_url": value},
        }
        span = make_span(started.rollout_id, started.attempt.attempt_id, "s", **fields)
        assert_same(await store.add_span(span), span)
        assert_same((await store.query_spans(started.rollout_id, name=value)).items, [span])
        assert_same((await store.query_spans(started.rollout_id, name_contains=value)).items, [span])
        resources: Any = {value: {"resource_type": "prompt_template", "template": value, "engine": "jinja"}}
        written = await store.update_resources("r", resources)
        assert_same(await store.get_latest_resources(), written)
        assert list(written.resources) == [value]
        assert_same(written.resources[value].template, value)  # type: ignore[union-attr]

    async def test_attribute_types_are_kept(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        attributes: dict[str, Any] = {
            "int": 1, "float": 1.0, "bool": True, "big": 2**80, "zero": -0.0, "ints": [1, 2], "floats": [1.0, 2.0],
            "bools": [True, False], "nan": float("nan"), "inf": [float("inf"), -float("inf")], "texts": ["1", ""],
        }  # fmt: skip
        span = make_span(started.rollout_id, started.attempt.attempt_id, "s", attributes=attributes)
        await store.add_span(span)
        [stored] = (await store.query_spans(started.rollout_id)).items
        assert_same(stored.attributes, attributes)
