"""Calls of the native store that go to the database together, or at the same time as those of others."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lightning_sql.errors import (
    DatabaseUnavailableError,
    RecordNotFoundError,
    UnstorableValueError,
)
from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store import sql_store, sql_writes
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.backends import Clock
from tests.native_laws import queue_of
from tests.store.native import PATIENCE, OpenStore, at_once, key_of, started

HOT = ("enqueue", "claim", "add_spans", "update_attempts", "issue_numbers", "beat_workers")


@pytest.fixture
async def sent(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many calls went together, for each statement of each kind."""
    counts: dict[str, list[int]] = {name: [] for name in HOT}

    def counting(name: str) -> Callable[..., Any]:
        send = getattr(store._lanes.hot, name)

        async def counted(calls: Any, *rest: Any) -> Any:
            counts[name].append(len(calls))
            return await send(calls, *rest)

        return counted

    for name in HOT:
        monkeypatch.setattr(store._lanes.hot, name, counting(name))
    return counts


# Together


async def test_a_call_alone_is_a_statement_of_its_own(store: SqlStore, sent: dict[str, list[int]]) -> None:
    rollout = await store.enqueue_rollout(1)
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    await store.add_span(make_span(*key_of(claimed), "a"))
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    await store.get_next_span_sequence_id(*key_of(claimed))
    await store.update_worker("w")
    assert sent == {name: [1] for name in HOT}


async def test_calls_at_once_go_together(store: SqlStore, sent: dict[str, list[int]]) -> None:
    count = 30
    enqueued = await at_once(*(store.enqueue_rollout(number) for number in range(count)))
    assert [rollout.input for rollout in enqueued] == list(range(count))
    claimed = await at_once(*(store.dequeue_rollout(f"w{number}") for number in range(count)))
    inputs = [rollout.input for rollout in claimed]
    assert sorted(inputs) == list(range(count))
    # Of two statements either may come first; callers of one get the queue's order.
    first = sent["claim"][0]
    assert inputs[:first] == sorted(inputs[:first])
    assert inputs[first:] == sorted(inputs[first:])
    assert [rollout.attempt.worker_id for rollout in claimed] == [f"w{number}" for number in range(count)]
    await at_once(*(store.add_span(make_span(*key_of(rollout), "a", 5)) for rollout in claimed))
    numbers = await at_once(*(store.get_next_span_sequence_id(*key_of(rollout)) for rollout in claimed))
    assert numbers == [6] * count
    updated = await at_once(*(store.update_attempt(*key_of(rollout), status="succeeded") for rollout in claimed))
    assert [attempt.rollout_id for attempt in updated] == [rollout.rollout_id for rollout in claimed]
    beaten = await at_once(*(store.update_worker(f"w{number}", {"n": number}) for number in range(count)))
    assert [(worker.status, worker.heartbeat_stats) for worker in beaten] == [("idle", {"n": n}) for n in range(count)]
    assert {name: sum(calls) for name, calls in sent.items()} == dict.fromkeys(HOT, count)
    assert all(len(calls) <= 2 for calls in sent.values()), sent
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}


async def test_without_joining_every_call_goes_alone(open_store: OpenStore) -> None:
    store = open_store(join=False)
    enqueued = await at_once(*(store.enqueue_rollout(number) for number in range(20)))
    claimed = await at_once(*(store.dequeue_rollout(f"w{number}") for number in range(25)))
    found = [rollout.rollout_id for rollout in claimed if rollout is not None]
    assert sorted(found) == sorted(rollout.rollout_id for rollout in enqueued)
    [rollout] = await started(store)
    await at_once(*(store.add_span(make_span(*key_of(rollout), "same", number)) for number in range(10)))
    assert (await store.query_spans(rollout.rollout_id)).total == 1


async def test_of_equal_spans_the_first_to_arrive_is_stored(store: SqlStore) -> None:
    [rollout] = await started(store)
    spans = [make_span(*key_of(rollout), "same", number, name=f"n{number}") for number in range(1, 21)]
    answers = await at_once(*(store.add_span(span) for span in spans))
    assert answers == [spans[0], *[None] * 19]
    assert (await store.query_spans(rollout.rollout_id)).items == [spans[0]]
    assert await store.get_next_span_sequence_id(*key_of(rollout)) == 2


async def test_numbers_of_spans_that_are_stored_side_by_side(open_store: OpenStore) -> None:
    """Statements that wait for one another began when the counter was lower; none may lower it again."""
    store = open_store(join=False)
    for turn in range(5):
        [rollout] = await started(store)
        numbers = random.Random(turn).sample(range(1, 31), 30)
        await at_once(*(store.add_span(make_span(*key_of(rollout), f"s{number}", number)) for number in numbers))
        assert await store.get_next_span_sequence_id(*key_of(rollout)) == 31
        found = await store.get_rollout_by_id(rollout.rollout_id)
        assert found is not None
        assert found.status == "running"


async def test_batches_with_spans_in_common(store: SqlStore) -> None:
    [rollout] = await started(store)

    def batch(*names: str) -> Any:
        return store.add_many_spans([make_span(*key_of(rollout), name) for name in names])

    answers = await at_once(batch("a", "b"), batch("b", "c", "c"), batch("c", "d"), batch("d", "a"), batch("e"))
    stored = [[span.span_id for span in answer] for answer in answers]
    assert stored == [["a", "b"], ["c"], ["d"], [], ["e"]]


async def test_a_worker_that_claims_many_times_at_once(store: SqlStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(8)])
    answers = await at_once(*(store.dequeue_rollout("w") for _ in range(10)))
    assert [None if rollout is None else rollout.input for rollout in answers] == [*range(8), None, None]
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    # The empty claims came last: they make it idle, and leave what it worked on last.
    assert (worker.status, worker.current_rollout_id) == ("idle", answers[7].rollout_id)


async def test_claims_of_many_share_the_queue_in_order(store: SqlStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(10)])
    calls = [store.dequeue_many_rollouts(limit=limit, worker_id=f"w{limit}") for limit in (3, 1, 5, 4, 2)]
    answers = await at_once(*calls)
    assert [[rollout.input for rollout in answer] for answer in answers] == [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9], []]
    statuses = {worker.worker_id: worker.status for worker in await store.query_workers()}
    assert statuses == {"w3": "busy", "w1": "busy", "w5": "busy", "w4": "busy", "w2": "idle"}


async def test_updates_of_one_attempt_take_place_in_order(store: SqlStore) -> None:
    config = RolloutConfig(max_attempts=9, retry_condition=["failed", "timeout"])
    for last, status in (("succeeded", "succeeded"), ("failed", "requeuing"), ("running", "running")):
        [rollout] = await started(store, config=config, worker_id="w")
        steps: list[Any] = ["running", "failed", "timeout", "running", "failed", "succeeded", last]
        calls = [
            store.update_attempt(*key_of(rollout), status=step, metadata={"step": number})
            for number, step in enumerate(steps)
        ]
        answers = await at_once(*calls)
        assert [attempt.metadata for attempt in answers] == [{"step": number} for number in range(7)]
        found = await store.get_rollout_by_id(rollout.rollout_id)
        assert isinstance(found, AttemptedRollout)
        assert (found.status, found.attempt.status, found.attempt.metadata) == (status, last, {"step": 6})
        assert (rollout.rollout_id in await queue_of(store)) == (status == "requeuing")


async def test_attempts_of_one_worker_in_one_statement(store: SqlStore) -> None:
    """The last of them decides what the worker does, but each leaves its time."""
    rollouts = await started(store, 3, worker_id="w")
    outcomes: list[Any] = ["succeeded", "running", "timeout"]
    pairs = list(zip(rollouts, outcomes, strict=True))
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        await at_once(*(store.update_attempt(*key_of(pairs[n][0]), status=pairs[n][1]) for n in order))
        worker = await store.get_worker_by_id("w")
        assert worker is not None
        rollout, outcome = pairs[order[-1]]
        expected: Any = {
            "succeeded": ("idle", None),
            "running": ("busy", rollout.rollout_id),
            "timeout": ("unknown", None),
        }
        assert (worker.status, worker.current_rollout_id) == expected[outcome]
        assert worker.last_busy_time == worker.last_idle_time is not None


async def test_heartbeats_of_one_worker_at_once(store: SqlStore) -> None:
    answers = await at_once(
        *(store.update_worker("w", {"n": number}) for number in range(10)), store.update_worker("w")
    )
    assert [worker.heartbeat_stats for worker in answers] == [{"n": n} for n in [*range(10), 9]]


async def test_numbers_asked_for_at_once_are_consecutive(store: SqlStore) -> None:
    calls = [store.get_many_span_sequence_ids([("a", "x"), ("b", "x"), ("a", "y")]) for _ in range(10)]
    answers = await at_once(*calls, store.get_next_span_sequence_id("a", "x"))
    assert [number for first, _, second in answers[:-1] for number in (first, second)] == list(range(1, 21))
    assert [number for _, number, _ in answers[:-1]] == list(range(1, 11))
    assert answers[-1] == 21


async def test_new_rollouts_at_once_get_the_latest_resources(store: SqlStore) -> None:
    latest = await store.add_resources({})
    answers = await at_once(
        store.enqueue_rollout(1), store.enqueue_rollout(2, resources_id="mine"), store.enqueue_rollout(3)
    )
    assert [rollout.resources_id for rollout in answers] == [latest.resources_id, "mine", latest.resources_id]
    assert (await store.query_rollouts()).items == answers


# One that fails


async def test_an_unknown_attempt_fails_alone(store: SqlStore) -> None:
    rollouts = await started(store, 49)
    lost = ("ro-none", "at-none")
    calls: list[Callable[[tuple[str, str], int], Coroutine[Any, Any, Any]]] = [
        lambda key, number: store.update_attempt(*key, status="running", metadata={"n": number}),
        lambda key, number: store.add_span(make_span(*key, "a", number)),
        lambda key, number: store.add_many_spans([make_span(*key, name, number) for name in "bc"]),
    ]
    for call in calls:
        keys = [key_of(rollout) for rollout in rollouts]
        keys.insert(20, lost)
        answers = await at_once(*(call(key, number) for number, key in enumerate(keys)))
        assert isinstance(answers.pop(20), RecordNotFoundError)
        assert not [answer for answer in answers if answer is None or isinstance(answer, Exception)]
    assert (await store.statistics())["total_spans"] == 3 * 49


async def test_a_batch_with_an_unknown_attempt_stores_nothing_and_spoils_no_other(store: SqlStore) -> None:
    first, second = await started(store, 2)
    answers = await at_once(
        store.add_many_spans([make_span(*key_of(first), "a", 9)]),
        store.add_many_spans([make_span(*key_of(first), "b", 50), make_span("ro-none", "at-none", "b")]),
        store.import_spans([make_span(*key_of(second), "c"), make_span("ro-none", "at-none", "c")]),
        store.add_many_spans([make_span(*key_of(second), "d"), make_span(*key_of(first), "d")]),
    )
    assert isinstance(answers[1], RecordNotFoundError)
    assert [len(answers[index]) for index in (0, 3)] == [1, 2]
    assert (len(answers[2].stored), len(answers[2].rejected)) == (1, 1)
    assert [span.span_id for span in await store.query_spans(first.rollout_id)] == ["d", "a"]
    assert await store.get_next_span_sequence_id(*key_of(first)) == 10


async def test_a_payload_that_is_no_json_fails_alone(store: SqlStore) -> None:
    wrong: Any = {"x": object()}
    answers = await at_once(
        *(store.enqueue_rollout(number) for number in range(25)),
        store.enqueue_rollout(wrong),
        *(store.enqueue_rollout(number) for number in range(25)),
    )
    assert isinstance(answers.pop(25), UnstorableValueError)
    assert [rollout.input for rollout in answers] == [*range(25), *range(25)]
    assert (await store.query_rollouts()).total == 50


async def test_what_the_database_refuses_fails_alone(
    store: SqlStore, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = "".join(map(chr, random.Random(1).sample(range(0x4E00, 0x9FFF), 4000)))
    if dialect == "sqlite":  # which has no such limit
        issue = store._lanes.hot.issue_numbers

        async def limited(counts: dict[str, int]) -> dict[str, int]:
            if too_long in counts:
                raise UnstorableValueError("too long")
            return await issue(counts)

        monkeypatch.setattr(store._lanes.hot, "issue_numbers", limited)
    ids = [f"r{number}" for number in range(49)]
    ids.insert(7, too_long)
    answers = await at_once(*(store.get_next_span_sequence_id(id_, "any") for id_ in ids))
    assert isinstance(answers.pop(7), UnstorableValueError)
    assert answers == [1] * 49


# Callers that go, and the end


async def test_a_cancelled_caller_takes_nobody_along(store: SqlStore) -> None:
    tasks = [asyncio.ensure_future(store.enqueue_rollout(number)) for number in range(30)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks[5:15]:
        task.cancel()
    answers: list[Any] = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    kept = [*range(5), *range(15, 30)]
    assert [answers[number].input for number in kept] == kept
    counts = Counter(rollout.input for rollout in await store.query_rollouts())
    assert set(counts) >= set(kept)
    assert set(counts.values()) == {1}


async def test_a_caller_that_is_cancelled_after_sending_has_its_effect_or_not(store: SqlStore) -> None:
    """Whichever it is, a claim that nobody received is a whole one."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(20)])
    for turns in range(20):
        task = asyncio.ensure_future(store.dequeue_rollout("w"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    left = await store.dequeue_many_rollouts(limit=20)
    taken = (await store.query_rollouts(status_in=["preparing"])).total
    assert taken == 20
    assert [rollout.input for rollout in left] == list(range(20 - len(left), 20))


async def test_closing_under_load_answers_whatever_was_accepted(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    await store.sweep()
    rollouts = await started(store, 10)

    def calls() -> list[Coroutine[Any, Any, Any]]:
        return [
            *(store.enqueue_rollout(number) for number in range(20)),
            *(store.dequeue_rollout(f"w{number}") for number in range(10)),
            *(store.add_span(make_span(*key_of(rollout), "a")) for rollout in rollouts),
            *(store.update_attempt(*key_of(rollout), metadata={"x": 1}) for rollout in rollouts),
            *(store.start_rollout("started") for _ in range(10)),
            *(store.update_worker(f"v{number}") for number in range(10)),
        ]

    tasks = [asyncio.ensure_future(call) for call in calls()]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(isinstance(error, DatabaseUnavailableError) for error in errors), errors
    there = {rollout.rollout_id: rollout for rollout in await other.query_rollouts()}
    for answer in answers[:30]:
        if not isinstance(answer, BaseException) and answer is not None:
            assert answer.rollout_id in there
    accepted = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(accepted) >= len(answers) // 2
    spans = sum(not isinstance(answer, BaseException) for answer in answers[30:40])
    assert (await other.statistics())["total_spans"] == spans


async def test_a_store_that_is_closed_can_be_used_again(store: SqlStore) -> None:
    await store.enqueue_rollout(1)
    await store.close()
    assert (await store.query_rollouts()).total == 1
    claimed = await store.dequeue_rollout()
    assert claimed is not None


# Very many at once


async def test_a_claim_of_everything(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_store, "CLAIM_AT_ONCE", 10)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(35)])
    some = await store.dequeue_many_rollouts(limit=12, worker_id="w")
    assert [rollout.input for rollout in some] == list(range(12))
    for limit in (2**31, 2**62, 2**63, 10**30):
        await store.enqueue_rollout(limit)
        rest = await store.dequeue_many_rollouts(limit=limit, worker_id="w")
        assert [rollout.input for rollout in rest[-1:]] == [limit]
    assert await store.dequeue_many_rollouts(limit=2**40) == []
    assert (await store.query_rollouts(status_in=["preparing"])).total == 39
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert worker.status == "busy"


@pytest.mark.slow
async def test_thousands_in_one_call(store: SqlStore) -> None:
    total = 2500
    enqueued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(total)])
    assert [rollout.input for rollout in enqueued] == list(range(total))
    claimed = await store.dequeue_many_rollouts(limit=total + 1)
    assert [rollout.rollout_id for rollout in claimed] == [rollout.rollout_id for rollout in enqueued]
    spans = [make_span(*key_of(rollout), "a", number) for number, rollout in enumerate(claimed)]
    assert len(await store.add_many_spans([*spans, *spans])) == total
    numbers = await store.get_many_span_sequence_ids([key_of(rollout) for rollout in claimed])
    assert list(numbers) == [max(0, number) + 1 for number in range(total)]
    found = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in claimed], timeout=0)
    assert found == []


async def test_a_sweep_of_more_than_one_transaction(
    open_store: OpenStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_writes, "SWEEP_ROWS", 4)
    store, other = open_store(), open_store()
    config = RolloutConfig(timeout_seconds=5.0, max_attempts=2, retry_condition=["timeout"])
    await started(store, 15, config=config, worker_id="w")
    quiet = await started(store, 3, config=RolloutConfig(unresponsive_seconds=5.0))
    clock.now += 4.0
    for rollout in quiet:
        await store.add_span(make_span(*key_of(rollout), "alive"))
    clock.now += 2.0
    assert sum(await at_once(store.sweep(), other.sweep())) == 15
    assert await store.sweep() == 0
    assert len(await queue_of(store)) == 15
    clock.now += 4.0
    assert await store.sweep() == 3


# Two stores


def in_threads(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines at the same time, each in a thread and an event loop of its own."""
    failures: list[BaseException] = []

    def run(work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


async def test_two_stores_in_two_threads(open_store: OpenStore) -> None:
    store = open_store()
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number, config=config) for number in range(40)])
    done: list[tuple[Any, int]] = []

    async def run(name: str, mine: SqlStore) -> None:
        async def runner(worker_id: str) -> None:
            while (claimed := await mine.dequeue_rollout(worker_id)) is not None:
                number = claimed.attempt.sequence_id
                await mine.add_many_spans([make_span(*key_of(claimed), f"s{number}", number)])
                outcome: Any = "failed" if number == 1 else "succeeded"
                await mine.update_attempt(*key_of(claimed), status=outcome)
                done.append((claimed.input, number))

        async with mine:
            await asyncio.gather(*(runner(f"{name}{number}") for number in range(6)))

    works = [run(name, open_store()) for name in "ab"]
    await asyncio.to_thread(in_threads, *works)
    rest = await store.dequeue_many_rollouts(limit=100)
    # A runner may have left while another was about to queue its rollout again.
    for rollout in rest:
        await store.update_attempt(*key_of(rollout), status="succeeded")
        done.append((rollout.input, rollout.attempt.sequence_id))
    assert Counter(done) == Counter((task, number) for task in range(40) for number in (1, 2))
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}
    assert await queue_of(store) == []


async def test_one_store_on_two_event_loops(store: SqlStore) -> None:
    rollout = await store.enqueue_rollout("here")

    async def elsewhere() -> None:
        claimed = await store.dequeue_rollout("w")
        assert claimed is not None
        assert claimed.rollout_id == rollout.rollout_id
        await store.close()

    await asyncio.to_thread(asyncio.run, elsewhere())
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert found is not None
    assert found.status == "preparing"


@pytest.mark.parametrize("partition", ["a\x00b", "\x1a", "\x1aodd", "\ud800", "a'b", "é"])
async def test_partitions_of_any_name(open_store: OpenStore, partition: str) -> None:
    store = open_store(partition=f"{partition} of {open_store}")
    other = open_store(partition=f"{partition}! of {open_store}")
    enqueued = await store.enqueue_rollout(1)
    assert await other.dequeue_rollout("w") is None
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    assert claimed.rollout_id == enqueued.rollout_id
    await store.add_span(make_span(*key_of(claimed), "a"))
    await store.start_rollout(2, worker_id="w")
    await store.update_worker("w", {"x": 1})
    assert (await store.query_rollouts()).total == 2
    assert (await store.query_spans(claimed.rollout_id)).total == 1
    assert (await other.query_rollouts()).total == 0
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.heartbeat_stats, worker.status) == ({"x": 1}, "busy")
