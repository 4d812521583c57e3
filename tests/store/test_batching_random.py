"""Group commit under random calls, keys, weights, cancellations, failures and orders of completion."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sql.errors import DatabaseUnavailableError, TransactionConflictError
from lightning_sql.store.batching import Joiner
from tests.store.statements import Call, Statements, answers, raising, turns

KEYS = ("a", "b", "c", "d")
FAILURES: list[Callable[[], Exception] | None] = [
    None,
    None,
    None,
    lambda: ValueError("bad data"),
    TransactionConflictError,
    DatabaseUnavailableError,
]

calls_strategy = st.tuples(st.just("call"), st.lists(st.sampled_from(KEYS), max_size=2, unique=True), st.integers(1, 6))
ends_strategy = st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(FAILURES))
steps_strategy = st.lists(
    st.one_of(
        calls_strategy,
        calls_strategy,
        ends_strategy,
        st.tuples(st.just("cancel"), st.integers(0, 99)),
        st.tuples(st.just("turns"), st.integers(1, 3)),
    ),
    max_size=60,
)


class CheckedStatements(Statements):
    """Statements that check, whenever one is sent, what must hold at every moment."""

    def __init__(self, most: int, lanes: int) -> None:
        super().__init__()
        self.most = most
        self.lanes = lanes
        self.broken: list[AssertionError] = []

    def check(self, calls: list[Call]) -> None:
        assert calls
        assert len(self.open) < self.lanes
        assert len(calls) == 1 or sum(call.weight for call in calls) <= self.most
        numbers = [call.number for call in calls]
        assert numbers == sorted(numbers)
        keys = [key for call in calls for key in call.keys]
        assert len(keys) == len(set(keys))
        in_flight = {key for other, _ in self.open for call in other for key in call.keys}
        assert in_flight.isdisjoint(keys)

    async def __call__(self, calls: list[Call]) -> Sequence[Any]:
        try:
            self.check(calls)
        except AssertionError as error:  # the joiner would give it to the callers
            self.broken.append(error)
        return await super().__call__(calls)


class Scenario:
    """A joiner, the calls that were made so far, and what may happen to them."""

    def __init__(self, most: int, lanes: int) -> None:
        self.lanes = lanes
        self.statements = CheckedStatements(most, lanes)
        self.joiner: Joiner[Call, int] = Joiner(
            self.statements,
            name="test",
            keys=lambda call: call.keys,
            weigh=lambda call: call.weight,
            most=most,
            lanes=lanes,
        )
        self.made: list[tuple[Call, asyncio.Task[int]]] = []

    async def step(self, step: Any) -> None:
        match step:
            case "call", keys, weight:
                call = Call(len(self.made), tuple(keys), weight)
                self.made.append((call, asyncio.create_task(self.joiner(call))))
            case "end", which, failure:
                self.end(which, failure)
            case "cancel", which:
                if self.made:
                    self.made[which % len(self.made)][1].cancel()
            case _, count:
                await turns(count)

    def end(self, which: int, failure: Callable[[], Exception] | None) -> None:
        gates = [gate for _, gate in self.statements.open if not gate.done()]
        if gates:
            gates[which % len(gates)].set_result(answers if failure is None else raising(failure()))

    async def check_at_rest(self) -> None:
        """No lane is free while there is a call that it could send."""
        await turns()
        assert self.joiner.in_flight == len(self.statements.open)
        sent = {number for batch in self.statements.sent for number in batch}
        waiting = [call for call, caller in self.made if call.number not in sent and not caller.done()]
        assert self.joiner.waiting == len(waiting)
        if self.joiner.in_flight < self.lanes:
            # A batch that is run again, call by call, holds the keys of all its calls until its end.
            open_now = {call.number for calls, _ in self.statements.open for call in calls}
            held = {number for batch in self.statements.sent if not open_now.isdisjoint(batch) for number in batch}
            blocked = {key for number in held for key in self.made[number][0].keys}
            for call in waiting:
                assert not blocked.isdisjoint(call.keys), call
                blocked |= set(call.keys)

    def check_at_the_end(self) -> None:
        assert self.statements.broken == []
        assert (self.joiner.in_flight, self.joiner.waiting) == (0, 0)
        committed = [call.number for call in self.statements.committed]
        assert len(committed) == len(set(committed))  # nothing is done twice
        order: dict[str, list[int]] = defaultdict(list)
        for call in self.statements.committed:
            for key in call.keys:
                order[key].append(call.number)
        assert all(numbers == sorted(numbers) for numbers in order.values())
        for call, caller in self.made:
            assert caller.done()
            if not caller.cancelled():
                assert (caller.exception() is None) == (call.number in committed)
                if caller.exception() is None:
                    assert caller.result() == call.number


async def play(steps: list[Any], most: int, lanes: int) -> None:
    scenario = Scenario(most, lanes)
    for step in steps:
        await scenario.step(step)
    await scenario.check_at_rest()
    closing = asyncio.create_task(scenario.joiner.close())
    while scenario.statements.open:
        scenario.end(0, None)
        await scenario.check_at_rest()
    await closing
    scenario.check_at_the_end()


@settings(max_examples=300, deadline=None)
@given(steps_strategy, st.integers(1, 8), st.integers(1, 3))
def test_every_call_is_answered_once_in_order_and_within_bounds(steps: list[Any], most: int, lanes: int) -> None:
    asyncio.run(play(steps, most, lanes))
