"""Request bodies as clients write them, and nearly so."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.properties.strategies import payloads, short_texts

CONTEXT = {"trace_id": "t", "span_id": "s", "is_remote": False, "trace_state": {"a": "b"}}

SPAN = {
    "rollout_id": "r",
    "attempt_id": "a",
    "sequence_id": 1,
    "trace_id": "0" * 32,
    "span_id": "0" * 16,
    "parent_id": None,
    "name": "n",
    "status": {"status_code": "OK", "description": None},
    "attributes": {"int": 1, "float": 1.0, "bool": True, "text": "x", "list": [1.5, 2.0], "empty": [], "words": ["a"]},
    "events": [{"name": "e", "attributes": {"n": [1, 2]}, "timestamp": 1.5}],
    "links": [{"context": CONTEXT, "attributes": None}, {"context": CONTEXT, "attributes": {"k": 1}}],
    "start_time": 1.5,
    "end_time": None,
    "context": CONTEXT,
    "parent": None,
    "resource": {"attributes": {"service.name": "x"}, "schema_url": ""},
}
ROLLOUT = {
    "input": {"task": [1, 2.5, "x"]},
    "mode": "train",
    "resources_id": "rs",
    "config": {"timeout_seconds": 3, "unresponsive_seconds": None, "max_attempts": 2, "retry_condition": ["failed"]},
    "metadata": {"a": {"b": None}},
}
UPDATE = {"status": "failed", "worker_id": "w", "last_heartbeat_time": 12.5, "metadata": {"a": 1}}

ODD_VALUES = [
    *[None, True, False, 0, 1, -1, 1.0, 1.5, "", "2", "x", "true", [], {}, [1], [None], {"a": 1}, "x" * 200, "é" * 300],
    *[2**53 + 1, 2**62, 2**63, -(2**63), -(2**63) - 1, 10**40, -0.0, 1e300, math.nan, math.inf, -math.inf],
    *[[1, 1.0], [True, 1], ["a", 1], [1, None], [[1]], [{}], "OK", "UNSET", "ERROR", "failed", "running", "train"],
    *["\x00", "\x1a", "a\x1ab", "\ud800", "\U0001f600", "\x1aNaN", "\\u0000", "\\u001a"],
    *[{"status_code": "OK"}, {"status_code": "OK", "description": "d", "more": 1}, {"max_attempts": "3"}],
    *[[{"name": "e", "attributes": {}}], [{"name": "e", "attributes": {}, "timestamp": 1}], [{"context": CONTEXT}]],
    *[{"attributes": {}, "schema_url": "", "more": 1}, CONTEXT | {"is_remote": "yes"}, CONTEXT | {"more": 1}],
]
odd_values = st.sampled_from(ODD_VALUES) | payloads


def places(value: Any) -> list[list[Any]]:
    """Every place in a document, as a path."""
    found: list[list[Any]] = [[]]
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        found += [[step, *path] for path in places(inner)]
    return found


def changed(document: Any, path: list[Any], change: Callable[[Any, Any], None]) -> Any:
    """A copy of a document with a change made at a place other than its root."""
    copied = copy.deepcopy(document)
    parent = copied
    for step in path[:-1]:
        parent = parent[step]
    change(parent, path[-1])
    return copied


@st.composite
def bodies(draw: st.DrawFn, template: Any) -> bytes:
    """JSON texts of, or nearly of, the form of a document."""
    document = template
    for _ in range(draw(st.integers(0, 2))):
        at = [path for path in places(document) if path]
        if not at:
            break
        path = draw(st.sampled_from(at))
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                value = draw(odd_values)
                document = changed(document, path, lambda parent, step, value=value: parent.__setitem__(step, value))
            case "remove":
                document = changed(document, path, lambda parent, step: parent.__delitem__(step))
            case _:
                name, value = draw(short_texts), draw(odd_values)

                def add(parent: Any, step: Any, name: str = name, value: Any = value) -> None:
                    parent.append(value) if isinstance(parent, list) else parent.__setitem__(name, value)

                document = changed(document, path, add)
    if draw(st.booleans()) and isinstance(document, dict):
        document = dict(draw(st.permutations(list(document.items()))))
    try:
        body = json.dumps(
            document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 1]))
        ).encode()
    except UnicodeEncodeError:
        body = json.dumps(document).encode()
    if draw(st.integers(0, 5)) == 0:
        at_byte = draw(st.integers(0, len(body)))
        more = draw(st.sampled_from([b"", b"\xff", b"\x00", b"\x1a", b"\\", b'"', b",", b"1", b"-0", b" ", b"\\u0000"]))
        body = body[:at_byte] + more + body[at_byte + draw(st.integers(0, 2)) :]
    return body
