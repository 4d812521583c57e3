"""What every `LightningCollections` does: its seven collections, and transactions over them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_sql.collections.protocols import LABELS, AtomicLabel, LightningCollections
from lightning_sql.errors import DuplicatedPrimaryKeyError, RecordNotFoundError
from lightning_sql.records import (
    Attempt,
    AttemptedRollout,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
)
from lightning_sql.testing.samples import assert_same, make_span

__all__ = ["TransactionContract"]

PATIENCE = 30.0
"""Seconds after which something that should end counts as hung."""


class DeliberateError(Exception):
    """Raised by a test inside a transaction."""


def rollout(number: int, **fields: Any) -> Rollout:
    """A rollout with an id made of a number."""
    values: dict[str, Any] = {"input": number, "start_time": float(number)} | fields
    return Rollout(rollout_id=f"ro-{number}", **values)


async def everything(collections: LightningCollections) -> dict[str, Any]:
    """All that is stored."""
    return {
        "rollouts": (await collections.rollouts.query()).items,
        "attempts": (await collections.attempts.query()).items,
        "spans": (await collections.spans.query()).items,
        "resources": (await collections.resources.query()).items,
        "workers": (await collections.workers.query()).items,
        "queue": list(await collections.rollout_queue.peek(1000)),
        "sequence": await collections.span_sequence_ids.get("ro-1"),
        "sequences": await collections.span_sequence_ids.size(),
    }


async def change_and_fail(inside: LightningCollections) -> None:
    """Change something everywhere, then raise."""
    await change(inside)
    raise DeliberateError


async def fill(collections: LightningCollections) -> None:
    """Put something into each of the seven."""
    await collections.rollouts.insert(
        [rollout(1, config=RolloutConfig(timeout_seconds=1.5), metadata={"b": 1, "a": 2})]
    )
    await collections.attempts.insert([Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0)])
    await collections.spans.insert([make_span("ro-1", "at-1", "s1", custom={"kept": [1]})])
    resources: Any = {"prompt": PromptTemplate(template="{x}", engine="f-string")}
    await collections.resources.insert(
        [ResourcesUpdate(resources_id="rs-1", create_time=1.0, update_time=1.0, version=1, resources=resources)]
    )
    await collections.workers.insert([Worker(worker_id="w-1", heartbeat_stats={"cpu": 0.5})])
    await collections.rollout_queue.enqueue(["ro-1", "ro-2"])
    await collections.span_sequence_ids.set("ro-1", 7)


async def change(collections: LightningCollections) -> None:
    """Change something in each of the seven, in every way there is."""
    await collections.rollouts.update([rollout(1, status="running")], ["status"])
    await collections.rollouts.insert([rollout(2)])
    await collections.attempts.delete([Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0)])
    await collections.spans.upsert([make_span("ro-1", "at-1", "s1", name="new"), make_span("ro-1", "at-1", "s2")])
    await collections.resources.delete((await collections.resources.query()).items)
    await collections.workers.upsert([Worker(worker_id="w-2"), Worker(worker_id="w-1", status="busy")])
    await collections.rollout_queue.dequeue()
    await collections.rollout_queue.enqueue(["ro-3", "ro-3"])
    await collections.rollout_queue.discard(["ro-2"])
    await collections.span_sequence_ids.inc("ro-1", 5)
    await collections.span_sequence_ids.chmax("ro-9", 3)
    await collections.span_sequence_ids.pop("ro-1")
    await collections.span_sequence_ids.set("ro-1", 1)


@pytest.mark.asyncio
class TransactionContract:
    """Needs the fixture `collections`, an empty `LightningCollections`."""

    async def test_the_seven_collections(self, collections: LightningCollections) -> None:
        held = {
            "rollouts": (Rollout, ["rollout_id"]),
            "attempts": (Attempt, ["rollout_id", "attempt_id"]),
            "spans": (Span, ["rollout_id", "attempt_id", "span_id"]),
            "resources": (ResourcesUpdate, ["resources_id"]),
            "workers": (Worker, ["worker_id"]),
        }
        for name, (item_type, keys) in held.items():
            collection = getattr(collections, name)
            assert collection.item_type() is item_type
            assert list(collection.primary_keys()) == keys
            assert item_type.__name__ in repr(collection)
        assert collections.rollout_queue.item_type() is str
        assert collections.collection_name
        names = {getattr(collections, name).collection_name for name in held}
        assert all(names)

    async def test_records_come_back_exactly(self, collections: LightningCollections) -> None:
        await fill(collections)
        stored = await everything(collections)
        assert_same(
            stored["rollouts"],
            [rollout(1, config=RolloutConfig(timeout_seconds=1.5), metadata={"b": 1, "a": 2})],
        )
        assert_same(stored["spans"], [make_span("ro-1", "at-1", "s1", custom={"kept": [1]})])
        assert isinstance(stored["resources"][0].resources["prompt"], PromptTemplate)
        assert stored["queue"] == ["ro-1", "ro-2"]
        assert stored["sequence"] == 7

    async def test_a_rollout_with_its_attempt_is_stored_as_a_rollout(self, collections: LightningCollections) -> None:
        attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0)
        await collections.rollouts.insert([AttemptedRollout(**dict(rollout(1)), attempt=attempt)])
        assert_same(await collections.rollouts.get(), rollout(1))

    async def test_now_does_not_go_back(self, collections: LightningCollections) -> None:
        times = [await collections.now() for _ in range(5)]
        assert times == sorted(times)
        assert all(type(time) is float for time in times)

    @pytest.mark.parametrize("labels", [None, LABELS, ("generic",), ()])
    async def test_a_transaction_makes_all_changes(
        self, collections: LightningCollections, labels: Iterable[AtomicLabel] | None
    ) -> None:
        async with collections.atomic(labels=labels) as inside:
            await fill(inside)
        before = await everything(collections)
        assert before["queue"] == ["ro-1", "ro-2"]
        async with collections.atomic(mode="rw", snapshot=True, labels=labels) as inside:
            await change(inside)
            seen = await everything(inside)
        after = await everything(collections)
        assert after == seen != before
        assert after["queue"] == ["ro-3", "ro-3"]
        assert (after["sequence"], after["sequences"]) == (1, 2)

    @pytest.mark.parametrize("snapshot", [False, True])
    async def test_a_transaction_that_fails_changes_nothing(
        self, collections: LightningCollections, snapshot: bool
    ) -> None:
        await fill(collections)
        before = await everything(collections)
        with pytest.raises(DeliberateError):
            async with collections.atomic(mode="rw", snapshot=snapshot) as inside:
                await change_and_fail(inside)
        assert await everything(collections) == before

        for commit in (False, True):
            with pytest.raises(DeliberateError):
                await collections.execute(change_and_fail, mode="rw", snapshot=snapshot, commit=commit)
            assert await everything(collections) == before
        await change(collections)
        assert await everything(collections) != before

    async def test_a_transaction_that_is_cancelled_changes_nothing(self, collections: LightningCollections) -> None:
        await fill(collections)
        before = await everything(collections)
        changed = asyncio.Event()

        async def stall() -> None:
            async with collections.atomic() as inside:
                await change(inside)
                changed.set()
                await asyncio.sleep(PATIENCE)

        task = asyncio.create_task(stall())
        await changed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(PATIENCE):
            assert await everything(collections) == before
            async with collections.atomic() as inside:
                await change(inside)

    async def test_the_order_of_insertion_survives_a_rollback(self, collections: LightningCollections) -> None:
        await collections.rollouts.insert([rollout(number) for number in (3, 1, 2)])

        async def reorder_and_fail(inside: LightningCollections) -> None:
            await inside.rollouts.delete([rollout(1), rollout(3)])
            await inside.rollouts.insert([rollout(3), rollout(1)])
            raise DeliberateError

        with pytest.raises(DeliberateError):
            await collections.execute(reorder_and_fail)
        await collections.rollouts.insert([rollout(0)])
        assert [item.input for item in (await collections.rollouts.query()).items] == [3, 1, 2, 0]

    async def test_a_caught_error_leaves_the_transaction_usable(self, collections: LightningCollections) -> None:
        await fill(collections)
        async with collections.atomic() as inside:
            await inside.workers.insert([Worker(worker_id="w-2")])
            with pytest.raises(DuplicatedPrimaryKeyError):
                await inside.workers.insert([Worker(worker_id="w-3"), Worker(worker_id="w-1")])
            with pytest.raises(DuplicatedPrimaryKeyError):
                await inside.rollouts.insert([rollout(5), rollout(5)])
            with pytest.raises(RecordNotFoundError):
                await inside.workers.update([Worker(worker_id="w-1", status="busy"), Worker(worker_id="w-9")])
            with pytest.raises(RecordNotFoundError):
                await inside.workers.delete([Worker(worker_id="w-1"), Worker(worker_id="w-9")])
            with pytest.raises(TypeError):
                await inside.span_sequence_ids.inc("ro-1", True)
            with pytest.raises(ValueError, match="64"):
                await inside.span_sequence_ids.inc("ro-1", 2**63 - 1)
            await inside.workers.insert([Worker(worker_id="w-4")])
        workers = (await collections.workers.query()).items
        assert [(worker.worker_id, worker.status) for worker in workers] == [
            ("w-1", "unknown"),
            ("w-2", "unknown"),
            ("w-4", "unknown"),
        ]
        assert await collections.span_sequence_ids.get("ro-1") == 7

    async def test_an_error_blocks_nobody_after_it(self, collections: LightningCollections) -> None:
        async def insert_and_fail(inside: LightningCollections) -> None:
            await inside.rollouts.insert([rollout(1)])
            raise DeliberateError

        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                with pytest.raises(DeliberateError):
                    async with collections.atomic(labels=["rollouts"]) as inside:
                        await insert_and_fail(inside)
                with pytest.raises(DuplicatedPrimaryKeyError):
                    await collections.rollouts.insert([rollout(2), rollout(2)])
            async with collections.atomic() as inside:
                await inside.rollouts.insert([rollout(1)])
            await collections.rollouts.insert([rollout(2)])
        assert await collections.rollouts.size() == 2

    async def test_execute_answers_what_the_callback_does(self, collections: LightningCollections) -> None:
        async def count(inside: LightningCollections) -> str:
            await inside.rollouts.insert([rollout(await inside.rollouts.size())])
            return f"{await inside.rollouts.size()} rollouts"

        assert await collections.execute(count) == "1 rollouts"
        assert await collections.execute(count, mode="rw", commit=True, labels=["rollouts"]) == "2 rollouts"

        async def read(inside: LightningCollections) -> int:
            return await inside.rollouts.size()

        assert await collections.execute(read, mode="r") == 2
        assert await collections.execute(read, mode="r", snapshot=True, labels=["rollouts"]) == 2

    async def test_commit_belongs_to_execute(self, collections: LightningCollections) -> None:
        with pytest.raises(ValueError, match="execute"):
            async with collections.atomic(commit=True):
                pass

    async def test_unknown_labels_are_refused(self, collections: LightningCollections) -> None:
        wrong: Any = ["rollouts", "everything"]
        with pytest.raises(ValueError, match="everything"):
            async with collections.atomic(labels=wrong):
                pass

    @pytest.mark.parametrize(
        ("one", "other"), [(("rollouts",), ("attempts", "rollouts")), (None, ("generic",)), (None, None)]
    )
    async def test_writers_with_a_common_label_exclude_each_other(
        self, collections: LightningCollections, one: Any, other: Any
    ) -> None:
        inside = 0

        async def work(labels: Any) -> None:
            nonlocal inside
            async with collections.atomic(mode="rw", labels=labels):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.002)
                inside -= 1

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(work(labels) for labels in (one, other) * 4))

    async def test_read_then_write_under_a_label_loses_nothing(self, collections: LightningCollections) -> None:
        await collections.workers.insert([Worker(worker_id="w", last_busy_time=0.0)])

        async def count() -> None:
            async with collections.atomic(mode="rw", labels=["workers"]) as inside:
                worker = await inside.workers.get()
                assert worker is not None
                assert worker.last_busy_time is not None
                await asyncio.sleep(0)
                await inside.workers.update([worker.model_copy(update={"last_busy_time": worker.last_busy_time + 1})])

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(count() for _ in range(20)))
        counted = await collections.workers.get()
        assert counted is not None
        assert counted.last_busy_time == 20.0

    async def test_labels_in_any_order_do_not_deadlock(self, collections: LightningCollections) -> None:
        async def work(number: int) -> None:
            labels = LABELS if number % 2 else LABELS[::-1]
            async with collections.atomic(mode="rw", labels=labels[number % 3 :]) as inside:
                await inside.span_sequence_ids.inc("k", 1)
                await asyncio.sleep(0)
                await inside.rollouts.insert([rollout(number)])

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(work(number) for number in range(24)))
        assert await collections.span_sequence_ids.get("k") == 24

    async def test_a_read_waits_for_no_writer(self, collections: LightningCollections) -> None:
        await fill(collections)
        async with asyncio.timeout(PATIENCE), collections.atomic(mode="rw") as writer:
            await writer.workers.insert([Worker(worker_id="w-2")])
            async with collections.atomic(mode="r", labels=["workers"]) as reader:
                assert await reader.rollouts.size() == 1
            assert await collections.rollouts.size() == 1
            assert await writer.workers.size() == 2

    async def test_a_snapshot_sees_one_state(self, collections: LightningCollections) -> None:
        """Two counters that one transaction moves together are never seen apart."""
        await collections.span_sequence_ids.set("a", 0)
        await collections.workers.insert([Worker(worker_id="w", last_busy_time=0.0)])
        done = asyncio.Event()

        async def move() -> None:
            for number in range(1, 31):
                async with collections.atomic(mode="rw", labels=["span_sequence_ids", "workers"]) as inside:
                    await inside.span_sequence_ids.set("a", number)
                    await asyncio.sleep(0)
                    await inside.workers.update([Worker(worker_id="w", last_busy_time=float(number))])
            done.set()

        async def watch() -> int:
            seen = 0
            while not done.is_set():
                async with collections.atomic(
                    mode="r", snapshot=True, labels=["span_sequence_ids", "workers"]
                ) as inside:
                    before = await inside.span_sequence_ids.get("a")
                    await asyncio.sleep(0)
                    worker = await inside.workers.get()
                assert worker is not None
                assert worker.last_busy_time == before
                seen += 1
            return seen

        async with asyncio.timeout(PATIENCE):
            _, looks = await asyncio.gather(move(), watch())
        assert looks > 0
