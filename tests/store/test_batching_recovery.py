"""Calls that join while the database is away: they are sent again when it is back, for those who still want it."""

import asyncio

import pytest

from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.errors import DatabaseUnavailableError, OverloadedError, TransactionConflictError
from tests.store.statements import Call, Rig, answers, raising, rig, turns

__all__ = ["rig"]

AWAY = DatabaseUnavailableError("away")


class FakeRecovery:
    """A recovery whose database comes back when the test says so."""

    def __init__(self, seconds: float = 1e9) -> None:
        self.seconds = seconds
        self.closed = False
        self.tries: list[int] = []
        self._returned = asyncio.Event()

    def worthwhile(self, error: Exception) -> bool:
        return type(error) is DatabaseUnavailableError and not self.closed

    async def back(self, tries: int, deadline: float) -> bool:
        self.tries.append(tries)
        try:
            async with asyncio.timeout_at(deadline):
                await self._returned.wait()
        except TimeoutError:
            return False
        self._returned.clear()
        return not self.closed

    async def come_back(self) -> None:
        self._returned.set()
        await turns()


async def test_what_failed_together_is_sent_again_together(rig: Rig) -> None:
    recovery = FakeRecovery()
    joiner = rig.joiner(recovery=recovery)
    calls = await rig.call(joiner, 0, 1, 2)
    await rig.statements.end(raising(AWAY))
    late = await rig.call(joiner, 3)
    for _ in range(2):
        await recovery.come_back()
        await rig.statements.end(raising(AWAY))
    await recovery.come_back()
    await rig.statements.end()
    await rig.statements.end()
    assert await asyncio.gather(*calls, *late) == [0, 1, 2, 3]
    assert rig.statements.sent == [[0, 1, 2]] * 4 + [[3]]
    assert recovery.tries == [0, 1, 2]


async def test_where_too_many_wait_already_a_call_fails_and_the_lane_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery = FakeRecovery()
    joiner = rig.joiner(recovery=recovery)

    async def full(_tries: int, _deadline: float) -> bool:
        raise OverloadedError

    monkeypatch.setattr(recovery, "back", full)
    calls = await rig.call(joiner, 0)
    await rig.statements.end(raising(AWAY))
    with pytest.raises(OverloadedError):
        await calls[0]
    later = await rig.call(joiner, 1)
    await rig.statements.end()
    assert await later[0] == 1


async def test_a_caller_who_left_meanwhile_is_not_served(rig: Rig) -> None:
    recovery = FakeRecovery()
    joiner = rig.joiner(recovery=recovery)
    calls = await rig.call(joiner, 0, 1, 2)
    await rig.statements.end(raising(AWAY))
    calls[1].cancel()
    await recovery.come_back()
    await rig.statements.end()
    assert rig.statements.sent == [[0, 1, 2], [0, 2]]
    assert [calls[0].result(), calls[2].result()] == [0, 2]


async def test_when_all_have_left_nothing_is_sent(rig: Rig) -> None:
    recovery = FakeRecovery()
    joiner = rig.joiner(recovery=recovery)
    [call] = await rig.call(joiner, Call(0, ("key",)))
    await rig.statements.end(raising(AWAY))
    call.cancel()
    [following] = await rig.call(joiner, Call(1, ("key",)))
    await recovery.come_back()
    await rig.statements.end()
    assert rig.statements.sent == [[0], [1]]
    assert following.result() == 1


async def test_a_call_in_a_lane_waits_no_longer_than_its_time(rig: Rig) -> None:
    joiner = rig.joiner(recovery=FakeRecovery(0.02))
    early = await rig.call(joiner, 0, 1)
    await rig.statements.end(raising(AWAY))
    failures = await asyncio.gather(*early, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["away"] * 2
    [later] = await rig.call(joiner, 2)
    await rig.statements.end()
    assert rig.statements.sent == [[0, 1], [2]]
    assert later.result() == 2


async def test_a_call_that_waits_behind_a_statement_that_hangs_fails_in_time(rig: Rig) -> None:
    joiner = rig.joiner(recovery=FakeRecovery(0.05))
    await rig.call(joiner, 0)
    waiting = await rig.call(joiner, 1, Call(2, ("a",)), Call(3, ("a",)))
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(failure) for failure in failures] == [DatabaseUnavailableError] * 3
    assert joiner.waiting == 0
    await rig.statements.end()
    again = await rig.call(joiner, Call(4, ("a",)))
    await rig.statements.end()
    assert rig.statements.sent == [[0], [4]]
    assert again[0].result() == 4
    await joiner.close()


@pytest.mark.parametrize("error", [CommitUnknownError(), ValueError("data")])
async def test_what_may_have_taken_place_or_never_will_is_not_sent_again(rig: Rig, error: Exception) -> None:
    recovery = FakeRecovery()
    [call] = await rig.call(rig.joiner(recovery=recovery), 0)
    await rig.statements.end(raising(error))
    assert type(call.exception()) is type(error)
    assert recovery.tries == []


async def test_calls_that_are_run_alone_wait_too(rig: Rig) -> None:
    recovery = FakeRecovery()
    calls = await rig.call(rig.joiner(recovery=recovery), 0, 1)
    await rig.statements.end(raising(TransactionConflictError()))
    await rig.statements.end(raising(AWAY))
    await recovery.come_back()
    await rig.statements.end()
    await rig.statements.end()
    assert rig.statements.sent == [[0, 1], [0], [0], [1]]
    assert [call.result() for call in calls] == [0, 1]


async def test_closing_waits_for_no_database(rig: Rig) -> None:
    recovery = FakeRecovery()
    joiner = rig.joiner(recovery=recovery)
    calls = await rig.call(joiner, 0, 1)
    await rig.statements.end(raising(AWAY))
    recovery.closed = True
    closing = asyncio.create_task(joiner.close())
    await recovery.come_back()
    await closing
    assert [type(call.exception()) for call in calls] == [DatabaseUnavailableError] * 2
    assert rig.statements.sent == [[0, 1]]


async def test_a_statement_that_works_asks_for_no_recovery(rig: Rig) -> None:
    recovery = FakeRecovery()
    [call] = await rig.call(rig.joiner(recovery=recovery), 0)
    await rig.statements.end(answers)
    assert call.result() == 0
    assert recovery.tries == []
