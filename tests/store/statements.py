"""The database of the tests of `batching`: statements that end when, and as, the test says."""

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_sql.store.batching import Joiner

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="nobody")


@dataclass(frozen=True)
class Call:
    """A call of the tests."""

    number: int
    keys: tuple[str, ...] = ()
    weight: int = 1


Outcome = Callable[[list[Call]], Sequence[Any]]


def answers(calls: list[Call]) -> list[int | Exception]:
    return [call.number for call in calls]


def raising(error: BaseException) -> Outcome:
    def outcome(calls: list[Call]) -> Sequence[Any]:
        raise error

    return outcome


class Statements:
    """The database of these tests: each statement ends when, and as, the test says."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.open: list[tuple[list[Call], asyncio.Future[Outcome]]] = []
        self.committed: list[Call] = []
        self.contexts: list[str] = []
        self.most_open = 0

    async def __call__(self, calls: list[Call]) -> Sequence[Any]:
        self.sent.append([call.number for call in calls])
        self.contexts.append(CALLER.get())
        gate: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        statement = (calls, gate)
        self.open.append(statement)
        self.most_open = max(self.most_open, len(self.open))
        try:
            outcome = await gate
        finally:
            self.open.remove(statement)
        given_out = outcome(calls)
        self.committed += calls
        return given_out

    async def end(self, outcome: Outcome = answers, which: int = 0) -> None:
        """End a statement and let everything happen that follows from it."""
        self.open[which][1].set_result(outcome)
        await turns()


async def turns(count: int = 6) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def lanes() -> list[asyncio.Task[Any]]:
    """The tasks in which the joiner runs its statements."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "lightning-sql test"]


@dataclass
class Rig:
    """A joiner over such statements, and the tasks of its callers."""

    statements: Statements = field(default_factory=Statements)
    callers: list[asyncio.Task[int]] = field(default_factory=list[asyncio.Task[int]])

    def joiner(self, **options: Any) -> Joiner[Call, int]:
        return Joiner(
            self.statements, name="test", keys=lambda call: call.keys, weigh=lambda call: call.weight, **options
        )

    async def call(self, joiner: Joiner[Call, int], *calls: Call | int) -> list[asyncio.Task[int]]:
        """Make these calls in this order; they are waiting, or in flight, when this returns."""
        made = [asyncio.create_task(joiner(Call(call) if isinstance(call, int) else call)) for call in calls]
        self.callers += made
        await turns()
        return made


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Fails the test if anything hangs or is reported as lost."""
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    rig = Rig()
    yield rig
    await turns()
    assert all(caller.done() for caller in rig.callers)
    for caller in rig.callers:
        if not caller.cancelled():
            caller.exception()
    rig.callers.clear()
    await turns()
    gc.collect()
    await turns()
    assert lost == []
