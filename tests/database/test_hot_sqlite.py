"""SQLite's hot operations: what each stores and answers."""

import math
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, update

from lightning_sql.database.dialects.hot import HotPath, SpanOutcome, WorkerBeat
from lightning_sql.database.engine import Database
from lightning_sql.database.native import (
    ATTEMPT_COLUMNS,
    ATTEMPTS,
    RESOURCES,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SPAN_SEQUENCES,
    SPANS,
    WORKER_COLUMNS,
    WORKERS,
    raw_columns,
)
from lightning_sql.database.schema import PARTITION, SEQ
from lightning_sql.errors import RecordNotFoundError, SchemaOutdatedError
from lightning_sql.testing.samples import assert_same
from tests.database.hot_sqlite import (
    NOW,
    batch,
    begun,
    change,
    claim,
    create,
    draft,
    path_to,
    queued,
    span,
    stored,
)

STORED, DUPLICATE, UNKNOWN = SpanOutcome


@pytest.fixture
async def hot(tmp_path: Path) -> AsyncIterator[HotPath]:
    hot = path_to(create(tmp_path / "hot.db"))
    yield hot
    await hot.close()


def rollout_row(row: Any) -> dict[str, Any]:
    return dict(zip(ROLLOUT_COLUMNS, row, strict=False))


async def test_rollouts_are_queued_in_order_with_the_latest_resources(hot: HotPath) -> None:
    assert await hot.enqueue([draft("a"), draft("b", resources_id="mine")], NOW) == (NOW, None)

    def add(connection: Connection) -> None:
        for number, name in enumerate(("old", "new", "middle")):
            connection.execute(
                insert(RESOURCES).values(
                    {
                        PARTITION: "p",
                        SEQ: hot.next_order(RESOURCES),
                        "resources_id": name,
                        "create_time": NOW,
                        "update_time": NOW + (number * 2) % 3,
                        "version": 1,
                        "resources": {},
                    }
                )
            )

    await hot.write(add)
    assert await hot.enqueue([draft("c"), draft("d", resources_id="mine")], NOW + 1) == (NOW + 1, "new")
    assert await hot.enqueue([draft("e", resources_id="mine")], NOW + 1) == (NOW + 1, None)
    rows = await stored(hot, ROLLOUTS, SEQ, "queue_position", "rollout_id", "resources_id", "start_time", "status")
    assert rows == [
        (1, 1, "a", None, NOW, "queuing"),
        (2, 2, "b", "mine", NOW, "queuing"),
        (3, 3, "c", "new", NOW + 1, "queuing"),
        (4, 4, "d", "mine", NOW + 1, "queuing"),
        (5, 5, "e", "mine", NOW + 1, "queuing"),
    ]


async def test_claims_take_from_the_front_in_their_order(hot: HotPath) -> None:
    await hot.enqueue([draft(name, timeout_seconds=5.0 if name == "b" else None) for name in "abcd"], NOW)
    now, answers = await hot.claim(
        [claim("1", "2", worker="w"), claim("3", worker=None), claim("4", "5", worker=""), claim("6", worker="v")],
        NOW + 1,
    )
    assert now == NOW + 1
    assert [[(row[0], *row[-2:]) for row in rows] for rows in answers] == [
        [("a", "1", 1), ("b", "2", 1)],
        [("c", "3", 1)],
        [("d", "4", 1)],
        [],
    ]
    given = [row[: len(ROLLOUT_COLUMNS)] for rows in answers for row in rows]
    assert given == await stored(hot, ROLLOUTS, *ROLLOUT_COLUMNS)
    assert rollout_row(given[0]) | {"status": "preparing", "end_time": None, "input": '{"a":1}'} == rollout_row(
        given[0]
    )
    assert await stored(hot, ROLLOUTS, "watch_at") == [None, NOW + 6, None, None]
    assert await stored(hot, ATTEMPTS, "attempt_id", "worker_id", "status", "start_time", "sequence_id") == [
        ("1", "w", "preparing", NOW + 1, 1),
        ("2", "w", "preparing", NOW + 1, 1),
        ("3", None, "preparing", NOW + 1, 1),
        ("4", "", "preparing", NOW + 1, 1),
    ]
    columns = ("worker_id", "status", "current_rollout_id", "last_dequeue_time", "last_busy_time", "last_idle_time")
    assert await stored(hot, WORKERS, *columns) == [
        ("w", "busy", "b", NOW + 1, NOW + 1, None),
        ("v", "idle", None, NOW + 1, None, NOW + 1),
    ]
    assert await hot.claim([claim("7", worker="w"), claim("8", worker="v")], NOW + 2) == (NOW + 2, [[], []])
    assert await stored(hot, WORKERS, *columns) == [
        ("w", "idle", "b", NOW + 2, NOW + 1, NOW + 2),
        ("v", "idle", None, NOW + 2, None, NOW + 1),
    ]


async def test_the_time_is_the_processs_when_none_is_given(hot: HotPath) -> None:
    now, _ = await hot.enqueue([draft("a")], None)
    assert NOW < now < NOW + 1e9
    assert await stored(hot, ROLLOUTS, "start_time") == [now]
    assert hot.clock() is None


async def test_a_strict_batch_with_an_unknown_attempt_stores_nothing_of_itself(hot: HotPath) -> None:
    await begun(hot, "a", "1")
    outcomes = await hot.add_spans(
        [
            batch(span("a", "1", "x"), span("a", "2", "x")),
            batch(span("a", "1", "y"), span("b", "1", "x"), strict=False),
            batch(span("b", "1", "z")),
        ],
        NOW + 1,
    )
    assert outcomes[0][1] is UNKNOWN
    assert outcomes[0][0] is DUPLICATE  # not stored
    assert outcomes[1:] == [[STORED, UNKNOWN], [UNKNOWN]]
    assert await stored(hot, SPANS, "span_id") == ["y"]


async def test_only_a_new_span_is_a_sign_of_life(hot: HotPath) -> None:
    await begun(hot, "a", "1")
    assert await hot.add_spans([batch(span("a", "1", "x", 7))], NOW + 1) == [[STORED]]
    assert await stored(hot, ATTEMPTS, "status", "last_heartbeat_time") == [("running", NOW + 1)]
    assert await stored(hot, ROLLOUTS, "status") == ["running"]
    assert await hot.add_spans([batch(span("a", "1", "x", 9))], NOW + 2) == [[DUPLICATE]]
    assert await stored(hot, ATTEMPTS, "last_heartbeat_time") == [NOW + 1]
    assert await stored(hot, SPAN_SEQUENCES, "value") == [7]
    mixed = batch(span("a", "1", "x", 9), span("a", "1", "y", 3), span("a", "1", "z", 8))
    assert await hot.add_spans([mixed], NOW + 3) == [[DUPLICATE, STORED, STORED]]
    assert await stored(hot, SPAN_SEQUENCES, "value") == [8]
    assert await stored(hot, ATTEMPTS, "last_heartbeat_time") == [NOW + 3]
    assert [row[0] for row in await stored(hot, SPANS, "span_id", SEQ)] == ["x", "y", "z"]
    wanted = [("a", "1", "x"), ("a", "1", "new"), ("a", "2", "new"), ("b", "1", "new"), ("a", "1", "newer")]
    assert await hot.number_spans(wanted) == [None, 9, None, None, 10]
    assert await stored(hot, SPAN_SEQUENCES, "value") == [10]


async def test_a_span_brings_a_requeued_rollout_back_from_the_queue(hot: HotPath) -> None:
    limits = {"unresponsive_seconds": 5.0, "max_attempts": 3, "retry_condition": '["unresponsive","timeout"]'}
    await begun(hot, "a", "1", **limits)
    [changed] = await hot.update_attempts([change("a", "1", status="unresponsive")], NOW + 1)
    assert changed is not None
    assert changed.rollout_status == "requeuing"
    assert await stored(hot, ROLLOUTS, "status", "queue_position", "watch_at") == [("requeuing", 1, None)]
    await hot.add_spans([batch(span("a", "1", "x", 0))], NOW + 2)
    assert await stored(hot, ROLLOUTS, "status", "queue_position", "watch_at") == [("running", None, NOW + 2)]
    assert await stored(hot, ATTEMPTS, "status") == ["running"]
    assert await stored(hot, SPAN_SEQUENCES, "value") == []


async def test_attempts_are_changed_and_followed(hot: HotPath) -> None:
    retried = {"max_attempts": 2, "retry_condition": '["failed"]'}
    for number, name in enumerate("abcd"):
        await begun(hot, name, f"{name}1", worker=f"w{number % 2}", **retried)
    await hot.enqueue([draft("e")], NOW)
    answers = await hot.update_attempts(
        [
            change("b", None, status="failed"),
            change("a", "a1", status="succeeded", metadata='{"k":1}'),
            change("c", "nobody", status="failed"),
            change("d", "d1", worker_id="", last_heartbeat_time=math.inf),
            change("unknown", None, status="failed"),
            change("e", None, status="failed"),
        ],
        NOW + 1,
    )
    assert [None if answer is None else answer.rollout_status for answer in answers] == [
        "requeuing",
        "succeeded",
        None,
        "preparing",
        None,
        None,
    ]
    rows = await stored(hot, ATTEMPTS, *ATTEMPT_COLUMNS)
    assert [answer.attempt for answer in answers if answer] == [rows[1], rows[0], rows[3]]
    attempts = [dict(zip(ATTEMPT_COLUMNS, row, strict=True)) for row in rows]
    assert [attempt["end_time"] for attempt in attempts] == [NOW + 1, NOW + 1, None, None]
    assert attempts[0]["metadata"] == '{"k":1}'
    assert attempts[3]["worker_id"] == ""
    assert attempts[3]["last_heartbeat_time"] == math.inf
    assert await queued(hot) == ["e", "b"]
    assert await stored(hot, ROLLOUTS, "rollout_id", "end_time") == [
        ("a", NOW + 1),
        ("b", None),
        ("c", None),
        ("d", None),
        ("e", None),
    ]
    # d1 changed hands, so that w1 hears nothing of it; b1 made w1 idle.
    assert await stored(hot, WORKERS, "worker_id", "status", "current_rollout_id", "last_idle_time") == [
        ("w0", "idle", None, NOW + 1),
        ("w1", "idle", None, NOW + 1),
    ]


async def test_a_late_attempt_ends_itself_and_moves_nothing(hot: HotPath) -> None:
    await begun(hot, "a", "1", max_attempts=2, retry_condition='["failed"]')
    await hot.update_attempts([change("a", "1", status="failed")], NOW + 1)
    await hot.claim([claim("2")], NOW + 2)
    [late] = await hot.update_attempts([change("a", "1", status="succeeded")], NOW + 3)
    assert late is not None
    assert late.rollout_status == "preparing"
    await hot.add_spans([batch(span("a", "1", "x"))], NOW + 4)
    assert await stored(hot, ROLLOUTS, "status", "attempt_count") == [("preparing", 2)]
    assert await stored(hot, ATTEMPTS, "status", "end_time", "last_heartbeat_time") == [
        ("succeeded", NOW + 3, NOW + 4),
        ("preparing", None, None),
    ]


async def test_a_given_status_or_heartbeat_makes_the_watchdog_look(hot: HotPath) -> None:
    await begun(hot, "a", "1", timeout_seconds=100.0)
    watched: list[Any] = await stored(hot, ROLLOUTS, "watch_at")
    for number, fields in enumerate(
        ({"metadata": "{}"}, {"last_heartbeat_time": NOW}, {"worker_id": "w"}, {"status": "running"}), 1
    ):
        await hot.update_attempts([change("a", "1", **fields)], NOW + number)
        watched += await stored(hot, ROLLOUTS, "watch_at")
    assert watched == [NOW + 100, NOW + 100, NOW + 2, NOW + 2, NOW + 4]
    await hot.update_attempts([change("a", "1", status="timeout")], NOW + 5)
    assert await stored(hot, ROLLOUTS, "status", "watch_at", "end_time") == [("failed", None, NOW + 5)]


async def test_a_rollout_that_stands_in_the_queue_keeps_its_place(hot: HotPath) -> None:
    await begun(hot, "a", "1", max_attempts=2, retry_condition='["failed"]')
    queue = update(ROLLOUTS).values(status="queuing", queue_position=hot.next_queue_position())
    await hot.write(lambda connection: connection.execute(queue).close())
    await hot.enqueue([draft("b")], NOW)
    [changed] = await hot.update_attempts([change("a", None, status="failed")], NOW)
    assert changed is not None
    assert changed.rollout_status == "requeuing"
    assert await queued(hot) == ["a", "b"]


async def test_numbers_are_issued_after_the_highest_known(hot: HotPath) -> None:
    await begun(hot, "a", "1")
    assert await hot.issue_numbers({"a": 2, "never heard of": 1}) == {"a": 2, "never heard of": 1}
    await hot.add_spans([batch(span("a", "1", "x", 2**62 - 1))], NOW)
    assert await hot.issue_numbers({"a": 3}) == {"a": 2**62 + 2}


async def test_heartbeats_make_workers_known_and_keep_what_they_reported(hot: HotPath) -> None:
    rows = await hot.beat_workers([WorkerBeat("w", '{"a":1}'), WorkerBeat("v", None)], NOW)
    assert [dict(zip(WORKER_COLUMNS, row, strict=True))["status"] for row in rows] == ["unknown", "unknown"]
    rows = await hot.beat_workers([WorkerBeat("v", "{}"), WorkerBeat("w", None)], NOW + 1)
    assert_same([[row[0], row[2], row[3]] for row in rows], [["v", "{}", NOW + 1], ["w", '{"a":1}', NOW + 1]])
    assert await stored(hot, WORKERS, "worker_id", SEQ) == [("w", 1), ("v", 2)]


async def test_rollouts_are_found_with_their_latest_attempts(hot: HotPath) -> None:
    await begun(hot, "a", "1")
    await begun(hot, "b", "1")
    await hot.update_attempts([change("b", None, status="succeeded")], NOW + 1)
    await hot.enqueue([draft("c")], NOW)
    found = {row[0]: row for row in await hot.rollouts(["c", "a", "b", "a", "nothing"], False)}
    rollouts = {row[0]: row for row in await stored(hot, ROLLOUTS, *ROLLOUT_COLUMNS)}
    attempts = {row[0]: row for row in await stored(hot, ATTEMPTS, *ATTEMPT_COLUMNS)}
    nothing = (None,) * len(ATTEMPT_COLUMNS)
    assert found == {name: rollouts[name] + attempts.get(name, nothing) for name in "abc"}
    assert [row[0] for row in await hot.rollouts(["a", "b", "c"], True)] == ["b"]
    assert await hot.rollouts([], False) == []
    statement = select(*raw_columns(ROLLOUTS, ("rollout_id",))).order_by(ROLLOUTS.c[SEQ])
    assert [tuple(row) for row in await hot.fetch(statement)] == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("name", ["ü😀", "\x1a\x01\x0e\x09\x11", 'quote " and \\', "\x7f\x01", "%_'"])
async def test_any_text_and_number_comes_back(tmp_path: Path, name: str) -> None:
    hot = path_to(create(tmp_path / "hot.db"), partition=name)
    big = '"' + "x" * 1_000_000 + '"'
    await hot.enqueue([draft(name, input=big, timeout_seconds=math.inf, unresponsive_seconds=-math.inf)], NOW)
    _, [[row]] = await hot.claim([claim(name, worker=name)], NOW)
    assert (row[0], row[1], row[-2]) == (name, big, name)
    assert rollout_row(row)["timeout_seconds"] == math.inf
    assert await hot.add_spans([batch(span(name, name, name, trace_id=name, start_time=-math.inf))], NOW) == [[STORED]]
    assert await hot.number_spans([(name, name, name), (name, name, "new")]) == [None, 2]
    [changed] = await hot.update_attempts([change(name, name, status="running", worker_id=name)], NOW)
    assert changed is not None
    assert changed.attempt[:2] == (name, name)
    [found] = await hot.rollouts([name], False)
    assert found[: len(ROLLOUT_COLUMNS)][0] == name
    await hot.close()


async def test_partitions_see_nothing_of_each_other(tmp_path: Path) -> None:
    url = create(tmp_path / "hot.db")
    one, two = path_to(url, "one"), path_to(url, "two")
    await one.enqueue([draft("a")], NOW)
    assert (await two.claim([claim("1")], NOW))[1] == [[]]
    await two.enqueue([draft("a")], NOW)
    await two.claim([claim("1")], NOW)
    assert await one.add_spans([batch(span("a", "1", "x"))], NOW) == [[UNKNOWN]]
    assert await one.number_spans([("a", "1", "x")]) == [None]
    assert await one.update_attempts([change("a", "1", status="failed")], NOW) == [None]
    assert await queued(one, "one") == ["a"]
    assert await queued(two, "two") == []
    assert [row[6] for row in await one.rollouts(["a"], False)] == ["queuing"]
    await one.close()
    await two.close()


async def test_a_transaction_is_all_or_nothing(hot: HotPath) -> None:
    await hot.enqueue([draft("a")], NOW)

    def half(connection: Connection) -> None:
        connection.execute(update(ROLLOUTS).values(mode="train"))
        connection.execute(update(ROLLOUTS).values(queue_position=None))

    with pytest.raises(Exception, match="CHECK"):
        await hot.write(half)
    with pytest.raises(sqlite3.IntegrityError):
        await hot.enqueue([draft("b"), draft("a")], NOW)
    with pytest.raises(Exception, match="readonly"):
        await hot.read(lambda connection: connection.execute(update(ROLLOUTS).values(mode="train")))
    assert await stored(hot, ROLLOUTS, "rollout_id", "mode") == [("a", None)]

    def whole(connection: Connection) -> str:
        connection.execute(update(ROLLOUTS).values(mode="train"))
        return "done"

    assert await hot.write(whole) == "done"
    assert await stored(hot, ROLLOUTS, "mode") == ["train"]


async def test_what_a_work_raises_arrives(hot: HotPath) -> None:
    def stop(connection: Connection) -> None:
        raise StopIteration("x")

    def fail(connection: Connection) -> None:
        raise RecordNotFoundError("x")

    with pytest.raises(RuntimeError, match="StopIteration"):
        await hot.write(stop)
    for way in (hot.write, hot.read):
        with pytest.raises(RecordNotFoundError):
            await way(fail)
    assert await stored(hot, ROLLOUTS, "mode") == []


async def test_a_file_without_tables_is_an_old_schema(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    hot = path_to(database.url)
    for call in (hot.enqueue([draft("a")], NOW), hot.rollouts(["a"], False), hot.fetch(select(ROLLOUTS.c.mode))):
        with pytest.raises(SchemaOutdatedError), database.translated():
            await call
    await hot.close()
