"""What the native store sends: each operation's round trips are counted, and no statement is compiled twice."""

import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy.sql.compiler import SQLCompiler

from lightning_sql.database.dialects.postgresql_statements import STATEMENTS
from lightning_sql.database.engine import Database
from lightning_sql.records import AttemptedRollout, EnqueueRolloutRequest, IdempotencyKey, RolloutConfig
from lightning_sql.store.row_store import RolloutQuery
from lightning_sql.store.sql_store import SqlStore
from lightning_sql.testing.samples import make_span
from tests.backends import POSTGRES
from tests.database.wire import Wire, through_proxy

TRANSACTION = re.compile(r"\s*(BEGIN|COMMIT|ROLLBACK|START|SAVEPOINT|SET)\b", re.IGNORECASE)

Operation = Callable[[SqlStore, AttemptedRollout, int], Awaitable[Any]]


def span(rollout: AttemptedRollout, name: str, number: int = 1) -> Any:
    return make_span(rollout.rollout_id, rollout.attempt.attempt_id, name, number)


def key(rollout: AttemptedRollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


def a_key() -> IdempotencyKey:
    return IdempotencyKey(uuid.uuid4().hex)


IN_ONE: dict[str, Operation] = {
    "enqueue": lambda store, rollout, turn: store.enqueue_rollout(turn, metadata={"n": turn}),
    "enqueue many": lambda store, rollout, turn: store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=number) for number in range(20 + turn)]
    ),
    "dequeue": lambda store, rollout, turn: store.dequeue_rollout(),
    "dequeue for a worker": lambda store, rollout, turn: store.dequeue_rollout(f"w{turn % 2}"),
    "enqueue under a key": lambda store, rollout, turn: store.enqueue_rollout(turn, idempotency_key=a_key()),
    "enqueue many under a key": lambda store, rollout, turn: store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=number) for number in range(turn + 2)], idempotency_key=a_key()
    ),
    "dequeue under a key": lambda store, rollout, turn: store.dequeue_rollout("w", idempotency_key=a_key()),
    "dequeue many under a key": lambda store, rollout, turn: store.dequeue_many_rollouts(
        limit=2 + turn, worker_id="w", idempotency_key=a_key()
    ),
    "import spans under a key": lambda store, rollout, turn: store.import_spans(
        [span(rollout, f"k{turn}"), make_span("ro-none", "at-none", "k")], idempotency_key=a_key()
    ),
    "dequeue many": lambda store, rollout, turn: store.dequeue_many_rollouts(limit=5 + turn, worker_id="w"),
    "add span": lambda store, rollout, turn: store.add_span(span(rollout, f"a{turn}", turn)),
    "add a span again": lambda store, rollout, turn: store.add_span(span(rollout, "again")),
    "add many spans": lambda store, rollout, turn: store.add_many_spans(
        [span(rollout, f"b{turn}-{number}", number) for number in range(30 + turn)]
    ),
    "import spans": lambda store, rollout, turn: store.import_spans(
        [span(rollout, f"c{turn}"), make_span("ro-none", "at-none", "c")]
    ),
    "update attempt": lambda store, rollout, turn: store.update_attempt(*key(rollout), metadata={"n": turn}),
    "update the latest attempt": lambda store, rollout, turn: store.update_attempt(
        rollout.rollout_id, "latest", status=("running", "failed")[turn % 2], worker_id=f"w{turn}"
    ),
    "next number": lambda store, rollout, turn: store.get_next_span_sequence_id(f"r{turn}", "any"),
    "next numbers": lambda store, rollout, turn: store.get_many_span_sequence_ids(
        [(f"r{number}", "any") for number in range(turn + 2)]
    ),
    "update worker": lambda store, rollout, turn: store.update_worker(f"w{turn}"),
    "update worker's statistics": lambda store, rollout, turn: store.update_worker("w", {"n": turn}),
    "get rollout": lambda store, rollout, turn: store.get_rollout_by_id((rollout.rollout_id, "none")[turn % 2]),
    "get latest attempt": lambda store, rollout, turn: store.get_latest_attempt(rollout.rollout_id),
    "wait without waiting": lambda store, rollout, turn: store.wait_for_rollouts(
        rollout_ids=[rollout.rollout_id, *map(str, range(turn))], timeout=0
    ),
    "newest rollouts": lambda store, rollout, turn: store.query_rollouts(
        sort_by="start_time", sort_order="desc", limit=5 + turn
    ),
    "newest rollouts of a status": lambda store, rollout, turn: store.query_rollouts(
        status_in=["preparing" if turn % 2 else "queuing"],
        sort_by="start_time",
        sort_order="desc",
        limit=5,
        offset=turn,
    ),
    "newest rollouts of some statuses, uncounted": lambda store, rollout, turn: store.rollout_page(
        RolloutQuery(status_in=["preparing", "queuing"], sort_by="start_time", sort_order="desc", limit=5, total=False)
    ),
    "rollouts by id": lambda store, rollout, turn: store.query_rollouts(
        rollout_id_in=[rollout.rollout_id, *map(str, range(turn))], limit=10
    ),
    "rollouts, however many": lambda store, rollout, turn: store.query_rollouts(status_in=["running"]),
    "spans": lambda store, rollout, turn: store.query_spans(rollout.rollout_id),
    "a page of spans": lambda store, rollout, turn: store.query_spans(rollout.rollout_id, limit=5, offset=turn),
    "spans of the latest attempt": lambda store, rollout, turn: store.query_spans(
        rollout.rollout_id, "latest", name_contains=f"a{turn}", limit=10
    ),
    "attempts": lambda store, rollout, turn: store.query_attempts(rollout.rollout_id),
    "workers": lambda store, rollout, turn: store.query_workers(status_in=["busy"], limit=3 + turn),
    "worker": lambda store, rollout, turn: store.get_worker_by_id(f"w{turn}"),
    "resources": lambda store, rollout, turn: store.query_resources(limit=1 + turn),
    "resources by id": lambda store, rollout, turn: store.get_resources_by_id(f"r{turn}"),
    "latest resources": lambda store, rollout, turn: store.get_latest_resources(),
    "sweep with nothing to do": lambda store, rollout, turn: store.sweep(),
    "statistics": lambda store, rollout, turn: store.statistics(),
    "ping": lambda store, rollout, turn: store.ping(),
}
"""Everything that the database does in one statement."""

IN_MORE: dict[str, Operation] = {
    "start rollout": lambda store, rollout, turn: store.start_rollout(turn, worker_id=f"w{turn}"),
    "start attempt": lambda store, rollout, turn: store.start_attempt(rollout.rollout_id, "w"),
    "update rollout": lambda store, rollout, turn: store.update_rollout(rollout.rollout_id, metadata={"n": turn}),
    "queue again": lambda store, rollout, turn: store.update_rollout(rollout.rollout_id, status="requeuing"),
    "change limits": lambda store, rollout, turn: store.update_rollout(
        rollout.rollout_id, status="running", config=RolloutConfig(timeout_seconds=1e9 + turn)
    ),
    "add resources": lambda store, rollout, turn: store.add_resources({}),
    "update resources": lambda store, rollout, turn: store.update_resources("mine", {}),
    "import spans without numbers": lambda store, rollout, turn: store.import_spans(
        [span(rollout, f"d{turn}")], unnumbered={0}
    ),
    "wait": lambda store, rollout, turn: store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0.01),
    "an empty page far behind": lambda store, rollout, turn: store.query_rollouts(limit=5, offset=10_000 + turn),
}


async def ready(store: SqlStore) -> AttemptedRollout:
    """The rollout that operations are on; enough others are queued for all of them."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(200)])
    rollout = await store.start_rollout("busy")
    await store.add_span(span(rollout, "again"))
    await store.update_attempt(*key(rollout), status="running")
    return rollout


def open_store(database_url: str, claim_timeout: float | None = None) -> SqlStore:
    return SqlStore(
        Database(database_url),
        partition=uuid.uuid4().hex,
        scan_debounce_seconds=1e12,
        claim_timeout_seconds=claim_timeout,
    )


@pytest.fixture
async def wire(prepared_postgres: str) -> AsyncIterator[Wire]:
    async with through_proxy(prepared_postgres) as wire:
        yield wire


@pytest.mark.slow
async def test_round_trips(wire: Wire) -> None:
    async with open_store(wire.url) as store:
        rollout = await ready(store)
        for name, operation in IN_ONE.items():
            # The first calls prepare the statement, on each of the connections that are there.
            for turn in range(3):
                await operation(store, rollout, turn)
            for turn in range(3, 6):
                wire.clear()
                await operation(store, rollout, turn)
                assert (wire.trips, wire.texts) == (1, []), name


@pytest.mark.slow
async def test_the_proxy_sees_transactions(wire: Wire) -> None:
    """What is not done in one statement is seen to be so; nothing of it is left open."""
    async with open_store(wire.url) as store:
        rollout = await ready(store)
        for operation in list(IN_MORE.values())[:4]:
            await operation(store, rollout, 0)
            wire.clear()
            await operation(store, rollout, 1)
            assert wire.trips >= 4
            texts = [text.strip(" ;") for text in wire.texts if TRANSACTION.match(text)]
            assert texts[0].startswith("BEGIN")
            assert texts[-1].startswith("COMMIT")


@pytest.mark.slow
async def test_a_connection_prepares_a_statement_once(wire: Wire) -> None:
    sent: Counter[str] = Counter()
    for claim_timeout in (None, 1e6):
        wire.clear()
        async with open_store(wire.url, claim_timeout) as store:
            rollout = await ready(store)
            for turn in range(3):
                for operation in (IN_ONE | IN_MORE).values():
                    await operation(store, rollout, turn)
        once = {statement.name: wire.texts.count(statement.sql) for statement in STATEMENTS}
        # Calls one after the other are all on one connection. Not every batch that there might be was asked for.
        assert set(once.values()) <= {0, 1}
        # A store whose claims have no limit does not pay for those that have.
        limited = {name for name in once if once[name] and name.startswith("update_heard")}
        assert bool(limited) == (claim_timeout is not None)
        sent.update(once)
    assert {name.removesuffix("_of_one") for name in sent if sent[name]} == {
        name.removesuffix("_of_one") for name in sent
    }
    assert sum(sent.values()) > len(sent) - 5


def test_hot_statements_have_cache_keys() -> None:
    keys = [statement.clause._generate_cache_key() for statement in STATEMENTS]
    assert None not in keys
    assert all(one is other or one != other for one in keys for other in keys)


def test_hot_statements_name_every_value_once_in_the_text() -> None:
    for statement in STATEMENTS:
        names = set(re.findall(r"(?<!:):(\w+)", statement.clause.text))
        numbers = {int(number) for number in re.findall(r"\$(\d+)", statement.sql)}
        assert numbers == set(range(1, len(names) + 1)), statement.name
        listed = {*statement.single, *statement.joined}
        values = {name: [f"<{name}>"] if name in listed else f"<{name}>" for name in names}
        ours = {"separator": "\x1f", "nothing": "\x1e"}
        assert sorted(statement.arguments(values)) == sorted(ours.get(name, f"<{name}>") for name in names)
        assert statement.sql is statement.sql


@pytest.mark.parametrize("kind", ["sqlite", POSTGRES])
async def test_nothing_is_compiled_twice(
    kind: str, database_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    initialise = SQLCompiler.__init__

    def counting(self: Any, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        compiled.append(self.string)

    async with open_store(database_of(kind)) as store:
        rollout = await ready(store)
        operations = IN_ONE | IN_MORE
        monkeypatch.setattr(SQLCompiler, "__init__", counting)
        for turn in range(3):
            for operation in operations.values():
                await operation(store, rollout, turn)
        first = len(compiled)
        assert first > 20
        for turn in range(3, 6):
            for name, operation in operations.items():
                await operation(store, rollout, turn)
                assert compiled[first:] == [], name
