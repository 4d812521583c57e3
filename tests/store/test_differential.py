"""The same random calls to the native store and the reference: every answer, and in the end every record, is equal."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from tests.backends import POSTGRES, START, Clock, NewStore
from tests.native_laws import broken_laws
from tests.store.programs import Step, bursts, call_of, programs
from tests.store.twins import Twins

EFFORT = {"sqlite": 40, "postgres": 40}
PHASES = [phase for phase in Phase if phase is not Phase.explain]
NEVER = 1e12
"""Seconds between scans: here they happen when a step says so."""

DATABASES = pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.slow), POSTGRES])

Play = Callable[[Twins, Clock, list[Any]], Awaitable[None]]


def run(
    kind: str, new_store: NewStore, clock: Clock, play: Play, steps: list[Any], claim_timeout: float | None = None
) -> None:
    """Make the steps on two empty stores."""

    async def work() -> None:
        clock.now = START
        async with (
            new_store("memory", scan_debounce_seconds=NEVER, claim_timeout_seconds=claim_timeout) as reference,
            new_store(kind, scan_debounce_seconds=NEVER, claim_timeout_seconds=claim_timeout) as other,
        ):
            await play(Twins(reference, other), clock, steps)
            assert await broken_laws(other, clock.now) == []

    asyncio.run(work())


async def one_by_one(twins: Twins, clock: Clock, steps: list[Step]) -> None:
    for step in steps:
        await make(twins, clock, step)
    await twins.sweep()
    await twins.compare_everything()


async def make(twins: Twins, clock: Clock, step: Step) -> None:
    if step[0] == "time":
        clock.now += step[1]["seconds"]
    elif step[0] == "sweep":
        await twins.sweep()
    else:
        await twins.both(call_of(twins, step))


async def at_once(twins: Twins, clock: Clock, steps: list[Any]) -> None:
    for name, values in steps:
        if name != "at once":
            await make(twins, clock, (name, values))
            continue
        waiting = await queued(twins)
        await twins.burst([call_of(twins, step) for step in values])
        # Updates of different rollouts, too, have no order, so what they queued again is given one.
        if values[0][0] == "update_attempt":
            await twins.arrange([rollout_id for rollout_id in await queued(twins) if rollout_id not in waiting])
    await twins.sweep()
    await twins.compare_everything(ordered=False)


async def queued(twins: Twins) -> list[str]:
    return [rollout.rollout_id for rollout in await twins.reference.query_rollouts(status_in=["requeuing"])]


@DATABASES
@pytest.mark.parametrize("claim_timeout", [None, 2.0])
def test_answers_and_records_are_those_of_the_reference(
    kind: str, claim_timeout: float | None, new_store: NewStore, clock: Clock
) -> None:
    @settings(max_examples=EFFORT[kind], phases=PHASES)
    @given(programs)
    def check(steps: list[Step]) -> None:
        run(kind, new_store, clock, one_by_one, steps, claim_timeout)

    check()


@DATABASES
def test_calls_at_once_are_answered_as_if_in_order(kind: str, new_store: NewStore, clock: Clock) -> None:
    @settings(max_examples=EFFORT[kind], phases=PHASES)
    @given(bursts)
    def check(steps: list[Any]) -> None:
        run(kind, new_store, clock, at_once, steps)

    check()
