"""Group commit: errors, cancelled callers, and the end: every caller gets its own answer, and nobody hangs."""

import asyncio
import gc
import sys
import traceback
from typing import Any

import pytest

from lightning_sql.errors import (
    DatabaseUnavailableError,
    LightningError,
    OverloadedError,
    RecordNotFoundError,
    TransactionConflictError,
)
from lightning_sql.store.batching import Joiner
from tests.store.statements import Call, Outcome, Rig, Statements, answers, lanes, raising, turns

pytestmark = pytest.mark.slow

# Failures


async def test_an_error_in_the_answer_fails_its_call_alone(rig: Rig) -> None:
    joiner = rig.joiner()
    missing = RecordNotFoundError("no 2")
    await rig.call(joiner, 1, 2, 3)
    await rig.statements.end(lambda calls: [1, missing, 3])
    assert await asyncio.gather(*rig.callers, return_exceptions=True) == [1, missing, 3]
    assert rig.statements.sent == [[1, 2, 3]]


async def test_one_error_for_several_calls_is_raised_as_several(rig: Rig) -> None:
    joiner = rig.joiner()
    missing = RecordNotFoundError("none")
    missing.__context__ = KeyError("none")
    await rig.call(joiner, 1, 2)
    await rig.statements.end(lambda calls: [missing, missing])
    first, second = await asyncio.gather(*rig.callers, return_exceptions=True)
    assert first is missing
    assert second is not missing
    assert isinstance(second, RecordNotFoundError)
    assert str(second) == "none"
    assert second.__context__ is missing.__context__
    assert not second.__suppress_context__  # which setting a cause, even None, would change


async def test_a_statement_that_fails_on_data_is_run_again_call_by_call(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2, 3)
    bad = ValueError("2 is bad")
    await rig.call(joiner, 4)
    await rig.statements.end(raising(ValueError("one of them is bad")))
    await rig.statements.end()
    assert await rig.callers[0] == 1  # answered when it is known, not when the last is
    await rig.statements.end(raising(bad))
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[1, 2, 3], [1], [2], [3], [4]]
    assert await asyncio.gather(*rig.callers, return_exceptions=True) == [1, bad, 3, 4]
    assert rig.statements.most_open == 1


async def test_a_call_alone_gets_its_error_and_is_not_repeated(rig: Rig) -> None:
    joiner = rig.joiner()
    for number, error in enumerate([ValueError("bad"), TransactionConflictError(), DatabaseUnavailableError()]):
        (caller,) = await rig.call(joiner, number)
        await rig.statements.end(raising(error))
        with pytest.raises(type(error)) as caught:
            await caller
        assert caught.value is error
    assert rig.statements.sent == [[0], [1], [2]]


async def test_a_database_that_is_away_fails_everybody_once_each_with_an_error_of_his_own(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2, 3)
    cause = OSError("connection reset")
    away = DatabaseUnavailableError("the database is away")
    away.__cause__ = cause
    away.add_note("the third attempt")
    await rig.statements.end(raising(away))
    assert rig.statements.sent == [[1, 2, 3]]
    errors = await asyncio.gather(*rig.callers, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert isinstance(error, DatabaseUnavailableError)
        assert str(error) == "the database is away"
        assert error.__cause__ is cause
        assert error.__notes__ == ["the third attempt"]
        assert "outcome(calls)" in "".join(traceback.format_exception(error))  # where it was raised first


async def test_a_conflict_of_many_is_settled_one_by_one(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2, 3, 4)
    lost = TransactionConflictError()
    for outcome in (raising(TransactionConflictError()), raising(lost), answers, raising(lost), answers):
        await rig.statements.end(outcome)
    assert rig.statements.sent == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert await asyncio.gather(*rig.callers, return_exceptions=True) == [lost, 2, lost, 4]


@pytest.mark.parametrize(
    ("outcomes", "sent"),
    [
        ([TransactionConflictError(), TransactionConflictError()], [[1, 2, 3, 4], [1], [2]]),
        ([DatabaseUnavailableError()], [[1, 2, 3, 4], [1]]),
        ([ValueError(), DatabaseUnavailableError()], [[1, 2, 3, 4], [1], [2]]),
    ],
)
async def test_repeating_ends_where_every_call_would_only_run_into_its_deadline(
    rig: Rig, outcomes: list[Exception], sent: list[list[int]]
) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2, 3, 4)
    await rig.statements.end(raising(ValueError("one of them is bad")))
    for outcome in outcomes:
        await rig.statements.end(raising(outcome))
    assert rig.statements.sent == sent
    errors = await asyncio.gather(*rig.callers, return_exceptions=True)
    assert [type(error) for error in errors] == [type(error) for error in outcomes] + [type(outcomes[-1])] * (
        4 - len(outcomes)
    )
    assert len({id(error) for error in errors}) == 4


@pytest.mark.parametrize("count", [0, 1, 4])
async def test_a_wrong_number_of_answers_fails_everybody_and_repeats_nothing(rig: Rig, count: int) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2, 3)
    await rig.statements.end(lambda calls: [7] * count)
    for caller in rig.callers:
        with pytest.raises(LightningError, match=f"test gave {count} answers to 3 calls"):
            await caller
    assert rig.statements.sent == [[1, 2, 3]]


async def test_no_answers_at_all_hang_nobody(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2)
    nothing: Any = None
    await rig.statements.end(lambda calls: nothing)
    for caller in rig.callers:
        with pytest.raises(TypeError):
            await caller


async def test_a_failure_of_keys_is_its_callers_alone(rig: Rig) -> None:
    broken: Any = Call(2, ([],))  # type: ignore[arg-type]
    joiner = rig.joiner()
    first, second = await rig.call(joiner, 1, broken)
    await rig.statements.end()
    assert await first == 1
    with pytest.raises(TypeError, match="unhashable"):
        await second
    assert joiner.waiting == 0


# Cancellation


async def test_a_cancelled_call_that_waits_is_never_run(rig: Rig) -> None:
    joiner = rig.joiner(waiting=3)
    await rig.call(joiner, 1)
    _, third, _ = await rig.call(joiner, 2, 3, 4)
    third.cancel()
    await turns()
    assert joiner.waiting == 2
    await rig.call(joiner, 5)  # its place is free again
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2, 4, 5]]
    assert third.cancelled()


async def test_a_call_cancelled_in_the_turn_in_which_the_lane_is_free_is_never_run(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1)
    second, _ = await rig.call(joiner, Call(2, ("a",)), Call(3, ("a",)))
    rig.statements.open[0][1].set_result(answers)
    second.cancel()
    await turns()
    assert rig.statements.sent == [[1], [3]]
    await rig.statements.end()


async def test_a_call_cancelled_before_the_statement_begins_is_never_run(rig: Rig) -> None:
    joiner = rig.joiner()
    caller = asyncio.create_task(joiner(Call(1, ("a",))))
    await turns(1)
    caller.cancel()
    await turns()
    assert rig.statements.sent == []
    assert caller.cancelled()
    assert (joiner.in_flight, joiner.waiting) == (0, 0)
    (other,) = await rig.call(joiner, Call(2, ("a",)))
    await rig.statements.end()
    assert await other == 2


@pytest.mark.parametrize(
    "outcome", [answers, lambda calls: [call.number if call.number != 2 else ValueError() for call in calls]]
)
async def test_a_statement_goes_on_without_a_caller_that_is_cancelled(rig: Rig, outcome: Outcome) -> None:
    joiner = rig.joiner()
    first, second, third = await rig.call(joiner, 1, Call(2, ("a",)), 3)
    second.cancel()
    await turns()
    assert second.cancelled()
    await rig.call(joiner, Call(4, ("a",)))
    assert len(rig.statements.open) == 1  # 4 waits for 2, caller or not
    await rig.statements.end(outcome)
    assert (await first, await third) == (1, 3)
    await rig.statements.end()
    assert [call.number for call in rig.statements.committed] == [1, 2, 3, 4]


async def test_an_error_for_a_caller_who_has_gone_without_a_word_is_not_reported_as_lost(rig: Rig) -> None:
    joiner = rig.joiner()
    caller = joiner(Call(1))
    caller.send(None)
    await turns()
    caller.close()
    await rig.statements.end(raising(ValueError("nobody wants it")))
    assert joiner.in_flight == 0


async def test_a_call_without_a_caller_is_not_repeated(rig: Rig) -> None:
    joiner = rig.joiner()
    first, second, third = await rig.call(joiner, 1, 2, 3)
    second.cancel()
    await turns()
    await rig.statements.end(raising(ValueError("one of them is bad")))
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[1, 2, 3], [1], [3]]
    assert (await first, await third) == (1, 3)


async def test_cancelling_all_the_callers_cancels_no_statement(rig: Rig) -> None:
    joiner = rig.joiner()
    callers = await rig.call(joiner, 1, 2)
    for caller in callers:
        caller.cancel()
    await turns()
    gc.collect()  # the lane is held by the joiner, not by its callers
    await rig.statements.end()
    assert [call.number for call in rig.statements.committed] == [1, 2]


# The end


async def test_closing_under_load_answers_everybody(rig: Rig) -> None:
    joiner = rig.joiner(most=64)
    await rig.call(joiner, *(Call(number, (str(number % 50),)) for number in range(500)))
    closing = [asyncio.create_task(joiner.close()) for _ in range(2)]
    await turns()
    (late,) = await rig.call(joiner, 500)
    with pytest.raises(DatabaseUnavailableError, match="the store is closed"):
        await late
    while rig.statements.open:
        assert not any(task.done() for task in closing)
        await rig.statements.end()
    await asyncio.gather(*closing)
    assert [await caller for caller in rig.callers[:500]] == list(range(500))
    assert sorted(number for batch in rig.statements.sent for number in batch) == list(range(500))
    await joiner.close()


async def test_a_close_that_is_cancelled_still_closes(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1)
    await rig.call(joiner, 2)
    closing = asyncio.create_task(joiner.close())
    await turns()
    closing.cancel()
    await turns()
    assert closing.cancelled()
    with pytest.raises(DatabaseUnavailableError):
        await joiner(Call(3))
    await rig.statements.end()
    await rig.statements.end()
    assert await asyncio.gather(*rig.callers) == [1, 2]


async def test_an_idle_joiner_closes_at_once(rig: Rig) -> None:
    joiner = rig.joiner()
    await joiner.close()
    with pytest.raises(DatabaseUnavailableError, match="the store is closed"):
        await joiner(Call(1))
    assert rig.statements.sent == []


async def test_too_many_waiting_calls_are_refused_at_once(rig: Rig) -> None:
    joiner = rig.joiner(waiting=3)
    *accepted, fifth = await rig.call(joiner, 0, 1, 2, 3, 4)  # one is on its way, three wait
    with pytest.raises(OverloadedError, match="test wait already"):
        await fifth
    await rig.statements.end()
    assert await asyncio.gather(*accepted) == [0, 1, 2, 3]
    accepted = await rig.call(joiner, 5)
    accepted += await rig.call(joiner, 6, 7, 8)
    assert (joiner.in_flight, joiner.waiting) == (1, 3)
    with pytest.raises(OverloadedError):
        await joiner(Call(9))
    await rig.statements.end()
    await rig.statements.end()
    assert await asyncio.gather(*accepted) == [5, 6, 7, 8]
    assert sorted(number for batch in rig.statements.sent for number in batch) == [0, 1, 2, 3, 5, 6, 7, 8]


async def test_a_free_lane_is_no_place_for_a_call_that_is_held_up(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2, waiting=1)
    await rig.call(joiner, Call(1, ("a",)))
    await rig.call(joiner, Call(2, ("a",)))
    assert (joiner.in_flight, joiner.waiting) == (1, 1)
    with pytest.raises(OverloadedError):
        await joiner(Call(3, ("a",)))
    (other,) = await rig.call(joiner, Call(4, ("b",)))
    assert rig.statements.sent == [[1], [4]]
    for _ in range(3):
        await rig.statements.end()
    assert await other == 4


async def test_a_free_lane_refuses_nobody(rig: Rig) -> None:
    joiner = rig.joiner(waiting=0)
    first, second = await rig.call(joiner, 1, 2)
    with pytest.raises(OverloadedError):
        await second
    await rig.statements.end()
    assert await first == 1


async def test_a_lane_that_is_cancelled_leaves_nobody_hanging(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, Call(1, ("a",)), 2)
    await rig.call(joiner, Call(3, ("a",)), 4)
    (lane,) = lanes()
    lane.cancel()
    await turns()
    for caller in rig.callers[:2]:
        with pytest.raises(DatabaseUnavailableError, match="whether it took place is unknown"):
            await caller
    for caller in rig.callers[2:]:
        with pytest.raises(DatabaseUnavailableError, match="before the call was sent"):
            await caller
    assert (joiner.in_flight, joiner.waiting) == (0, 0)
    (caller,) = await rig.call(joiner, Call(5, ("a",)))
    await rig.statements.end()
    assert await caller == 5
    await joiner.close()


async def test_a_lane_that_is_cancelled_before_it_began_leaves_nobody_hanging(rig: Rig) -> None:
    joiner = rig.joiner()
    caller = asyncio.create_task(joiner(Call(1, ("a",))))
    await turns(1)
    (lane,) = lanes()
    lane.cancel()
    await turns()
    with pytest.raises(DatabaseUnavailableError, match="before the call was sent"):
        await caller
    (other,) = await rig.call(joiner, Call(2, ("a",)))
    await rig.statements.end()
    assert await other == 2
    assert (joiner.in_flight, joiner.waiting) == (0, 0)


async def test_the_other_lane_looks_after_those_that_wait(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2)
    await rig.call(joiner, Call(1, ("a",)))
    (lane,) = lanes()
    await rig.call(joiner, Call(2, ("b",)))
    await rig.call(joiner, Call(3, ("a",)), 4)
    lane.cancel()
    await turns()
    with pytest.raises(DatabaseUnavailableError):
        await rig.callers[0]
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2], [3, 4]]
    await rig.statements.end()
    assert await asyncio.gather(*rig.callers[1:]) == [2, 3, 4]


async def test_something_cancelled_inside_the_statement_fails_its_calls_and_no_others(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1, 2)
    await rig.call(joiner, 3)
    rig.statements.open[0][1].cancel()
    await turns()
    for caller in rig.callers[:2]:
        with pytest.raises(DatabaseUnavailableError, match="was cancelled"):
            await caller
    await rig.statements.end()
    assert rig.statements.sent == [[1, 2], [3]]
    assert await rig.callers[2] == 3


def test_the_end_of_the_event_loop_leaves_no_task_behind() -> None:
    seen: list[str] = []

    async def caller(joiner: Joiner[Call, int], number: int) -> None:
        try:
            await joiner(Call(number))
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    async def main() -> list[asyncio.Task[Any]]:
        joiner: Joiner[Call, int] = Joiner(Statements(), name="test")
        callers = [asyncio.create_task(caller(joiner, number)) for number in range(2)]
        await turns()
        callers.append(asyncio.create_task(caller(joiner, 2)))
        await turns()
        return [*callers, *lanes()]

    tasks = asyncio.run(main())
    assert len(tasks) == 4
    assert all(task.done() for task in tasks)
    assert seen == ["CancelledError"] * 3


def test_an_event_loop_that_is_closed_in_the_middle_brings_no_second_error() -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # asyncio's own complaint about pending tasks
    joiner: Joiner[Call, int] | None = Joiner(Statements(), name="test")

    async def begin() -> asyncio.Task[int]:
        assert joiner is not None
        caller = asyncio.create_task(joiner(Call(1)))
        await turns()
        return caller

    caller: asyncio.Task[int] | None = loop.run_until_complete(begin())
    assert joiner.in_flight == 1
    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        loop.close()
        joiner = caller = None
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert caller is None
    assert unraisable == []
