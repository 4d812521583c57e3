"""Random calls for two stores: what hypothesis draws, and how it becomes calls on the records that there are.

A step is the name of a method and what was drawn for it, in which a record is a number (a "pick"): which
of those that there are, or none, is settled when the step is made.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from lightning_sql.records import EnqueueRolloutRequest, RolloutConfig, Span
from lightning_sql.testing.samples import ODD_PAYLOADS, ODD_STRINGS, make_span, sdk_span
from tests.backends import START
from tests.properties import strategies as drawn
from tests.store.twins import Call, Twins

__all__ = ["Step", "bursts", "call_of", "programs", "span_of"]

Step = tuple[str, Mapping[str, Any]]

ROLLOUT_STATUSES = ["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
ATTEMPT_STATUSES = ["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
LATEST = 9
ABSENT_IDS = ["ro-none", "", "latest", "a\x00b", "\ud800", "\x1a", "x" * 600]

picks = st.integers(0, 7)
whiches = st.integers(0, 4) | st.just(LATEST)
worker_ids = st.sampled_from(["w1", "w2", "\x1aworker", "é%_", "w" * 512])
maybe_workers = st.none() | st.just("") | worker_ids
odd_workers = st.sampled_from(["a\x00b", "\ud800", "w" * 513])
short_odd = [value for name, value in ODD_STRINGS.items() if "megabyte" not in name]
odd_payloads = [value for name, value in ODD_PAYLOADS.items() if not name.startswith(("string", "wide", "odd", "deep"))]
payloads = st.one_of(drawn.small_payloads, drawn.payloads, st.sampled_from(odd_payloads))
objects = st.dictionaries(st.sampled_from(["k", "b", "a", *short_odd]), payloads, max_size=3)
texts = st.sampled_from(["", "alpha", "beta", "a%", *short_odd])
needles = st.sampled_from(["", "a", "A", "%", "_", "\x00", "\ud800", "\x1a", "é", "alp", "1"])
limits = st.sampled_from([None, None, None, 0.0, -1.0, 0.5, 2.0, 10.0, math.inf, -math.inf])
times = st.sampled_from([None, 0.5, 1.0, 1e300, START, math.inf, -math.inf])
configs = st.builds(
    RolloutConfig,
    timeout_seconds=limits,
    unresponsive_seconds=limits,
    max_attempts=st.sampled_from([1, 2, 3, 2**63 - 1]),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout", "unresponsive", "succeeded"]), max_size=4),
)
resources_ids = st.sampled_from([None, None, "mine", "yours", "\x1amine", "é"])
modes = drawn.modes

requests = st.fixed_dictionaries(
    {"input": payloads},
    optional={"mode": modes, "resources_id": resources_ids, "config": configs, "metadata": objects},
)


def pages(*fields: str) -> st.SearchStrategy[dict[str, Any]]:
    """Sorting and paging, now and then by what cannot be sorted by or outside the bounds."""
    return st.fixed_dictionaries(
        {},
        optional={
            "sort_by": st.sampled_from([None, *fields]) | st.sampled_from([None, "metadata", "nothing", ""]),
            "sort_order": st.sampled_from(["asc", "desc"]),
            "limit": st.sampled_from([-1, 1, 2, 3, 5, 5, 0, -2]),
            "offset": st.sampled_from([0, 0, 1, 2, 3, 100, -1]),
        },
    )


span_values = st.fixed_dictionaries(
    {},
    optional={
        "trace_id": st.sampled_from(["t1", "t2", "\x1at"]),
        "parent_id": st.sampled_from(["a", "b", None, "\x1ap"]),
        "name": texts,
        "status": st.builds(
            lambda text, more: {"status_code": "ERROR", "description": text, "more": more}, texts, payloads
        ),
        "attributes": st.dictionaries(
            texts,
            st.one_of(texts, st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.lists(st.floats())),
            max_size=3,
        ),
        "events": st.lists(
            st.builds(
                lambda name, values, more: {"name": name, "attributes": values, "timestamp": math.nan, "more": more},
                texts,
                st.dictionaries(texts, texts | st.floats(), max_size=2),
                payloads,
            ),
            max_size=2,
        ),
        "links": st.lists(
            st.builds(
                lambda text: {
                    "context": {"trace_id": text, "span_id": text, "is_remote": True, "trace_state": {text: text}},
                    "attributes": {text: text},
                },
                texts,
            ),
            max_size=1,
        ),
        "start_time": times,
        "end_time": times,
        "context": st.none()
        | st.builds(
            lambda text: {"trace_id": text, "span_id": "s", "is_remote": False, "trace_state": {}, "more": text},
            texts,
        ),
        "resource": st.builds(
            lambda text, value: {"attributes": {text: value}, "schema_url": text}, texts, texts | st.integers()
        ),
        "custom": payloads,
    },
)
spans = st.fixed_dictionaries(
    {
        "pick": picks,
        "which": st.integers(0, 4),
        "span_id": st.sampled_from(["a", "b", "c", "d", "\x1as", "é"]),
        "number": st.integers(-2, 12) | st.sampled_from([2**62 - 1, -(2**63), 2**53 + 1]),
        "values": span_values,
    }
)
rollout_changes = st.fixed_dictionaries(
    {},
    optional={
        "input": payloads,
        "mode": modes | st.just("bogus"),
        "resources_id": resources_ids | st.just("a\x00b"),
        "status": st.sampled_from(ROLLOUT_STATUSES) | st.sampled_from([None, "bogus"]),
        "config": configs | st.none(),
        "metadata": st.none() | objects,
    },
)
attempt_changes = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(ATTEMPT_STATUSES) | st.sampled_from([None, "bogus"]),
        "worker_id": st.just("") | worker_ids | odd_workers | st.none(),
        "last_heartbeat_time": st.sampled_from([0.5, START, START + 5, 1e300, math.inf, -math.inf, math.nan, None]),
        "metadata": st.none() | objects,
    },
)
span_filters = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.none() | texts for name in ("trace_id", "span_id", "parent_id", "name")},
        **{f"{name}_contains": st.none() | needles for name in ("trace_id", "span_id", "parent_id", "name")},
        "filter_logic": st.sampled_from(["and", "or"]),
    },
)
resources = st.dictionaries(
    texts,
    st.one_of(
        st.builds(lambda text: {"resource_type": "prompt_template", "template": text, "engine": "jinja"}, texts),
        st.builds(
            lambda text, more: {
                "resource_type": "llm", "endpoint": text, "model": text, "sampling_parameters": {"more": more},
            },
            texts,
            payloads,
        ),
    ),
    max_size=2,
)  # fmt: skip

STEPS: dict[str, st.SearchStrategy[Mapping[str, Any]]] = {
    "time": st.fixed_dictionaries({"seconds": st.sampled_from([0.0, 0.25, 1.0, 3.0, 20.0])}),
    "sweep": st.just({}),
    "enqueue_rollout": requests,
    "enqueue_many_rollouts": st.fixed_dictionaries({"requests": st.lists(requests, max_size=3)}),
    "start_rollout": st.builds(lambda one, two: {**one, "worker_id": two}, requests, maybe_workers | odd_workers),
    "dequeue_rollout": st.fixed_dictionaries({"worker_id": maybe_workers | odd_workers}),
    "dequeue_many_rollouts": st.fixed_dictionaries(
        {"limit": st.integers(-1, 4) | st.just(1001), "worker_id": maybe_workers}
    ),
    "start_attempt": st.fixed_dictionaries({"pick": picks, "worker_id": maybe_workers | odd_workers}),
    "update_rollout": st.fixed_dictionaries({"pick": picks, "changes": rollout_changes}),
    "update_attempt": st.fixed_dictionaries({"pick": picks, "which": whiches, "changes": attempt_changes}),
    "add_span": st.fixed_dictionaries({"spans": st.lists(spans, min_size=1, max_size=1)}),
    "add_many_spans": st.fixed_dictionaries({"spans": st.lists(spans, max_size=5)}),
    "import_spans": st.fixed_dictionaries(
        {"spans": st.lists(spans, max_size=6), "unnumbered": st.sets(st.integers(0, 6))}
    ),
    "add_otel_span": st.fixed_dictionaries(
        {"pick": picks, "which": whiches, "span": st.integers(1, 3), "number": st.none() | st.integers(-1, 9)}
    ),
    "get_many_span_sequence_ids": st.fixed_dictionaries({"picks": st.lists(picks, max_size=4)}),
    "query_rollouts": st.fixed_dictionaries(
        {},
        optional={
            "status_in": st.none() | st.lists(st.sampled_from(ROLLOUT_STATUSES), max_size=4),
            "rollout_id_in": st.none() | st.lists(picks, max_size=4),
            "rollout_id_contains": st.sampled_from([None, "", "ro-", "-", "zz", "a\x00b", "\x1a"]),
            "filter_logic": st.sampled_from(["and", "or"]),
            "page": pages("start_time", "start_time", "end_time", "mode", "status", "resources_id"),
        },
    ),
    "get_rollout_by_id": st.fixed_dictionaries({"pick": picks}),
    "get_latest_attempt": st.fixed_dictionaries({"pick": picks}),
    "query_attempts": st.fixed_dictionaries(
        {
            "pick": picks,
            "page": pages("sequence_id", "start_time", "end_time", "status", "worker_id", "last_heartbeat_time"),
        }
    ),
    "wait_for_rollouts": st.fixed_dictionaries({"picks": st.lists(picks, max_size=4)}),
    "query_spans": st.fixed_dictionaries(
        {
            "pick": picks,
            "which": st.none() | whiches,
            "filters": span_filters,
            "page": pages("sequence_id", "name", "parent_id", "span_id", "start_time", "end_time", "trace_id"),
        }
    ),
    "add_resources": st.fixed_dictionaries({"resources": resources}),
    "update_resources": st.fixed_dictionaries(
        {"resources_id": st.sampled_from(["mine", "yours", "\x1amine", "é", "a\x00b"]), "resources": resources}
    ),
    "get_resources_by_id": st.fixed_dictionaries({"resources_id": st.sampled_from(["mine", "\x1amine", "", "\x00"])}),
    "get_latest_resources": st.just({}),
    "query_resources": st.fixed_dictionaries(
        {},
        optional={
            "resources_id": st.sampled_from([None, "mine", "\x1amine"]),
            "resources_id_contains": st.sampled_from([None, "", "m", "\x1a", "%"]),
            "page": pages("version", "create_time", "update_time"),
        },
    ),
    "update_worker": st.fixed_dictionaries(
        {"worker_id": worker_ids | odd_workers}, optional={"heartbeat_stats": objects | st.none()}
    ),
    "get_worker_by_id": st.fixed_dictionaries({"worker_id": worker_ids | odd_workers}),
    "query_workers": st.fixed_dictionaries(
        {},
        optional={
            "status_in": st.none() | st.lists(st.sampled_from(["idle", "busy", "unknown"]), max_size=2),
            "worker_id_contains": st.none() | needles,
            "filter_logic": st.sampled_from(["and", "or"]),
            "page": pages("worker_id", "status", "last_busy_time", "last_idle_time", "last_dequeue_time"),
        },
    ),
}
OFTEN = ("enqueue_many_rollouts", "dequeue_many_rollouts", "start_rollout", "update_attempt", "import_spans", "time")


def _named(name: str) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), STEPS[name])


programs = st.lists(st.one_of(*map(_named, [*STEPS, *OFTEN, *OFTEN])), min_size=15, max_size=45)
"""Steps that are made one after the other."""

# What callers do at once is answered as if they had done it in order, as far as the order of different rows
# does not matter: claims are by different workers, updates of different rollouts or all of one.
BURSTS: dict[str, st.SearchStrategy[list[Step]]] = {
    "enqueue": st.lists(_named("enqueue_many_rollouts"), min_size=2, max_size=12),
    "claims": st.lists(
        st.tuples(
            st.just("dequeue_many_rollouts"),
            st.fixed_dictionaries({"limit": st.integers(0, 3), "worker_id": st.none() | worker_ids}),
        ),
        min_size=2,
        max_size=8,
        unique_by=lambda step: step[1]["worker_id"] or object(),
    ),
    "spans": st.lists(_named("add_many_spans") | _named("add_span"), min_size=2, max_size=10),
    "updates": st.lists(
        st.tuples(
            st.just("update_attempt"),
            st.fixed_dictionaries({"pick": picks, "which": whiches, "changes": attempt_changes}),
        ),
        min_size=2,
        max_size=8,
        unique_by=lambda step: step[1]["pick"],
    ),
    "updates of one": st.builds(
        lambda pick, steps: [("update_attempt", {"pick": pick, **step}) for step in steps],
        picks,
        st.lists(
            st.fixed_dictionaries({"which": whiches, "changes": attempt_changes}),
            min_size=2,
            max_size=8,
        ),
    ),
    "numbers": st.lists(_named("get_many_span_sequence_ids"), min_size=2, max_size=10),
    "beats": st.lists(_named("update_worker"), min_size=2, max_size=10),
}
bursts = st.lists(
    st.one_of(
        *(strategy.map(lambda steps: ("at once", steps)) for strategy in BURSTS.values()),
        _named("start_rollout"),
        _named("enqueue_many_rollouts"),
        _named("start_attempt"),
        _named("time"),
        _named("sweep"),
    ),
    min_size=6,
    max_size=20,
)
"""Steps, among them `at once` with the steps that are made so."""


def rollout_of(twins: Twins, pick: int) -> str:
    """The id of a rollout; past the end there are ids that no rollout has."""
    if pick < len(twins.rollouts):
        return twins.rollouts[pick]
    return ABSENT_IDS[(pick - len(twins.rollouts)) % len(ABSENT_IDS)]


def attempt_of(twins: Twins, rollout_id: str, which: int) -> str:
    """The id of one of a rollout's attempts, or none's, or `latest`."""
    attempts = twins.attempts.get(rollout_id, [])
    return "latest" if which == LATEST else attempts[-1 - which] if which < len(attempts) else "at-none"


def span_of(twins: Twins, draft: Mapping[str, Any]) -> Span:
    """A span, more often of an attempt that there is than not."""
    pick = draft["pick"]
    rollout_id = rollout_of(twins, pick % len(twins.rollouts) if pick < 7 and twins.rollouts else 0)
    which = draft["which"]
    attempts = twins.attempts.get(rollout_id, [])
    attempt_id = attempt_of(twins, rollout_id, which % len(attempts) if which < 4 and attempts else which)
    # What the protocol calls an identifier is bounded already where a span is made.
    rollout_id = rollout_id if len(rollout_id) < 500 and rollout_id.isprintable() else "ro-none"
    return make_span(rollout_id, attempt_id, draft["span_id"], draft["number"], **draft["values"])


def _request(values: Mapping[str, Any]) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(**values)


def _query_rollouts(twins: Twins, values: Mapping[str, Any]) -> Call:
    chosen = values.get("rollout_id_in")
    ids = {} if chosen is None else {"rollout_id_in": [rollout_of(twins, pick) for pick in chosen]}
    rest = {name: value for name, value in values.items() if name not in ("page", "rollout_id_in")}
    return Call("query_rollouts", rest | ids | values.get("page", {}))


def _query_spans(twins: Twins, values: Mapping[str, Any]) -> Call:
    rollout_id, which = rollout_of(twins, values["pick"]), values["which"]
    attempt_id = None if which is None else attempt_of(twins, rollout_id, which)
    return Call("query_spans", {**values["filters"], **values["page"]}, [rollout_id, attempt_id])


def _update_attempt(twins: Twins, values: Mapping[str, Any]) -> Call:
    rollout_id = rollout_of(twins, values["pick"])
    return Call("update_attempt", values["changes"], [rollout_id, attempt_of(twins, rollout_id, values["which"])])


def _add_otel_span(twins: Twins, values: Mapping[str, Any]) -> Call:
    rollout_id = rollout_of(twins, values["pick"] % max(1, len(twins.rollouts)))
    attempt_id = attempt_of(twins, rollout_id, values["which"])
    span = sdk_span(values["span"], attributes={"n": values["span"]})
    return Call("add_otel_span", {"sequence_id": values["number"]}, [rollout_id, attempt_id, span])


def _paged(method: str) -> Callable[[Twins, Mapping[str, Any]], Call]:
    def call(twins: Twins, values: Mapping[str, Any]) -> Call:
        rest = {name: value for name, value in values.items() if name != "page"}
        return Call(method, rest | values.get("page", {}))

    return call


def _of_rollout(method: str, *names: str) -> Callable[[Twins, Mapping[str, Any]], Call]:
    def call(twins: Twins, values: Mapping[str, Any]) -> Call:
        arguments: dict[str, Any] = {name: values[name] for name in names}
        return Call(
            method, arguments | values.get("changes", {}) | values.get("page", {}), [rollout_of(twins, values["pick"])]
        )

    return call


CALLS: dict[str, Callable[[Twins, Mapping[str, Any]], Call]] = {
    "enqueue_many_rollouts": lambda twins, values: Call(
        "enqueue_many_rollouts", {}, [[_request(request) for request in values["requests"]]]
    ),
    "start_attempt": _of_rollout("start_attempt", "worker_id"),
    "update_rollout": _of_rollout("update_rollout"),
    "update_attempt": _update_attempt,
    "add_span": lambda twins, values: Call("add_span", {}, [span_of(twins, values["spans"][0])]),
    "add_many_spans": lambda twins, values: Call(
        "add_many_spans", {}, [[span_of(twins, draft) for draft in values["spans"]]]
    ),
    "import_spans": lambda twins, values: Call(
        "import_spans",
        {"unnumbered": values["unnumbered"]},
        [[span_of(twins, draft) for draft in values["spans"]]],
    ),
    "add_otel_span": _add_otel_span,
    "get_many_span_sequence_ids": lambda twins, values: Call(
        "get_many_span_sequence_ids", {}, [[(rollout_of(twins, pick), "any") for pick in values["picks"]]]
    ),
    "query_rollouts": _query_rollouts,
    "get_rollout_by_id": _of_rollout("get_rollout_by_id"),
    "get_latest_attempt": _of_rollout("get_latest_attempt"),
    "query_attempts": _of_rollout("query_attempts"),
    "wait_for_rollouts": lambda twins, values: Call(
        "wait_for_rollouts", {"rollout_ids": [rollout_of(twins, pick) for pick in values["picks"]], "timeout": 0}
    ),
    "query_spans": _query_spans,
    "query_resources": _paged("query_resources"),
    "query_workers": _paged("query_workers"),
}


def call_of(twins: Twins, step: Step) -> Call:
    """A step as a call on the records that there are."""
    name, values = step
    made = CALLS.get(name)
    return Call(name, values) if made is None else made(twins, values)
