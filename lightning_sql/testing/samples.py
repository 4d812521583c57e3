"""Values that storage is tried with: an item type with every kind of field, payloads that are hard to keep, records."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from pydantic import BaseModel, ConfigDict

from lightning_sql.records import OtelResource, Span, TraceStatus

__all__ = [
    "NESTING",
    "ODD_PAYLOADS",
    "ODD_STRINGS",
    "SAMPLE_KEYS",
    "Plain",
    "Sample",
    "assert_same",
    "make_span",
    "nested",
    "sample",
    "sdk_span",
]

NESTING: Final = 400
"""How deep a payload is nested to show that depth alone does not break anything."""


class Sample(BaseModel):
    """An item with a key of two fields, one column of every kind, nullable, and room for more."""

    model_config = ConfigDict(extra="allow")

    group: str
    number: int
    name: str | None = None
    count: int | None = None
    score: float | None = None
    seen_time: float | None = None
    flag: bool | None = None
    tags: list[Any] | None = None
    data: Any = None


SAMPLE_KEYS: Final = ("group", "number")


class Plain(BaseModel):
    """An item with a single key and nothing to spare."""

    key: str
    value: Any = None


def sample(number: int, group: str = "g", **fields: Any) -> Sample:
    """An item of `Sample` with the key (group, number)."""
    return Sample(group=group, number=number, **fields)


def nested(depth: int, leaf: Any = "leaf") -> Any:
    """A value inside `depth` lists and objects in turn."""
    value = leaf
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


ODD_STRINGS: Final[dict[str, str]] = {
    "empty": "",
    "nul": "a\x00b",
    "nul alone": "\x00",
    "high surrogate": "\ud800",
    "low surrogate": "x\udfffy",
    "surrogates the wrong way round": "\udc00\ud800",
    "astral": "\U0001f600\U0010ffff",
    "substitute": "\x1a",
    "substitute first": "\x1aabc",
    "substitute twice": "\x1a\x1a",
    "substitute that looks like an escape": "\x1anan",
    "substitute before nul": "\x1as\x00",
    "substitute within": "a\x1ab",
    "control characters": "".join(map(chr, range(1, 32))) + "\x7f",
    "line separators": "a\u2028b\u2029c\u0085d\ufeff",
    "quotes": "'\"`\\%_?:name$1{}",
    "escape sequences": "\\u0000 \\x00 \\ud800 %00 &#0;",
    "not normalised": "e\u0301 \u00e9 \ufb01",
    "noncharacters": "\uffff\ufffe\ufdd0",
    "looks like json": '{"a": [1, null]}',
    "a megabyte": "0123456789abcde\n" * 65536,
}
"""Strings that some layer between Python and a column could lose or change, by what is odd about them."""

ODD_PAYLOADS: Final[dict[str, Any]] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "text": "text",
    "empty list": [],
    "empty object": {},
    "not a number": math.nan,
    "infinity": math.inf,
    "minus infinity": [-math.inf, {"deep": -math.inf}],
    "minus zero": -0.0,
    "floats beside ints": [1, 1.0, True, 0, 0.0, False, -1.0],
    "extreme floats": [1e308, 5e-324, 2.2250738585072014e-308, 0.1, 1 / 3, 1e22, 1e23, 123456789.12345679, 1e300],
    "integers past 64 bits": [2**63 - 1, -(2**63), 2**63, 2**64, 10**40, -(10**40), 2**53 + 1],
    "key order": {"b": 1, "a": 2, "": 3, "10": 4, "9": 5},
    "nested key order": [{"z": {"y": 1, "x": 2}, "a": None}],
    "deep": nested(NESTING),
    "odd strings": dict(ODD_STRINGS),
    "odd keys": {value: name for name, value in ODD_STRINGS.items()},
    "nul in a nested key": {"list": [{"a\x00": {"\ud800": math.nan}}]},
    "names that storage may use itself": {"$": 1, "__type__": "x", "\x1a": {"\x1a": "\x1a"}, "NaN": "NaN", "nan": 1},
    "wide": list(range(3000)),
    **{f"string: {name}": value for name, value in ODD_STRINGS.items()},
}
"""JSON values, taken as widely as Python's `json` does, that must come back as they went in."""


def _bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack(">d", value)


def assert_same(actual: Any, expected: Any) -> None:
    """Fail unless two values are the same to the last bit: types, key order, signs of zero, NaN.

    Works on JSON values and on pydantic models, without recursion, so that depth does not matter.
    """
    pending: list[tuple[Any, Any, str]] = [(actual, expected, "")]
    while pending:
        got, want, path = pending.pop()
        assert type(got) is type(want), f"{path or 'value'}: {type(got).__name__} instead of {type(want).__name__}"
        if isinstance(want, BaseModel):
            fields = [name for name, _ in want]
            assert [name for name, _ in got] == fields, f"{path}: other fields"
            pending += [(getattr(got, name), getattr(want, name), f"{path}.{name!r:.40}") for name in fields]
        elif isinstance(want, Mapping):
            wanted = cast(Mapping[str, Any], want)
            assert list(got) == list(wanted), f"{path or 'value'}: other keys"
            pending += [(got[key], wanted[key], f"{path}[{key!r:.40}]") for key in wanted]
        elif isinstance(want, list | tuple):
            elements = cast(Sequence[Any], want)
            assert len(got) == len(elements), f"{path or 'value'}: {len(got)} elements instead of {len(elements)}"
            pending += [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(got, elements, strict=True))]
        elif isinstance(want, float):
            assert _bits(got) == _bits(want), f"{path or 'value'}: {got!r} instead of {want!r}"
        else:
            assert got == want, f"{path or 'value'}: {got!r:.80} instead of {want!r:.80}"


def make_span(rollout_id: str, attempt_id: str, span_id: str, sequence_id: int = 1, **fields: Any) -> Span:
    """A span of an attempt with nothing remarkable but what `fields` say."""
    values: dict[str, Any] = {
        "trace_id": "0" * 31 + "1",
        "parent_id": None,
        "name": f"span {span_id}",
        "status": TraceStatus(status_code="OK"),
        "attributes": {},
        "events": [],
        "links": [],
        "start_time": 1.0,
        "end_time": 2.0,
        "context": None,
        "parent": None,
        "resource": OtelResource(attributes={}, schema_url=""),
    }
    return Span(
        rollout_id=rollout_id, attempt_id=attempt_id, span_id=span_id, sequence_id=sequence_id, **(values | fields)
    )


def sdk_span(
    span_id: int,
    *,
    attributes: Mapping[str, Any] | None = None,
    parent: int | None = None,
    events: Sequence[Any] = (),
    links: Sequence[Any] = (),
) -> Any:
    """What the OpenTelemetry SDK hands out when a span ends, as far as a store reads it; times are nanoseconds."""

    def context(number: int) -> SimpleNamespace:
        return SimpleNamespace(trace_id=0xABC, span_id=number, is_remote=False, trace_state={"vendor": "state"})

    return SimpleNamespace(
        name="work",
        context=context(span_id),
        parent=None if parent is None else context(parent),
        status=SimpleNamespace(status_code=SimpleNamespace(name="ERROR"), description="broken"),
        attributes=attributes,
        events=list(events),
        links=[SimpleNamespace(context=context(number), attributes=None) for number in links],
        start_time=1_500_000_000,
        end_time=2_500_000_000,
        resource=SimpleNamespace(attributes={"service.name": "agent"}, schema_url="https://schema.example/1"),
    )
