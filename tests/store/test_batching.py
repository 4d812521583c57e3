"""Group commit: what joins, what waits for what, in which order."""

import asyncio

from lightning_sql.store.batching import Joiner
from tests.store.statements import CALLER, Call, Rig, lanes, turns

# Joining


async def test_a_call_alone_waits_for_nobody(rig: Rig) -> None:
    joiner = rig.joiner()
    first = asyncio.create_task(joiner(Call(1)))
    await turns(1)  # the caller begins
    assert (joiner.in_flight, joiner.waiting) == (0, 1)
    second = asyncio.create_task(joiner(Call(2)))
    await turns(1)  # the statement begins, in the very next turn
    assert rig.statements.sent == [[1]]
    assert (joiner.in_flight, joiner.waiting) == (1, 1)
    await rig.statements.end()
    assert await first == 1
    await rig.statements.end()
    assert await second == 2
    assert (joiner.in_flight, joiner.waiting) == (0, 0)


async def test_what_has_come_when_the_statement_begins_goes_with_it(rig: Rig) -> None:
    # 32 callers that are answered at once call again at once: were the first sent without the others,
    # batches of 1 and of 31 would alternate, at half the speed, and nobody would be served earlier.
    joiner = rig.joiner(lanes=2)
    callers = [asyncio.create_task(joiner(Call(number))) for number in (1, 2, 3)]
    await turns(1)
    assert len(lanes()) == 1
    await turns(1)
    assert rig.statements.sent == [[1, 2, 3]]
    await rig.statements.end()
    assert await asyncio.gather(*callers) == [1, 2, 3]


async def test_calls_gather_while_a_statement_is_in_flight(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, 1)
    await rig.call(joiner, 2, 3)
    await rig.call(joiner, 4)
    assert (joiner.in_flight, joiner.waiting) == (1, 3)
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2, 3, 4]]
    await rig.call(joiner, 5)
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2, 3, 4], [5]]
    assert await asyncio.gather(*rig.callers) == [1, 2, 3, 4, 5]


async def test_an_idle_joiner_keeps_no_task_and_starts_again(rig: Rig) -> None:
    joiner = rig.joiner()
    before = asyncio.all_tasks()
    for number in (1, 2):
        (caller,) = await rig.call(joiner, number)
        assert len(asyncio.all_tasks() - before - {caller}) == 1
        await rig.statements.end()
        assert await caller == number
        assert asyncio.all_tasks() == before


async def test_the_oldest_go_first_and_a_batch_is_bounded(rig: Rig) -> None:
    joiner = rig.joiner(most=3)
    await rig.call(joiner, 0)
    await rig.call(joiner, *range(1, 8))
    for _ in range(4):
        await rig.statements.end()
    assert rig.statements.sent == [[0], [1, 2, 3], [4, 5, 6], [7]]


async def test_weights_bound_a_batch_and_nobody_overtakes_a_heavy_call(rig: Rig) -> None:
    joiner = rig.joiner(most=10)
    await rig.call(joiner, 0)
    weights = [4, 6, 5, 25, 1, 10, 9, 1]
    await rig.call(joiner, *(Call(number, weight=weight) for number, weight in enumerate(weights, 1)))
    for _ in range(7):
        await rig.statements.end()
    assert rig.statements.sent == [[0], [1, 2], [3], [4], [5], [6], [7, 8]]


async def test_a_call_without_weight_counts_as_one(rig: Rig) -> None:
    joiner = rig.joiner(most=2)
    await rig.call(joiner, 0)
    await rig.call(joiner, *(Call(number, weight=0) for number in (1, 2, 3)))
    for _ in range(3):
        await rig.statements.end()
    assert rig.statements.sent == [[0], [1, 2], [3]]


async def test_neither_keys_nor_weights_are_needed(rig: Rig) -> None:
    joiner: Joiner[Call, int] = Joiner(rig.statements, name="plain", most=2)
    await rig.call(joiner, 0)
    await rig.call(joiner, Call(1, ("a",), 9), Call(2, ("a",), 9), 3)
    for _ in range(3):
        await rig.statements.end()
    assert rig.statements.sent == [[0], [1, 2], [3]]


async def test_the_statement_sees_no_callers_context(rig: Rig) -> None:
    joiner = rig.joiner()
    token = CALLER.set("somebody")
    await rig.call(joiner, 1)
    CALLER.reset(token)
    await rig.statements.end()
    assert rig.statements.contexts == ["nobody"]


# Keys


async def test_calls_with_a_common_key_go_one_after_the_other(rig: Rig) -> None:
    joiner = rig.joiner()
    await rig.call(joiner, Call(1, ("a",)), Call(2, ("a",)), Call(3, ("b",)), Call(4, ("a",)), 5)
    assert rig.statements.sent == [[1, 3, 5]]
    await rig.call(joiner, Call(6, ("b",)))
    for _ in range(3):
        await rig.statements.end()
    assert rig.statements.sent == [[1, 3, 5], [2, 6], [4]]


async def test_a_key_in_flight_holds_up_its_calls_in_other_lanes_and_nobody_else(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2)
    await rig.call(joiner, Call(1, ("a",)))
    await rig.call(joiner, Call(2, ("a", "b")))
    await rig.call(joiner, Call(3, ("b",)))  # free, but its key belongs to an earlier one
    await rig.call(joiner, Call(4, ("c",)))
    assert rig.statements.sent == [[1], [4]]
    assert (joiner.in_flight, joiner.waiting) == (2, 2)
    await rig.statements.end(which=1)
    assert rig.statements.sent == [[1], [4]]
    await rig.call(joiner, Call(5, ("c",)))
    assert rig.statements.sent == [[1], [4], [5]]
    await rig.statements.end()
    await rig.statements.end()
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[1], [4], [5], [2], [3]]


async def test_one_that_was_held_up_goes_before_younger_ones(rig: Rig) -> None:
    joiner = rig.joiner(most=2)
    await rig.call(joiner, Call(1, ("a",)))
    await rig.call(joiner, Call(2, ("a",)), 3, 4, 5)
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2, 3]]
    await rig.statements.end()
    await rig.statements.end()


async def test_a_call_that_a_cancelled_one_held_up_goes_at_once(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2)
    await rig.call(joiner, Call(1, ("a",)))
    (second,) = await rig.call(joiner, Call(2, ("a", "b")))
    await rig.call(joiner, Call(3, ("b",)))
    assert rig.statements.sent == [[1]]
    second.cancel()
    await turns()
    assert rig.statements.sent == [[1], [3]]
    await rig.statements.end()
    await rig.statements.end()


async def test_updates_of_one_row_keep_their_order_whatever_else_happens(rig: Rig) -> None:
    joiner = rig.joiner(lanes=3, most=4)
    calls = [Call(number, (f"row {number % 3}",)) for number in range(60)]
    await rig.call(joiner, *calls)
    while rig.statements.open:
        await rig.statements.end(which=-1)  # the youngest statement ends first
    for row in range(3):
        numbers = [call.number for call in rig.statements.committed if call.number % 3 == row]
        assert numbers == list(range(row, 60, 3))


# Lanes


async def test_many_that_wait_are_shared_out_to_free_lanes(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2, shared=4)
    await rig.call(joiner, *range(9))
    assert rig.statements.sent == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    # Whoever comes while both are busy waits; the first that is done finds no other lane to share with.
    await rig.call(joiner, *range(9, 14))
    await rig.statements.end()
    assert rig.statements.sent[2:] == [[9, 10, 11, 12, 13]]
    await rig.statements.end()
    await rig.statements.end()
    await rig.call(joiner, 14, 15, 16)  # too few
    assert rig.statements.sent[3:] == [[14, 15, 16]]
    await rig.statements.end()
    assert await asyncio.gather(*rig.callers) == list(range(17))


async def test_light_calls_need_no_second_lane(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2, shared=2, alone=4)
    await rig.call(joiner, 1, 2, 3)
    await rig.call(joiner, 4, 5, 6)
    assert rig.statements.sent == [[1, 2, 3]]
    await rig.call(joiner, Call(7, weight=4))
    assert rig.statements.sent == [[1, 2, 3], [4, 5, 6, 7]]
    await rig.statements.end()
    await rig.statements.end()
    await rig.call(joiner, Call(8, weight=4), Call(9, weight=4))
    assert rig.statements.sent[2:] == [[8], [9]]
    await rig.statements.end()
    await rig.statements.end()
    assert await asyncio.gather(*rig.callers) == list(range(1, 10))


async def test_as_many_statements_as_lanes_are_in_flight(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2, most=2)
    await rig.call(joiner, 1)
    assert joiner.in_flight == 1
    await rig.call(joiner, 2)
    await rig.call(joiner, 3, 4, 5)
    assert rig.statements.sent == [[1], [2]]
    assert (joiner.in_flight, joiner.waiting) == (2, 3)
    await rig.statements.end(which=1)
    assert rig.statements.sent == [[1], [2], [3, 4]]
    await rig.statements.end()
    assert rig.statements.sent == [[1], [2], [3, 4], [5]]
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.most_open == 2


async def test_what_does_not_fit_goes_to_the_next_lane_at_once(rig: Rig) -> None:
    joiner = rig.joiner(lanes=3, most=2)
    await rig.call(joiner, *range(7))
    assert rig.statements.sent == [[0, 1], [2, 3], [4, 5]]
    assert (joiner.in_flight, joiner.waiting) == (3, 1)
    for _ in range(4):
        await rig.statements.end()


async def test_a_lane_that_ended_is_woken_for_what_another_set_free(rig: Rig) -> None:
    joiner = rig.joiner(lanes=2, most=2)
    await rig.call(joiner, Call(0, ("a", "b", "c")))
    await rig.call(joiner, Call(1, ("a",)), Call(2, ("b",)), Call(3, ("c",)))
    assert rig.statements.sent == [[0]]
    await rig.statements.end()
    assert rig.statements.sent == [[0], [1, 2], [3]]
    await rig.statements.end()
    await rig.statements.end()
