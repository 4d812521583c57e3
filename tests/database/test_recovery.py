"""Waiting for a database that is away: one asks for all, and nobody waits for longer than he may."""

import asyncio
from collections.abc import Callable

import pytest

from lightning_sql.database import recovery as module
from lightning_sql.database.dialects.base import CommitUnknownError
from lightning_sql.database.recovery import Recovery, pause_of
from lightning_sql.errors import DatabaseUnavailableError, OverloadedError, TransactionConflictError

PATIENCE = 30.0


class Away:
    """A database that is away until the test says otherwise."""

    def __init__(self) -> None:
        self.asked = 0
        self.at_once = 0
        self.is_back = False
        self.asking = asyncio.Event()

    async def __call__(self) -> None:
        self.asked += 1
        self.at_once += 1
        self.asking.set()
        try:
            assert self.at_once == 1
            await asyncio.sleep(0)
            if not self.is_back:
                raise DatabaseUnavailableError
        finally:
            self.at_once -= 1


def in_time() -> float:
    return asyncio.get_running_loop().time() + PATIENCE


def recovery_of(probe: Callable[[], object], seconds: float = PATIENCE) -> Recovery:
    return Recovery(probe, seconds, lambda error: True)  # pyright: ignore[reportArgumentType]


async def test_one_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.01)
    away = Away()
    recovery = recovery_of(away)
    waits = [asyncio.create_task(recovery.back(1, in_time())) for _ in range(200)]
    while away.asked < 5:  # noqa: ASYNC110 - which it says nobody
        await asyncio.sleep(0.001)
    assert not any(wait.done() for wait in waits)
    away.is_back = True
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*waits) == [True] * 200
    asked = away.asked
    assert await recovery.back(0, in_time())  # who failed for the first time only takes another connection
    assert away.asked == asked
    assert await recovery.back(3, in_time())
    assert away.asked == asked + 1


async def test_nobody_waits_beyond_his_time() -> None:
    away = Away()
    recovery = recovery_of(away)
    loop = asyncio.get_running_loop()
    longer = asyncio.create_task(recovery.back(1, in_time()))
    assert not await recovery.back(1, loop.time() + 0.02)
    assert not await recovery.back(0, loop.time() - 1)
    assert not longer.done()
    away.is_back = True
    async with asyncio.timeout(PATIENCE):
        assert await longer


async def test_a_probe_that_goes_wrong_leaves_nobody_hanging() -> None:
    async def broken() -> None:
        raise ValueError

    async with asyncio.timeout(PATIENCE):
        assert await recovery_of(broken).back(1, in_time())


async def test_closing_lets_everybody_go() -> None:
    away = Away()
    recovery = recovery_of(away)
    waits = [asyncio.create_task(recovery.back(1, in_time())) for _ in range(5)]
    await away.asking.wait()
    recovery.close()
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*waits) == [False] * 5
    assert not await recovery.back(0, in_time())
    assert not recovery.worthwhile(DatabaseUnavailableError())


async def test_no_more_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    away = Away()
    recovery = recovery_of(away)
    waits = [asyncio.create_task(recovery.back(1, in_time())) for _ in range(3)]
    await away.asking.wait()
    with pytest.raises(OverloadedError):
        await recovery.back(1, in_time())
    waits[0].cancel()
    await asyncio.wait(waits[:1])
    waits.append(asyncio.create_task(recovery.back(1, in_time())))
    away.is_back = True
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*waits[1:]) == [True] * 3


def test_what_is_worth_waiting_for() -> None:
    recovery = recovery_of(Away())
    assert recovery.worthwhile(DatabaseUnavailableError())
    for error in (CommitUnknownError(), TransactionConflictError(), OverloadedError(), ValueError()):
        assert not recovery.worthwhile(error)
    assert not Recovery(Away(), PATIENCE, lambda error: False).worthwhile(DatabaseUnavailableError())


def test_pauses_have_no_beat() -> None:
    for tries in (0, 1, 5, 10, 10_000):
        pauses = [pause_of(tries) for _ in range(200)]
        assert len(set(pauses)) == 200
        assert 0 <= min(pauses) <= max(pauses) <= module.LONGEST_PAUSE_SECONDS
