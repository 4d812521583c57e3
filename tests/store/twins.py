"""Two stores that are given the same calls: what one answers, the other must, but for the ids that each makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from lightning_sql.records import AttemptedRollout, PaginatedResult, Rollout, Span
from lightning_sql.store.interface import LightningStore, SpanReceipt
from lightning_sql.testing.samples import assert_same

__all__ = ["Call", "Twins"]

IDS = frozenset({"rollout_id", "attempt_id", "resources_id", "current_rollout_id", "current_attempt_id"})
COUNTED = ("rollouts", "attempts", "spans", "resources", "workers")


@dataclass(frozen=True)
class Call:
    """A call by the ids of the reference."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    positional: Sequence[Any] = ()

    def of(self, store: LightningStore, translated: Callable[[Any], Any]) -> Awaitable[Any]:
        method = getattr(store, self.method)
        positional = [translated(value) for value in self.positional]
        return method(*positional, **{name: translated(value) for name, value in self.arguments.items()})


def _same(value: Any) -> Any:
    return value


class Twins:
    """A reference and the store that is compared with it; both are empty and look for overdue attempts when told to.

    `rollouts` and `attempts` hold the ids of the reference, in order of creation.
    """

    def __init__(self, reference: LightningStore, other: LightningStore) -> None:
        self.reference = reference
        self.other = other
        self.rollouts: list[str] = []
        self.attempts: dict[str, list[str]] = {}
        self._others: dict[str, str] = {}
        self._references: dict[str, str] = {}

    # Ids

    def translated(self, value: Any) -> Any:
        """An argument with the ids of the other store."""
        if isinstance(value, str):
            return self._others.get(value, value)
        if isinstance(value, Span):
            ids = {name: self.translated(getattr(value, name)) for name in ("rollout_id", "attempt_id")}
            return value.model_copy(update=ids)
        if isinstance(value, BaseModel) and "resources_id" in type(value).model_fields:
            return value.model_copy(update={"resources_id": self.translated(getattr(value, "resources_id", None))})
        if isinstance(value, list | tuple):
            return type(value)(self.translated(item) for item in value)
        return value

    def _meet(self, mine: str | None, theirs: str | None, path: str) -> None:
        if mine is None or theirs is None:
            assert mine is theirs, f"{path}: {theirs!r} instead of {mine!r}"
            return
        assert self._others.setdefault(mine, theirs) == theirs, f"{path}: another id"
        assert self._references.setdefault(theirs, mine) == mine, f"{path}: another id"

    def _learn(self, record: BaseModel) -> None:
        if isinstance(record, Rollout) and record.rollout_id not in self.attempts:
            self.rollouts.append(record.rollout_id)
            self.attempts[record.rollout_id] = []
        if isinstance(record, AttemptedRollout):
            attempts = self.attempts[record.rollout_id]
            if record.attempt.attempt_id not in attempts:
                attempts.append(record.attempt.attempt_id)

    # Comparing

    def compare(self, theirs: Any, mine: Any) -> None:
        """Fail unless two answers are the same to the last bit; of the ids each must stand for one of the other."""
        pending: list[tuple[Any, Any, str]] = [(theirs, mine, "answer")]
        while pending:
            got, want, path = pending.pop()
            if isinstance(want, PaginatedResult):
                names = ("items", "limit", "offset", "total")
                pending += [(getattr(got, name), getattr(want, name), f"{path}.{name}") for name in names]
            elif isinstance(want, BaseModel):
                assert type(got) is type(want), f"{path}: {type(got).__name__} instead of {type(want).__name__}"
                self._learn(want)
                names = [name for name, _ in want]
                assert [name for name, _ in got] == names, f"{path}: other fields"
                for name in names:
                    values = getattr(got, name), getattr(want, name)
                    if name in IDS:
                        self._meet(values[1], values[0], f"{path}.{name}")
                    else:
                        pending.append((*values, f"{path}.{name}"))
            elif isinstance(want, SpanReceipt):
                pending += [(getattr(got, name), getattr(want, name), f"{path}.{name}") for name in want.__slots__]
            elif isinstance(want, Sequence) and any(isinstance(item, BaseModel) for item in want):
                assert len(got) == len(want), f"{path}: {len(got)} instead of {len(want)}"
                pairs = enumerate(zip(got, want, strict=True))
                pending += [(*pair, f"{path}[{index}]") for index, pair in pairs]
            elif isinstance(want, Sequence) and not isinstance(want, str):
                assert_same(list(got), list(want))
            else:
                assert_same(got, want)

    async def both(self, call: Call, arranged: Callable[[Any], Any] = _same) -> None:
        """Make a call on both sides, and compare the answers, perhaps arranged before, or the errors."""
        mine = await outcome(call.of(self.reference, _same))
        theirs = await outcome(call.of(self.other, self.translated))
        self._settle(call, theirs, mine, arranged)

    async def burst(self, calls: Sequence[Call]) -> None:
        """Make calls at once on the one side, and one after the other on the reference."""
        mine = [await outcome(call.of(self.reference, _same)) for call in calls]
        theirs = await asyncio.gather(*(outcome(call.of(self.other, self.translated)) for call in calls))
        for call, got, want in zip(calls, theirs, mine, strict=True):
            self._settle(call, got, want)

    def _settle(self, call: Call, theirs: Any, mine: Any, arranged: Callable[[Any], Any] = _same) -> None:
        try:
            if isinstance(mine, Exception) or isinstance(theirs, Exception):
                # Of several things that are wrong with a call, any may be found first.
                kind = ValueError if isinstance(mine, ValueError) else type(mine)
                assert isinstance(theirs, kind), f"{theirs!r} instead of {mine!r}"
            else:
                self.compare(arranged(theirs), arranged(mine))
        except AssertionError as error:
            error.add_note(f"after {call}")
            raise

    async def sweep(self) -> None:
        """End what is overdue. What one sweep queues again has no order among itself, so it is given one."""
        before = await self._queued_again()
        await self.both(Call("sweep"))
        again = [id_ for id_ in await self._queued_again() if id_ not in before]
        await self.arrange(again)

    async def _queued_again(self) -> list[str]:
        return [rollout.rollout_id for rollout in await self.reference.query_rollouts(status_in=["requeuing"])]

    async def arrange(self, rollout_ids: Sequence[str]) -> None:
        """Queue rollouts anew, in this order."""
        if len(rollout_ids) > 1:
            for status in ("cancelled", "requeuing"):
                for rollout_id in rollout_ids:
                    await self.both(Call("update_rollout", {"status": status}, [rollout_id]))

    async def compare_everything(self, *, ordered: bool = True) -> None:
        """Every record, every counter, and at last the order of the queue, which is empty then.

        What was created at once, spans and workers, need not be `ordered`.
        """
        await self.both(Call("query_rollouts"))
        for rollout_id in self.rollouts:
            await self.both(Call("query_attempts", {}, [rollout_id]))
            await self.both(Call("query_spans", {"sort_by": None}, [rollout_id]), _same if ordered else _by_content)
            await self.both(Call("get_next_span_sequence_id", {}, [rollout_id, "any"]))
        await self.both(Call("query_resources"))
        await self.both(Call("get_latest_resources"))
        await self.both(Call("query_workers", {"sort_by": None if ordered else "worker_id"}))
        counts: list[Any] = [await store.statistics() for store in (self.other, self.reference)]
        assert [counts[0][f"total_{name}"] for name in COUNTED] == [counts[1][f"total_{name}"] for name in COUNTED]
        await self.both(Call("dequeue_many_rollouts", {"limit": 5000}))
        await self.both(Call("query_rollouts"))


def _by_content(page: PaginatedResult[Span]) -> list[Span]:
    return sorted(page.items, key=lambda span: repr(span.model_dump(exclude=set(IDS))))


async def outcome(call: Awaitable[Any]) -> Any:
    """What a call answers, or the error that it raises."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        return error
