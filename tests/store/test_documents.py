"""Bodies that become rows without records in between, and rows that become answers: the same as over the records."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lightning_api.models import (
    AttemptUpdate,
    DequeueRequest,
    EnqueueRequest,
    NextSequenceRequest,
    WorkerUpdate,
    changes_of,
)
from lightning_api.payloads import MalformedJsonError, UndecodableBodyError, decode_json
from lightning_sql.errors import InvalidRequestError, UnstorableValueError
from lightning_sql.jsonable import NESTING_LIMIT
from lightning_sql.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
)
from lightning_sql.store import documents, row_json
from lightning_sql.store.rows import (
    attempt_of,
    conditions_text,
    queued_row,
    rollout_draft,
    rollout_of,
    span_draft,
    span_of,
    stored_payload,
    stored_text,
)
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, assert_same, make_span, nested
from tests.api.bodies import CONTEXT, ROLLOUT, SPAN, UPDATE, bodies
from tests.properties.strategies import payloads, resources, short_texts
from tests.rows import spliced_row

REFUSALS = (ValidationError, InvalidRequestError, UnstorableValueError, MalformedJsonError, UndecodableBodyError)


def validated(model: Any, body: bytes) -> Any:
    """What the way over the records makes of a body, or None where it refuses it."""
    try:
        return TypeAdapter(model).validate_python(decode_json(body), from_attributes=True)
    except REFUSALS:
        return None


@settings(max_examples=400)
@given(bodies(SPAN))
@example(json.dumps(SPAN | {"start_time": 3, "end_time": 2**53 + 1}).encode())
@example(json.dumps(SPAN).replace("1.5,", "-0,").encode())
@example(json.dumps(SPAN).replace('"x"', '"\\ud83d\\ude00"').encode())
@example(json.dumps(SPAN).replace('"name": "n"', '"name": "first", "name": "n"').encode())
@example(json.dumps(SPAN).replace('"int": 1', '"int": null, "int": 1').encode())
@example(json.dumps(SPAN).replace('"int": 1', '"int": 1e400').encode())
@example(b"")
@example(b"null")
def test_spans(body: bytes) -> None:
    draft = documents.read_span(body)
    if draft is None:
        return
    span = validated(Span, body)
    assert span is not None, "the record would have been refused"
    assert_same(span_of(draft), span)
    # It is stored as it would have been but for white space, escapes and the spelling of numbers.
    for mine, other in zip(draft, span_draft(span), strict=True):
        assert mine == other or json.dumps(json.loads(str(mine))) == json.dumps(json.loads(str(other)))


@settings(max_examples=300)
@given(bodies({"rollouts": [ROLLOUT, {"input": None}]}))
@example(json.dumps({"rollouts": []}).encode())
@example(json.dumps({"rollouts": [{"input": nested(NESTING_LIMIT)}]}).encode())
@example(json.dumps({"rollouts": [{"input": nested(NESTING_LIMIT + 1)}]}).encode())
@example(json.dumps({"rollouts": [{"input": 1, "config": {"timeout_seconds": -0.0}}]}).replace("-0.0", "-0").encode())
@example(json.dumps({"rollouts": [{"input": 1, "config": {"unresponsive_seconds": -0.0}}]}).encode())
def test_enqueued_rollouts(body: bytes) -> None:
    drafts = documents.read_rollouts(body)
    if drafts is None:
        return
    request = validated(EnqueueRequest, body)
    assert request is not None, "the records would have been refused"
    assert len(drafts) == len(request.rollouts)
    assert len({draft.rollout_id for draft in drafts}) == len(drafts)
    for draft, wanted in zip(drafts, request.rollouts, strict=True):
        other = rollout_draft(wanted)._replace(rollout_id=draft.rollout_id)
        assert_same(rollout_of(queued_row(draft, 1.0, None)), rollout_of(queued_row(other, 1.0, None)))


@settings(max_examples=200)
@given(bodies({"limit": 2, "worker_id": "w", "wait": 1.5}))
@example(b"")
def test_claims(body: bytes) -> None:
    claim = documents.read_claim(body)
    if claim is not None:
        request = DequeueRequest() if not body else validated(DequeueRequest, body)
        assert request is not None
        assert_same(list(claim), [request.limit, request.worker_id, request.wait or 0.0])


@settings(max_examples=200)
@given(bodies({"rollout_id": "r", "attempt_id": "a"}))
def test_number_requests(body: bytes) -> None:
    rollout_id = documents.read_number_request(body)
    if rollout_id is not None:
        assert validated(NextSequenceRequest, body).rollout_id == rollout_id


@settings(max_examples=300)
@example(json.dumps({"last_heartbeat_time": -0.0}).encode(), "a")
@given(bodies(UPDATE), st.sampled_from(["a", "latest", "\x1aa", "x" * 129]))
def test_attempt_changes(body: bytes, attempt_id: str) -> None:
    change = documents.read_attempt_change("r", attempt_id, body)
    if change is None:
        return
    update = validated(AttemptUpdate, body)
    assert update is not None
    wanted = changes_of(update, frozenset(AttemptUpdate.model_fields))
    assert change.rollout_id == "r"
    assert change.attempt_id == (None if attempt_id == "latest" else stored_text(attempt_id))
    for name, value in wanted.items():
        got = getattr(change, name)
        if value is UNSET:
            assert got is None
        else:
            assert_same(json.loads(got) if name == "metadata" else got, value)


@settings(max_examples=200)
@given(bodies({"heartbeat_stats": {"cpu": 0.5}}))
@example(b"")
@example(b"{}")
def test_worker_beats(body: bytes) -> None:
    beat = documents.read_worker_beat("\x1aw", body)
    if beat is None:
        return
    assert beat.worker_id == stored_text("\x1aw")
    update = WorkerUpdate() if not body else validated(WorkerUpdate, body)
    assert update is not None
    stats = changes_of(update, frozenset({"heartbeat_stats"}))["heartbeat_stats"]
    assert_same(UNSET if beat.heartbeat_stats is None else json.loads(beat.heartbeat_stats), stats)


def test_what_clients_send_takes_the_short_way() -> None:
    for ascii_only in (True, False):
        span = json.dumps(SPAN | {"name": 'é😀\n"\\'}, ensure_ascii=ascii_only).encode()
        draft = documents.read_span(span)
        assert draft is not None
        assert draft.name == 'é😀\n"\\'
        assert draft.attributes == json.dumps(SPAN["attributes"])
        rollouts = json.dumps({"rollouts": [ROLLOUT] * 300}, ensure_ascii=ascii_only).encode()
        drafts = documents.read_rollouts(rollouts)
        assert drafts is not None
        assert drafts[299].input == json.dumps(ROLLOUT["input"])
        assert drafts[299].timeout_seconds == 3.0
    assert documents.read_rollouts(b'{"rollouts": [{"input": null, "metadata": null}]}') is not None
    assert documents.read_claim(b'{"limit": 1, "worker_id": null}') == (1, None, 0.0)
    assert documents.read_claim(b'{"limit": 3, "worker_id": "w", "wait": 2}') == (3, "w", 2.0)
    assert documents.read_claim(b"") == (1, None, 0.0)
    assert documents.read_number_request(b'{"rollout_id": "r", "attempt_id": "a"}') == "r"
    change = documents.read_attempt_change("r", "latest", json.dumps(UPDATE).encode())
    assert change == ("r", None, "failed", "w", 12.5, '{"a": 1}')
    assert documents.read_attempt_change("r", "a", b"{}") == ("r", "a", None, None, None, None)
    assert documents.read_worker_beat("w", b'{"heartbeat_stats": {"cpu": 1}}') == ("w", '{"cpu": 1}')


def test_payloads_are_kept_to_the_byte() -> None:
    text = '{ "b":1.50,\t"a" : [1E5, -0.0, 123456789012345678901234567890, "\\/\\u00e9é"] }'
    drafts = documents.read_rollouts(f'{{"rollouts": [{{"input":\n {text} , "metadata": {text}}}]}}'.encode())
    assert drafts is not None
    assert (drafts[0].input, drafts[0].metadata) == (text, text)
    row = queued_row(drafts[0], 1.0, None)
    assert row_json.ROLLOUTS.one(row).decode().count(text) == 2


def test_spans_in_one_document() -> None:
    values = [SPAN, 1, {"x": "\U0001f600"}]
    for unnumbered in ([], [0, 2]):
        more = {"unnumbered": unnumbered} if unnumbered else {}
        found = documents.read_span_list(json.dumps({"spans": values} | more).encode())
        assert found is not None
        assert [json.loads(span) for span in found[0]] == values
        assert found[1] == unnumbered
    for body in (
        b"[]",
        b"{}",
        b'{"spans": 1}',
        b'{"spans": [NaN]}',
        b'{"spans": [], "more": 1}',
        b'{"spans": [1,]}',
        b"",
    ):
        assert documents.read_span_list(body) is None


# Rows to answers

times = st.none() | st.sampled_from([0.0, 1.5, 1_700_000_000.25, 1e300, math.inf, -math.inf])
moments = st.sampled_from([0.0, 1.5, 1_700_000_000.25, math.inf])
ids = st.sampled_from(["r", "ü", "\x1aid", "a\x1a", "\x1a", "😀", '"', ""])


def same_answer(mine: bytes, other: bytes) -> None:
    """Two JSON texts with the same value, order of keys and kinds of numbers included."""
    assert json.dumps(json.loads(mine)) == json.dumps(json.loads(other))


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


def check(form: row_json.RowForm, rows: list[Any], records: list[Any]) -> None:
    for exact in (False, True):
        wanted = row_json.encode_json(records, exact=exact)
        same_answer(form.array(rows, exact=exact), wanted)
        if not exact:
            json.loads(form.array(rows), parse_constant=refuse)
        for row, record in zip(rows, records, strict=True):
            same_answer(form.one(row, exact=exact), row_json.encode_json(record, exact=exact))


attempts = st.builds(
    lambda rollout_id, fields: Attempt.model_construct(rollout_id=rollout_id, **fields),
    ids,
    st.fixed_dictionaries(
        {
            "attempt_id": ids,
            "sequence_id": st.integers(1, 2**63 - 1),
            "start_time": moments,
            "end_time": times,
            "status": st.sampled_from(["preparing", "failed"]),
            "worker_id": st.none() | ids,
            "last_heartbeat_time": times,
            "metadata": st.none() | st.dictionaries(short_texts, payloads, max_size=2),
        }
    ),
)
configs = st.builds(
    RolloutConfig.model_construct,
    timeout_seconds=times,
    unresponsive_seconds=times,
    max_attempts=st.integers(1, 2**63 - 1),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout"]), max_size=3),
)
rollouts = st.builds(
    Rollout.model_construct,
    rollout_id=ids,
    input=payloads,
    start_time=moments,
    end_time=times,
    mode=st.sampled_from([None, "val"]),
    resources_id=st.none() | ids,
    status=st.sampled_from(["queuing", "cancelled"]),
    config=configs,
    metadata=st.none() | st.dictionaries(short_texts, payloads, max_size=2),
)


def rollout_row(rollout: Rollout) -> tuple[Any, ...]:
    config = rollout.config
    return (
        stored_text(rollout.rollout_id),
        stored_payload(rollout.input),
        rollout.start_time,
        rollout.end_time,
        rollout.mode,
        stored_text(rollout.resources_id),
        rollout.status,
        config.timeout_seconds,
        config.unresponsive_seconds,
        config.max_attempts,
        conditions_text(tuple(config.retry_condition)),
        stored_payload(rollout.metadata),
    )


def attempt_row(attempt: Attempt) -> tuple[Any, ...]:
    return (
        stored_text(attempt.rollout_id),
        stored_text(attempt.attempt_id),
        attempt.sequence_id,
        attempt.start_time,
        attempt.end_time,
        attempt.status,
        stored_text(attempt.worker_id),
        attempt.last_heartbeat_time,
        stored_payload(attempt.metadata),
    )


@given(st.lists(st.tuples(rollouts, st.none() | attempts), max_size=3))
def test_rollouts_are_answered_as_their_records(pairs: list[tuple[Rollout, Attempt | None]]) -> None:
    alone = [rollout for rollout, _ in pairs]
    check(row_json.ROLLOUTS, [rollout_row(rollout) for rollout in alone], alone)
    rows, records = [], []
    for rollout, attempt in pairs:
        rows.append(rollout_row(rollout) + (9 * (None,) if attempt is None else attempt_row(attempt)))
        records.append(
            rollout if attempt is None else AttemptedRollout.model_construct(**dict(rollout), attempt=attempt)
        )
    check(row_json.ATTEMPTED_ROLLOUTS, rows, records)
    check(row_json.ROLLOUTS, rows, alone)


@given(st.lists(attempts, max_size=3))
def test_attempts_are_answered_as_their_records(records: list[Attempt]) -> None:
    rows = [attempt_row(attempt) for attempt in records]
    assert_same([attempt_of(row) for row in rows], records)
    check(row_json.ATTEMPTS, rows, records)


attribute_values = st.one_of(
    short_texts,
    st.booleans(),
    st.integers(),
    st.floats(),
    st.lists(short_texts, max_size=2),
    st.lists(st.floats(), max_size=2),
)
attributes = st.dictionaries(short_texts, attribute_values, max_size=3)
extras = st.dictionaries(st.sampled_from(["more", "x\x00", "\x1ax", "é", 'mo"re']), payloads, max_size=2)


@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries(
                {
                    "name": short_texts,
                    "attributes": attributes,
                    "start_time": times,
                    "end_time": times,
                    "events": st.lists(
                        st.builds(
                            lambda name, held, time: {"name": name, "attributes": held, "timestamp": time},
                            short_texts,
                            attributes,
                            times,
                        ),
                        max_size=1,
                    ),
                    "context": st.sampled_from([None, CONTEXT]),
                    "resource": st.builds(lambda held: {"attributes": held, "schema_url": "u"}, attributes),
                }
            ),
            extras,
            ids,
        ),
        max_size=3,
    )
)
def test_spans_are_answered_as_their_records(drawn: list[Any]) -> None:
    records = [make_span(id_, "a", "s", **fields, **extra) for fields, extra, id_ in drawn]
    drafts = [span_draft(span) for span in records]
    check(row_json.SPANS, drafts, records)
    check(row_json.SPLICED_SPANS, [spliced_row(draft) for draft in drafts], records)


@given(
    st.builds(
        Worker.model_construct,
        worker_id=ids,
        status=st.just("busy"),
        heartbeat_stats=st.none() | st.dictionaries(short_texts, payloads, max_size=2),
        last_heartbeat_time=times,
        last_dequeue_time=times,
        last_busy_time=times,
        last_idle_time=times,
        current_rollout_id=st.none() | ids,
        current_attempt_id=st.none() | ids,
    )
)
def test_workers_are_answered_as_their_records(worker: Worker) -> None:
    row = [
        stored_payload(value) if name == "heartbeat_stats" else stored_text(value) if name.endswith("_id") else value
        for name, value in worker
    ]
    check(row_json.WORKERS, [row], [worker])


named_resources: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


@given(ids, moments, moments, st.integers(1, 2**62), resources())
def test_resources_are_answered_as_their_records(
    id_: str, created: float, updated: float, version: int, named: dict[str, Any]
) -> None:
    record = ResourcesUpdate.model_construct(
        resources_id=id_,
        create_time=created,
        update_time=updated,
        version=version,
        resources=named_resources.validate_python(named),
    )
    payload = stored_payload({name: resource.model_dump() for name, resource in record.resources.items()})
    check(row_json.RESOURCES, [(stored_text(id_), created, updated, version, payload)], [record])


@pytest.mark.parametrize(
    "payload", [*ODD_PAYLOADS.values(), *ODD_STRINGS.values(), "\\u001a", ["\\\\u001a", "\\u0000"]]
)
def test_odd_payloads_are_answered_as_their_records(payload: Any) -> None:
    rollout = Rollout(rollout_id="r", input=payload, start_time=1.0, metadata={"value": payload})
    check(row_json.ROLLOUTS, [rollout_row(rollout)], [rollout])
    span = make_span("r", "a", "s", more=payload)
    check(row_json.SPANS, [span_draft(span)], [span])
    check(row_json.SPLICED_SPANS, [spliced_row(span_draft(span))], [span])


def test_unknown_attempts_are_named_as_the_caller_named_them() -> None:
    span = make_span("\x1ar", "a", "s")
    assert documents.unknown_attempt(span) == documents.unknown_attempt(span_draft(span))
    assert repr("\x1ar") in documents.unknown_attempt(span)
