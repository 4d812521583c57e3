"""Group commit: concurrent calls of one kind become one statement."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from contextvars import Context
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from lightning_sql.errors import (
    DatabaseUnavailableError,
    LightningError,
    OverloadedError,
    TransactionConflictError,
)

__all__ = ["Joiner", "Recovery"]

C = TypeVar("C")
R = TypeVar("R")

NO_KEYS: Final[frozenset[Hashable]] = frozenset()

CONFLICTS_IN_A_ROW: Final = 2
"""After so many lost single calls it is not one row that is contested. Each loses only at its own
deadline, so that going on would hold the lane for deadline times calls."""


class Recovery(Protocol):
    """How calls wait for a database that is away."""

    @property
    def seconds(self) -> float:
        """How long a call waits in all."""
        ...

    def worthwhile(self, error: Exception) -> bool:
        """Whether a statement that failed so has changed nothing, and may succeed when the database is back."""
        ...

    async def back(self, tries: int, deadline: float) -> bool:
        """Wait until it may succeed, after so many tries; False when that is not before the deadline."""
        ...


class _Entry(Generic[C, R]):
    """A call and its caller."""

    __slots__ = ("call", "deadline", "future", "keys", "weight")

    def __init__(
        self, call: C, future: asyncio.Future[R], keys: frozenset[Hashable], weight: int, deadline: float
    ) -> None:
        self.deadline = deadline
        self.call = call
        self.future = future
        self.keys = keys
        self.weight = weight


class Joiner(Generic[C, R]):
    """Concurrent calls of one kind become one statement. Belongs to one event loop.

    A call that finds a lane free starts it, and nothing is waited for: what the statement takes along
    is what has come by the moment at which it is sent. While every lane is in a statement, calls
    gather; a lane that is done takes all of them that fit, first in, first out, or, where they weigh
    `shared` or more, its share of them, and leaves the others to a lane that is free. A call passes an
    earlier one only if that one is held up by its keys; one that is too heavy for what is left of a
    batch opens the next one.

    A statement that raises has changed nothing, so its calls are run again, each alone, in order, in
    the same lane, and keep their keys until the last is done. Only a database that is not available
    fails them all at once; when the calls run alone, so do two conflicts in a row.

    With a `recovery`, a database that is away is waited for: a lane keeps its calls and sends them
    again when it is back, but for those whose callers have gone. A call that was not sent within
    the time that it has fails, wherever it waits.

    A caller that is cancelled takes its call back if it still waits, or waits to be run again. If it
    is in flight, the statement goes on and the answer is dropped.

    Args:
        run: One statement: the answers of these calls, in their order. An `Exception` among them
            fails that call alone. It is called in a task of the joiner, in an empty context.
        name: What the calls are called in task names and messages.
        keys: The rows on which the order of calls matters: of two calls with a common key the later
            is sent when the statement of the earlier is done.
        weigh: The weight of a call, at least 1, which is also the default.
        most: The largest weight of a batch; a call that is heavier goes alone.
        lanes: How many statements may be in flight at once.
        shared: From which weight on what waits is shared out to free lanes: while one statement is in
            the database, the answers of another are made of what it brought.
        alone: Up to which weight of what waits one lane is enough: two small statements take longer than
            one that is a little larger.
        waiting: How many calls may wait.
        recovery: How to wait for a database that is away; None fails the calls at once.
    """

    def __init__(
        self,
        run: Callable[[list[C]], Awaitable[Sequence[R | Exception]]],
        *,
        name: str,
        keys: Callable[[C], Iterable[Hashable]] | None = None,
        weigh: Callable[[C], int] | None = None,
        most: int = 256,
        lanes: int = 1,
        shared: int = 16,
        alone: int = 0,
        waiting: int = 10_000,
        recovery: Recovery | None = None,
    ) -> None:
        self._recovery = recovery
        self._patience = math.inf if recovery is None else recovery.seconds
        self._expiry: asyncio.TimerHandle | None = None
        self._run = run
        self._name = name
        self._task_name = f"lightning-sql {name}"
        self._keys = keys
        self._weigh = weigh
        self._most = most
        self._lanes = lanes
        self._shared = shared
        self._alone = alone
        self._limit = waiting
        self._closed = False
        # Ordered, and a cancelled caller can leave from the middle at once.
        self._waiting: OrderedDict[_Entry[C, R], None] = OrderedDict()
        self._weight = 0  # of all that wait
        self._held: set[Hashable] = set()  # the keys of the calls in flight
        self._claims: dict[Hashable, int] = {}  # how many calls, waiting or in flight, have a key
        self._busy = 0  # lanes that are started and have not found the queue empty yet
        self._starting: Coroutine[Any, Any, None] | None = None  # the one of them that has not begun yet
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """What its statement is called."""
        return self._name

    @property
    def in_flight(self) -> int:
        """How many statements are in flight."""
        return self._busy - (self._starting is not None)

    @property
    def waiting(self) -> int:
        """How many calls wait to be sent."""
        return len(self._waiting)

    async def __call__(self, call: C) -> R:
        """The answer to this call.

        Raises:
            OverloadedError: too many calls wait.
            DatabaseUnavailableError: the joiner is closed, its lane was stopped, `run` raised it, or it took too
                long until the call could be sent.
            Exception: what `run` raised or answered for this call.
        """
        if self._closed:
            raise DatabaseUnavailableError("the store is closed")
        keys = NO_KEYS if self._keys is None else frozenset(self._keys(call))
        weight = 1 if self._weigh is None else max(1, self._weigh(call))
        free = self._may_start(self._weight + weight) and self._claims.keys().isdisjoint(keys)
        if not free and len(self._waiting) >= self._limit + (self._starting is not None):
            raise OverloadedError(f"{len(self._waiting)} calls of {self._name} wait already; try again later")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        entry = _Entry(call, future, keys, weight, loop.time() + self._patience)
        self._waiting[entry] = None
        self._weight += weight
        for key in keys:
            self._claims[key] = self._claims.get(key, 0) + 1
        if free:
            self._start()
        elif self._expiry is None and self._recovery is not None:
            self._expiry = loop.call_at(entry.deadline, self._expire)
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._withdraw(entry)
            raise

    async def close(self) -> None:
        """Take no new calls and return when all that wait or are in flight are answered."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _may_start(self, weight: int) -> bool:
        # While a lane is about to begin, there is no need of another: it will take along what comes.
        return self._starting is None and (not self._busy or (self._busy < self._lanes and weight > self._alone))

    def _withdraw(self, entry: _Entry[C, R]) -> None:
        del self._waiting[entry]
        self._weight -= entry.weight
        if entry.keys:
            self._release(entry)
            # It may have held up another, which no lane in flight need be holding up.
            self._start_another()

    def _expire(self) -> None:
        """Fail the calls that have waited for too long."""
        self._expiry = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late: list[_Entry[C, R]] = []
        for entry in self._waiting:  # the first to come is the first to be late
            if entry.deadline > now:
                self._expiry = loop.call_at(entry.deadline, self._expire)
                break
            late.append(entry)
        for entry in late:
            self._withdraw(entry)
        _fail(late, DatabaseUnavailableError(f"a call of {self._name} was not sent in time; nothing was done"))

    def _start_another(self) -> None:
        if self._waiting and self._may_start(self._weight):
            self._start()

    def _start(self) -> None:
        self._busy += 1
        self._starting = lane = self._lane()
        # The first caller's context is not everybody's: its trace, its settings.
        task = asyncio.create_task(lane, name=self._task_name, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A task that is cancelled before its first step never enters its coroutine.
        if self._starting is not None and task.get_coro() is self._starting:
            self._starting = None
            self._abandon([], None)

    async def _lane(self) -> None:
        """Send batches until nothing is left that can be sent."""
        self._starting = None
        batch: list[_Entry[C, R]] = []
        try:
            while batch := self._take():
                await self._send(batch)
                if self._keys is not None:
                    for entry in batch:
                        self._held -= entry.keys
                        self._release(entry)
        except GeneratorExit:
            raise  # the event loop is gone, and with it everybody who waited
        except BaseException as error:
            self._abandon(batch, error)
            raise
        self._busy -= 1

    def _take(self) -> list[_Entry[C, R]]:
        """Take the next batch out of the queue; empty if nothing there can be sent now."""
        batch: list[_Entry[C, R]] = []
        weight = 0
        more = False
        passed: set[Hashable] = set()  # the keys of all that came before, whether taken or held up
        most = self._most
        sharing = self._weight >= self._shared and self._may_start(self._weight)
        if sharing:
            most = min(most, -(-self._weight // (self._lanes - self._busy + 1)))
        for entry in self._waiting:
            if entry.future.done():
                continue  # its caller is cancelled and takes it back in a moment
            keys = entry.keys
            if keys and not (keys.isdisjoint(self._held) and keys.isdisjoint(passed)):
                passed |= keys
                continue
            if batch and weight + entry.weight > most:
                more = True
                break
            passed |= keys
            weight += entry.weight
            batch.append(entry)
        self._weight -= weight
        for entry in batch:
            del self._waiting[entry]
            if entry.keys:
                self._held |= entry.keys
        if more and sharing:
            self._start()
        elif more:
            self._start_another()
        return batch

    def _release(self, entry: _Entry[C, R]) -> None:
        for key in entry.keys:
            count = self._claims[key] - 1
            if count:
                self._claims[key] = count
            else:
                del self._claims[key]

    async def _send(self, batch: list[_Entry[C, R]]) -> None:
        failure = await self._patient_statement(batch)
        if failure is None:
            return
        lost = isinstance(failure, TransactionConflictError)
        if len(batch) == 1 or (isinstance(failure, DatabaseUnavailableError) and not lost):
            _fail(batch, failure)
            return
        conflicts = 0
        for position, entry in enumerate(batch):
            if entry.future.done():
                continue
            failure = await self._patient_statement([entry])
            if failure is None:
                conflicts = 0
                continue
            if isinstance(failure, TransactionConflictError):
                conflicts += 1
            elif isinstance(failure, DatabaseUnavailableError):
                conflicts = CONFLICTS_IN_A_ROW
            else:
                conflicts = 0
            if conflicts == CONFLICTS_IN_A_ROW:
                _fail(batch[position:], failure)
                return
            _fail([entry], failure)

    async def _patient_statement(self, batch: list[_Entry[C, R]]) -> Exception | None:
        """As `_statement`, again when the database is back, for those who still want it."""
        failure = await self._statement(batch)
        recovery = self._recovery
        if failure is None or recovery is None:
            return failure
        tries = 0
        while failure is not None and recovery.worthwhile(failure):
            try:
                while batch and not await recovery.back(tries, batch[0].deadline):
                    if not recovery.worthwhile(failure):
                        return failure
                    batch = _still_wanted(batch, failure)
            except OverloadedError as overloaded:  # too many wait already
                return overloaded
            batch = _still_wanted(batch, failure)
            if not batch:
                return None
            tries += 1
            failure = await self._statement(batch)
        return failure

    async def _statement(self, batch: list[_Entry[C, R]]) -> Exception | None:
        """Run one statement and give out its answers; or return the error with which it failed as a whole."""
        try:
            answers = await self._run([entry.call for entry in batch])
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers get it
            return error
        except asyncio.CancelledError as error:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            # Not this lane was cancelled but something that `run` waited for.
            unknown = DatabaseUnavailableError(f"the statement of {self._name} was cancelled")
            unknown.__cause__ = error
            return unknown
        try:
            self._give_out(batch, answers)
        except Exception as error:  # noqa: BLE001 - the statement is committed, so that it must not be run again
            _fail(batch, error)
        return None

    def _give_out(self, batch: list[_Entry[C, R]], answers: Sequence[R | Exception]) -> None:
        if len(answers) != len(batch):
            raise LightningError(f"the statement of {self._name} gave {len(answers)} answers to {len(batch)} calls")
        given: set[int] = set()
        for entry, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                _fail([entry], _another(answer) if id(answer) in given else answer)
                given.add(id(answer))
            elif not entry.future.done():
                entry.future.set_result(answer)

    def _abandon(self, batch: list[_Entry[C, R]], cause: BaseException | None) -> None:
        """Let nobody hang whom a lane that was stopped from outside should have answered."""
        self._busy -= 1
        message = f"the statement of {self._name} was stopped; whether it took place is unknown"
        unknown = DatabaseUnavailableError(message)
        unknown.__cause__ = cause
        _fail(batch, unknown)
        for entry in batch:
            self._held -= entry.keys
            self._release(entry)
        if not self._busy:  # no other lane will look after those that wait
            waiting = list(self._waiting)
            self._waiting.clear()
            self._weight = 0
            self._claims.clear()
            _fail(waiting, DatabaseUnavailableError(f"{self._name} was stopped before the call was sent"))


def _still_wanted(batch: list[_Entry[C, R]], failure: Exception) -> list[_Entry[C, R]]:
    """Fail the calls that are late; those that are not, and whose callers are still there."""
    now = asyncio.get_running_loop().time()
    _fail([entry for entry in batch if entry.deadline <= now], failure)
    return [entry for entry in batch if not entry.future.done()]


def _fail(batch: Iterable[_Entry[Any, Any]], error: Exception) -> None:
    """Fail the calls that have no answer yet, each with an exception of its own."""
    own: Exception | None = None
    for entry in batch:
        future = entry.future
        if not future.done():
            own = error if own is None else _another(error)
            future.set_exception(own)
            # Retrieved, so that it is not reported as lost if the caller's coroutine was closed.
            future.exception()


def _another(error: Exception) -> Exception:
    """A copy: callers that raise one instance at once would write into each other's traceback and context."""
    # Not through the constructor, whose parameters are every class's own affair.
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__, copy.__context__ = error.__cause__, error.__context__
    copy.__suppress_context__ = error.__suppress_context__
    return copy.with_traceback(error.__traceback__)
