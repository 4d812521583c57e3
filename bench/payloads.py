"""What is sent: the same input, spans and names for every server, driver and reference."""

from __future__ import annotations

import json
from typing import Any, Final

SPAN_BYTES: Final = 1200
"""About how long a span is as JSON in a request."""
LARGE_SPAN_BYTES: Final = 1450

_INPUT: Final = {"task": "Answer the question with the tools at hand. " * 4, "level": 3, "tools": ["search", "python"]}
_PROMPT: Final = "The assistant reads the question, looks for what it needs, and answers in one sentence. "

ROLLOUT_MARK: Final = "\u2401rollout"
ATTEMPT_MARK: Final = "\u2401attempt"
NUMBER_MARK: Final = "\u2401number"
NAME_MARK: Final = "\u2401name"


def rollout_input() -> dict[str, Any]:
    """The input of every rollout, about 250 bytes of JSON."""
    return dict(_INPUT)


def enqueue_body(count: int) -> dict[str, Any]:
    """What upstream's client sends to enqueue so many rollouts."""
    one = {"input": rollout_input(), "mode": None, "resources_id": None, "config": None, "metadata": None}
    return {"rollouts": [one] * count}


def span_name(number: int) -> str:
    """The id of a span; distinct within its attempt."""
    return f"{number:016x}"


def span(rollout_id: str, attempt_id: str, number: int, size: int = SPAN_BYTES) -> dict[str, Any]:
    """A span as upstream's client sends it, all fields there, of about so many bytes as JSON."""
    fields = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": number,
        "trace_id": "5b8aa5a2d2c872e8321cf37308d69df2",
        "span_id": span_name(number),
        "parent_id": None,
        "name": "openai.chat.completion",
        "status": {"status_code": "OK", "description": None},
        "attributes": {
            "gen_ai.request.model": "policy-7b",
            "gen_ai.usage.prompt_tokens": 412,
            "gen_ai.usage.completion_tokens": 96,
            "gen_ai.request.temperature": 0.7,
            "gen_ai.prompt": "",
        },
        "events": [],
        "links": [],
        "start_time": 1_700_000_000.125,
        "end_time": 1_700_000_001.5,
        "context": None,
        "parent": None,
        "resource": {"attributes": {"service.name": "runner", "service.version": "1.0"}, "schema_url": ""},
    }
    missing = max(size - len(json.dumps(fields)), 0)
    fields["attributes"]["gen_ai.prompt"] = (_PROMPT * (missing // len(_PROMPT) + 1))[:missing]
    return fields


def span_template(size: int = SPAN_BYTES) -> tuple[bytes, ...]:
    """A span's JSON with what differs between spans cut out: its two ids, its number and its own id, in this order.

    A driver that has these prepared sends the bytes of any span without encoding anything.
    """
    cut = {"rollout_id": ROLLOUT_MARK, "attempt_id": ATTEMPT_MARK, "sequence_id": NUMBER_MARK, "span_id": NAME_MARK}
    fields = span("ro-000000000000", "at-00000000", 0, size) | cut
    text = json.dumps(fields, ensure_ascii=False)
    marks = (ROLLOUT_MARK, ATTEMPT_MARK, f'"{NUMBER_MARK}"', NAME_MARK)
    parts: list[bytes] = []
    for mark in marks:
        before, _, text = text.partition(mark)
        parts.append(before.encode())
    return (*parts, text.encode())
