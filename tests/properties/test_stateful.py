"""The same random calls to a backend and to the plain model: every answer, and at the end every record, is equal."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from lightning_sql.errors import RecordNotFoundError
from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig
from lightning_sql.store.collection_store import CollectionStore
from lightning_sql.store.interface import LightningStore
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.model import MissingRecordError, Record, StoreModel
from lightning_sql.testing.samples import assert_same, make_span
from tests.backends import COLLECTIONS, POSTGRES, SQLITE, START, Clock, NewStore
from tests.native_laws import broken_laws, queue_of
from tests.properties import strategies as given

R = TypeVar("R")

REFERENCES = ("rollout_id", "attempt_id", "resources_id", "current_rollout_id", "current_attempt_id")
ROLLOUT_STATUSES = ["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
ATTEMPT_STATUSES = ["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]

picks = st.integers(0, 7)
"""Which of the records there are; one too many is none of them."""


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model, and translates the ids of the one into those of the other."""

    def __init__(
        self, make_store: Callable[[], LightningStore], clock: Clock, claim_timeout: float | None = None
    ) -> None:
        super().__init__()
        self.clock = clock
        self.clock.now = START
        self.model = StoreModel(START, claim_timeout)
        self.runner = asyncio.Runner()
        self.store = make_store()
        self.names: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.numbers_of_spans = 0

    def teardown(self) -> None:
        try:
            self.compare_everything()
            assert self.run(broken_laws(self.store, self.clock.now)) == []
        finally:
            self.runner.run(self.store.close())
            self.runner.close()

    def run(self, call: Awaitable[R]) -> R:
        async def wait() -> R:
            return await call

        return self.runner.run(wait())

    # Translation

    def learn(self, real: Any, model: Record) -> None:
        """Remember which ids of a new record mean the same."""
        for field in ("rollout_id", "attempt_id", "resources_id"):
            name, value = model.get(field), getattr(real, field, None)
            if name is not None and value is not None and name not in self.ids:
                self.ids[name] = value
                self.names[value] = name
        if "attempt" in model:
            self.learn(real.attempt, model["attempt"])

    def translated(self, value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            return {key: self.translated(item, key) for key, item in value.items()}
        return self.names.get(value, value) if field in REFERENCES else value

    def compare(self, real: Any, model: Record | None) -> None:
        if model is None or real is None:
            assert real is None
            assert model is None
            return
        self.learn(real, model)
        seen = self.translated(real.model_dump())
        assert_same(seen, {name: model[name] for name in seen} | {name: model[name] for name in model})

    def compare_all(self, reals: Sequence[Any], models: Sequence[Record]) -> None:
        assert len(reals) == len(models)
        for real, model in zip(reals, models, strict=True):
            self.compare(real, model)

    def compare_page(self, page: Any, expected: tuple[list[Record], int]) -> None:
        self.compare_all(page.items, expected[0])
        assert page.total == expected[1]

    def both(self, call: Awaitable[Any], model: Callable[[], Record | list[Record]]) -> None:
        """Make a call on both sides; either both give a record or both miss one."""
        try:
            expected = model()
        except MissingRecordError:
            with pytest.raises(RecordNotFoundError):
                self.run(call)
            return
        answer = self.run(call)
        if isinstance(expected, list):
            self.compare_all(answer, expected)
        else:
            self.compare(answer, expected)

    def rollout(self, pick: int) -> tuple[str, str]:
        """A rollout's id for the model and for the store."""
        if pick >= len(self.model.rollouts):
            return "none", "ro-none"
        name = self.model.rollouts[pick]["rollout_id"]
        return name, self.ids[name]

    def attempt(self, rollout: str, pick: int) -> tuple[str, str]:
        attempts = self.model.attempts_of(rollout)
        if pick == 0 or not attempts:
            return "latest", "latest"
        name = attempts[-(pick % len(attempts)) or 0]["attempt_id"]
        return name, self.ids[name]

    # Time

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.model.now += seconds

    @rule()
    def sweep(self) -> None:
        self.model.sweep()
        self.run(self.store.sweep())
        self.compare_queue()

    def compare_queue(self) -> None:
        """Law 4, below the surface: an entry for each rollout that is queued, one, and no other."""
        waiting = [self.names[entry] for entry in self.run(self.entries())]
        batches = {rollout_id: batch for batch, rollout_id in self.model.queue}
        assert sorted(waiting) == sorted(batches)
        order = [batches[rollout_id] for rollout_id in waiting]
        assert order == sorted(order)

    async def entries(self) -> Sequence[str]:
        if isinstance(self.store, SqlStore):
            return await queue_of(self.store)
        assert isinstance(self.store, CollectionStore)
        return await self.store.collections.rollout_queue.peek(10000)

    # Rollouts

    def arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        config = request.get("config")
        return request | ({"config": RolloutConfig(**config)} if config is not None else {})

    @rule(requests=st.lists(given.requests(), max_size=3))
    def enqueue(self, requests: list[dict[str, Any]]) -> None:
        records = [EnqueueRolloutRequest(**self.arguments(request)) for request in requests]
        self.both(self.store.enqueue_many_rollouts(records), lambda: self.model.enqueue(requests))

    @rule(request=given.requests(), worker=given.workers)
    def start(self, request: dict[str, Any], worker: str | None) -> None:
        call = self.store.start_rollout(**self.arguments(request), worker_id=worker)
        self.both(call, lambda: self.model.start(request, worker))

    @rule(limit=st.integers(-1, 4), worker=given.workers)
    def dequeue(self, limit: int, worker: str | None) -> None:
        claimed = self.run(self.store.dequeue_many_rollouts(limit=limit, worker_id=worker))
        order = [self.names[item.rollout_id] for item in claimed]
        self.compare_all(claimed, self.model.dequeue(limit, worker, order))

    @rule(pick=picks, worker=given.workers)
    def start_attempt(self, pick: int, worker: str | None) -> None:
        name, real = self.rollout(pick)
        self.both(self.store.start_attempt(real, worker), lambda: self.model.start_attempt(name, worker))

    @rule(
        pick=picks,
        changes=st.fixed_dictionaries(
            {},
            optional={
                "input": given.small_payloads,
                "mode": given.modes,
                "resources_id": st.sampled_from([None, "mine"]),
                "status": st.sampled_from(ROLLOUT_STATUSES),
                "config": given.configs,
                "metadata": st.sampled_from([None, {}, {"m": 1}]),
            },
        ),
    )
    def update_rollout(self, pick: int, changes: dict[str, Any]) -> None:
        name, real = self.rollout(pick)
        call = self.store.update_rollout(real, **self.arguments(changes))
        self.both(call, lambda: self.model.update_rollout(name, changes))

    @rule(pick=picks)
    def get_rollout(self, pick: int) -> None:
        name, real = self.rollout(pick)
        self.compare(self.run(self.store.get_rollout_by_id(real)), self.model.get_rollout(name))

    @rule(
        status_in=st.none() | st.lists(st.sampled_from(ROLLOUT_STATUSES), max_size=3),
        chosen=st.none() | st.lists(picks, max_size=3),
        logic=st.sampled_from(["and", "or"]),
        page=given.pages(None, "start_time", "end_time", "mode", "status"),
    )
    def query_rollouts(self, status_in: Any, chosen: list[int] | None, logic: Any, page: dict[str, Any]) -> None:
        pairs = None if chosen is None else [self.rollout(pick) for pick in chosen]
        names = None if pairs is None else [name for name, _ in pairs]
        reals = None if pairs is None else [real for _, real in pairs]
        found = self.run(
            self.store.query_rollouts(status_in=status_in, rollout_id_in=reals, filter_logic=logic, **page)
        )
        self.compare_page(found, self.model.query_rollouts(status_in, names, logic, page))

    @rule(chosen=st.lists(picks, max_size=4))
    def wait(self, chosen: list[int]) -> None:
        pairs = [self.rollout(pick) for pick in chosen]
        found = self.run(self.store.wait_for_rollouts(rollout_ids=[real for _, real in pairs], timeout=0))
        self.compare_all(found, self.model.wait([name for name, _ in pairs]))

    # Attempts

    @rule(pick=picks, page=given.pages(None, "sequence_id", "start_time", "end_time", "status", "worker_id"))
    def query_attempts(self, pick: int, page: dict[str, Any]) -> None:
        name, real = self.rollout(pick)
        self.compare_page(self.run(self.store.query_attempts(real, **page)), self.model.query_attempts(name, page))

    @rule(pick=picks)
    def get_latest_attempt(self, pick: int) -> None:
        name, real = self.rollout(pick)
        self.compare(self.run(self.store.get_latest_attempt(real)), self.model.latest_attempt(name))

    @rule(
        pick=picks,
        which=st.integers(0, 4),
        changes=st.fixed_dictionaries(
            {},
            optional={
                "status": st.sampled_from(ATTEMPT_STATUSES),
                "worker_id": st.sampled_from(["", "w1", "w2"]),
                "last_heartbeat_time": st.sampled_from([0.5, START, START + 5]),
                "metadata": st.sampled_from([{}, {"m": 1}]),
            },
        ),
    )
    def update_attempt(self, pick: int, which: int, changes: dict[str, Any]) -> None:
        name, real = self.rollout(pick)
        attempt_name, attempt_id = self.attempt(name, which)
        call = self.store.update_attempt(real, attempt_id, **changes)
        self.both(call, lambda: self.model.update_attempt(name, attempt_name, changes))

    # Spans

    @precondition(lambda self: self.model.attempts)
    @rule(
        drafts=st.lists(
            st.tuples(
                picks,
                st.integers(0, 4),
                st.sampled_from(["a", "b", "c", "d"]),
                st.integers(-2, 12),
                st.sampled_from(["alpha", "beta", "a%"]),
                st.sampled_from([None, "a", "b"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def add_spans(self, drafts: list[tuple[int, int, str, int, str, str | None]]) -> None:
        spans, records = [], []
        for pick, which, span_id, number, name, parent in drafts:
            rollout_name, rollout_id = self.rollout(pick % len(self.model.rollouts) if pick < 7 else pick)
            attempt_name, attempt_id = self.attempt(rollout_name, which)
            if attempt_name == "latest" and (latest := self.model.attempts_of(rollout_name)) and which < 4:
                attempt_name = latest[-1]["attempt_id"]
                attempt_id = self.ids[attempt_name]
            self.numbers_of_spans += 1
            span = make_span(
                rollout_id, attempt_id, span_id, number, name=name, parent_id=parent, custom=self.numbers_of_spans
            )
            spans.append(span)
            records.append(span.model_dump() | {"rollout_id": rollout_name, "attempt_id": attempt_name})
        self.both(self.store.add_many_spans(spans), lambda: self.model.add_spans(records))

    @rule(chosen=st.lists(picks, max_size=4))
    def next_numbers(self, chosen: list[int]) -> None:
        pairs = [self.rollout(pick) for pick in chosen]
        issued = self.run(self.store.get_many_span_sequence_ids([(real, "any") for _, real in pairs]))
        assert list(issued) == self.model.next_numbers([name for name, _ in pairs])

    @rule(
        pick=picks,
        which=st.none() | st.integers(0, 3),
        filters=st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["alpha", "gamma"]),
                "name_contains": st.sampled_from(["", "a", "%", "lph"]),
                "parent_id": st.sampled_from(["a", None]),
                "parent_id_contains": st.sampled_from(["", "b"]),
                "span_id": st.sampled_from(["a", "b"]),
                "trace_id_contains": st.sampled_from(["1", "2"]),
            },
        ),
        logic=st.sampled_from(["and", "or"]),
        page=given.pages(None, "sequence_id", "name", "parent_id", "span_id"),
    )
    def query_spans(self, pick: int, which: int | None, filters: Any, logic: Any, page: dict[str, Any]) -> None:
        name, real = self.rollout(pick)
        attempt_name, attempt_id = (None, None) if which is None else self.attempt(name, which)
        found = self.run(self.store.query_spans(real, attempt_id, filter_logic=logic, **filters, **page))
        self.compare_page(found, self.model.query_spans(name, attempt_name, filters, logic, page))

    # Resources

    @rule(resources_id=st.sampled_from([None, "mine", "yours"]), template=st.sampled_from(["", "{x}"]))
    def write_resources(self, resources_id: str | None, template: str) -> None:
        resources: Any = {"p": {"resource_type": "prompt_template", "template": template, "engine": "jinja"}}
        call = (
            self.store.add_resources(resources)
            if resources_id is None
            else self.store.update_resources(resources_id, resources)
        )
        self.both(call, lambda: self.model.write_resources(resources_id, resources))

    @rule(page=given.pages(None, "version", "create_time", "update_time"))
    def read_resources(self, page: dict[str, Any]) -> None:
        self.compare(self.run(self.store.get_latest_resources()), self.model.latest_resources())
        self.compare(self.run(self.store.get_resources_by_id("mine")), self.model.get_resources("mine"))
        self.compare_page(self.run(self.store.query_resources(**page)), self.model.query_resources(page))

    # Workers

    @rule(
        worker=st.sampled_from(["w1", "w2"]),
        changes=st.sampled_from([{}, {"heartbeat_stats": {}}, {"heartbeat_stats": {"cpu": 1}}]),
    )
    def update_worker(self, worker: str, changes: dict[str, Any]) -> None:
        self.both(self.store.update_worker(worker, **changes), lambda: self.model.update_worker(worker, changes))

    @rule(
        status_in=st.none() | st.lists(st.sampled_from(["idle", "busy", "unknown"]), max_size=2),
        contains=st.sampled_from([None, None, "", "w", "1"]),
        logic=st.sampled_from(["and", "or"]),
        page=given.pages(None, "worker_id", "status", "last_busy_time", "last_idle_time", "last_dequeue_time"),
    )
    def read_workers(self, status_in: Any, contains: str | None, logic: Any, page: dict[str, Any]) -> None:
        self.compare(self.run(self.store.get_worker_by_id("w1")), self.model.get_worker("w1"))
        found = self.run(
            self.store.query_workers(status_in=status_in, worker_id_contains=contains, filter_logic=logic, **page)
        )
        self.compare_page(found, self.model.query_workers(status_in, contains, logic, page))

    # At the end

    def compare_everything(self) -> None:
        whole: dict[str, Any] = {}
        self.compare_page(self.run(self.store.query_rollouts()), self.model.query_rollouts(None, None, "and", whole))
        for name in [rollout["rollout_id"] for rollout in self.model.rollouts]:
            real = self.ids[name]
            self.compare_page(self.run(self.store.query_attempts(real)), self.model.query_attempts(name, whole))
            found = self.run(self.store.query_spans(real, sort_by=None))
            expected = self.model.query_spans(name, None, {}, "and", whole)
            # Without a sort, how the spans of several attempts are grouped is nobody's promise.
            by_key = sorted(expected[0], key=lambda span: span["custom"])
            self.compare_all(sorted(found.items, key=lambda span: span.custom), by_key)
            assert self.run(self.store.get_next_span_sequence_id(real, "any")) == self.model.next_numbers([name])[0]
        self.compare_page(self.run(self.store.query_workers()), self.model.query_workers(None, None, "and", whole))
        self.compare_page(self.run(self.store.query_resources()), self.model.query_resources(whole))
        statistics: Any = self.run(self.store.statistics())
        for kind in ("rollouts", "attempts", "spans", "resources", "workers"):
            assert statistics[f"total_{kind}"] == len(getattr(self.model, kind))
        self.compare_queue()
        self.dequeue(1000, None)
        assert not self.model.queue


CLAIM_TIMEOUT = 2.0
EFFORT = {"memory": (50, 40), "sqlite": (20, 40), "postgres": (20, 40)}
"""Examples, and steps of each; the protocol backends had theirs when they were all there was."""


@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES, *COLLECTIONS])
def test_a_store_agrees_with_the_model(kind: str, new_store: NewStore, clock: Clock) -> None:
    examples, steps = EFFORT.get(kind, (10, 40))
    run_state_machine_as_test(
        partial(StoreMachine, partial(new_store, kind), clock),  # pyright: ignore[reportArgumentType] - hypothesis takes any factory
        settings=settings(settings.default, max_examples=examples, stateful_step_count=steps),
    )


@pytest.mark.parametrize("kind", ["memory", SQLITE, POSTGRES])
def test_a_store_whose_claims_end_agrees_with_the_model(kind: str, new_store: NewStore, clock: Clock) -> None:
    make_store = partial(new_store, kind, claim_timeout_seconds=CLAIM_TIMEOUT)
    run_state_machine_as_test(
        partial(StoreMachine, make_store, clock, CLAIM_TIMEOUT),  # pyright: ignore[reportArgumentType] - hypothesis takes any factory
        settings=settings(settings.default, max_examples=15, stateful_step_count=40),
    )
