"""What hypothesis draws: payloads, odd strings, the arguments of calls."""

import json
import string
from typing import Any

from hypothesis import strategies as st

from lightning_sql.records import IDENTIFIER_BYTES, Event, Link, RolloutConfig, Span, SpanContext, TraceStatus
from lightning_sql.testing.samples import ODD_STRINGS

ODD_CHARACTERS = "\x00\x1a\x1b\x7f\ud800\udfff\ufeff\u2028\U0001f600\\\"'%_é" + string.ascii_letters[:4] + "01n"

short_texts = st.one_of(
    st.text(ODD_CHARACTERS, max_size=6),
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from([text for text in ODD_STRINGS.values() if len(text) < 100]),
)
"""Strings with whatever Python allows in them, the difficult more often than by chance."""

long_integers = st.integers(10**399, 10**400 - 1) | st.integers(1 - 10**400, -(10**399))
"""Integers of 400 digits."""

integers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**40]),
    long_integers,
)
floats = st.one_of(st.floats(), st.sampled_from([-0.0, 1.0, 5e-324, 1e300, 0.1]))

payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, floats, short_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(short_texts, inner, max_size=4)),
    max_leaves=12,
)
"""Any JSON as Python has it."""

documents = st.dictionaries(short_texts, payloads, max_size=3)
"""Any JSON object as Python has it."""

_attribute_scalars: list[st.SearchStrategy[Any]] = [short_texts, st.booleans(), integers, floats]
attributes = st.dictionaries(
    short_texts,
    st.one_of(*_attribute_scalars, *(st.lists(one, max_size=3) for one in _attribute_scalars)),
    max_size=4,
)
"""What OpenTelemetry allows as attributes, and the integers and strings that only Python has."""


def has_surrogates(text: str) -> bool:
    """Whether a string cannot be written in UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def is_identifier(text: str) -> bool:
    """Whether a string may be an identifier (`lightning_sql.records.Identifier`)."""
    return not has_surrogates(text) and "\x00" not in text and len(text.encode()) <= IDENTIFIER_BYTES


identifiers = st.one_of(
    short_texts.filter(is_identifier),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20),
    st.sampled_from(["", "\x1a", "\x1as\x01", "%2F", "a/b", ".", "..", "x" * 512, "\U0001f600" * 128, "latest"]),
)
"""Whatever may be an identifier."""

times = st.one_of(
    st.none(),
    # Times are columns, and SQLite's have no minus zero.
    st.floats(allow_nan=False).map(lambda time: time + 0.0),
    st.sampled_from([0.0, -1e18, 253402300800.0, 1e18, float("inf"), float("-inf")]),
)
"""Times: any that a float can be, far out, before the epoch, never."""


def _more(model: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """What stands in a record beside its fields, which is kept."""
    names = short_texts.filter(lambda name: name not in model.model_fields and not has_surrogates(name))
    return st.dictionaries(names, payloads, max_size=1)


@st.composite
def _contexts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "trace_id": draw(short_texts),
        "span_id": draw(short_texts),
        "is_remote": draw(st.booleans()),
        "trace_state": draw(st.dictionaries(short_texts, short_texts, max_size=2)),
        **draw(_more(SpanContext)),
    }


@st.composite
def _events(draw: st.DrawFn) -> dict[str, Any]:
    timestamp = draw(st.none() | floats)
    return {"name": draw(short_texts), "attributes": draw(attributes), "timestamp": timestamp} | draw(_more(Event))


@st.composite
def _links(draw: st.DrawFn) -> dict[str, Any]:
    return {"context": draw(_contexts()), "attributes": draw(st.none() | attributes)} | draw(_more(Link))


@st.composite
def span_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Everything of a span but the ids of its rollout and attempt, as plain data, with much or little in it."""
    description = draw(st.none() | short_texts)
    status = {"status_code": draw(st.sampled_from(["UNSET", "OK", "ERROR"])), "description": description}
    return {
        "sequence_id": draw(st.sampled_from([0, 1, -1, 2**53 + 1, 2**62 - 1, -(2**63)])),
        "trace_id": draw(identifiers),
        "span_id": draw(identifiers),
        "parent_id": draw(st.none() | identifiers),
        "name": draw(short_texts),
        "status": status | draw(_more(TraceStatus)),
        "attributes": draw(attributes),
        "events": draw(st.lists(_events(), max_size=2)),
        "links": draw(st.lists(_links(), max_size=1)),
        "start_time": draw(times),
        "end_time": draw(times),
        "context": draw(st.none() | _contexts()),
        "parent": draw(st.none() | _contexts()),
        "resource": {"attributes": draw(attributes), "schema_url": draw(short_texts)},
        **draw(_more(Span)),
    }


@st.composite
def resources(draw: st.DrawFn) -> dict[str, Any]:
    """Named resources, as plain data."""
    kinds = st.sampled_from(["llm", "proxy_llm", "prompt_template"])
    named: dict[str, Any] = {}
    for name, kind in draw(st.dictionaries(short_texts, kinds, max_size=2)).items():
        if kind == "prompt_template":
            engine = draw(st.sampled_from(["jinja", "f-string", "poml"]))
            named[name] = {"resource_type": kind, "template": draw(short_texts), "engine": engine}
        else:
            named[name] = {
                "resource_type": kind,
                "endpoint": draw(short_texts),
                "model": draw(short_texts),
                "api_key": draw(st.none() | short_texts),
                "sampling_parameters": draw(documents),
            }
    return named


_json_numbers = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["-0", "-0.0", "0e0", "1E5", "1e+5", "1.50", "1e-400", "1e400", "-1e999", "NaN", "-Infinity"]),
    st.sampled_from(["9007199254740993", "18446744073709551616", "1.0", "1" * 400, "-" + "9" * 400, "1" * 4300]),
)


@st.composite
def _json_strings(draw: st.DrawFn) -> str:
    written: list[str] = []
    for character in draw(short_texts):
        # A lone surrogate can only be written as an escape.
        if has_surrogates(character) or draw(st.integers(0, 5)) == 0:
            units = character.encode("utf-16-be", "surrogatepass").hex()
            units = units.upper() if draw(st.booleans()) else units
            written += [f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4)]
        else:
            written.append(json.dumps(character, ensure_ascii=False)[1:-1])
    return f'"{"".join(written)}"'


_spaces = st.sampled_from(["", "", "", " ", "\r\n\t "])
_json_scalars = st.sampled_from(["null", "true", "false"]) | _json_numbers | _json_strings()
_json_names = st.sampled_from(['"a"', '"\\u0061"', '"b"', '""']) | _json_strings()


def json_objects(members: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts of JSON objects with these values, in which a name may stand more than once."""
    member = st.builds("{0}{1}:{0}{2}{0}".format, _spaces, _json_names, members)
    return st.lists(member, max_size=4).map(lambda texts: f"{{{','.join(texts)}}}")


json_texts = st.recursive(
    _json_scalars,
    lambda inner: st.lists(inner, max_size=3).map(lambda texts: f"[{', '.join(texts)}]") | json_objects(inner),
    max_leaves=8,
)
"""JSON as other programs write it: names twice, numbers and characters spelled in any way, space anywhere."""

json_attributes = json_objects(st.sampled_from(["true", "false"]) | _json_numbers | _json_strings())
"""Attributes of a span in such JSON."""

small_payloads = st.one_of(st.none(), st.integers(0, 3), st.dictionaries(st.sampled_from("ab"), st.booleans()))

limits = st.sampled_from([None, None, 0.5, 2.0, 10.0])
configs = st.builds(
    RolloutConfig,
    timeout_seconds=limits,
    unresponsive_seconds=limits,
    max_attempts=st.integers(1, 4),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), max_size=3),
).map(lambda config: config.model_dump())
"""The config of a rollout, as plain data."""

modes = st.sampled_from([None, "train", "val", "test"])
workers = st.sampled_from([None, None, "w1", "w2", "x"])


def requests() -> st.SearchStrategy[dict[str, Any]]:
    """What is said of a new rollout, as plain data."""
    return st.fixed_dictionaries(
        {"input": small_payloads},
        optional={
            "mode": modes,
            "resources_id": st.sampled_from([None, "mine"]),
            "config": configs,
            "metadata": st.dictionaries(st.sampled_from("xy"), st.integers(0, 2)),
        },
    )


def pages(*fields: str | None) -> st.SearchStrategy[dict[str, Any]]:
    """Sorting by one of these fields, and paging."""
    return st.fixed_dictionaries(
        {
            "sort_by": st.sampled_from(fields),
            "sort_order": st.sampled_from(["asc", "desc"]),
            "limit": st.sampled_from([-1, -1, 1, 2, 5]),
            "offset": st.integers(0, 3),
        }
    )
