"""What the agent of a task does: how long it sleeps, which spans it ends, and their bytes as OTLP.

The shape is that of the upstream project's published store benchmark, so that figures can stand beside its own: from
one to `max_rounds` rounds, in each of which two spans below a third sleep up to `sleep_seconds` and carry a nested
dictionary's worth of attributes, half of the rounds end in a reward, and a last span and a last reward follow. Nothing
is random: what a task's agent does follows from the task's number alone, so that both servers get the same, and a check
knows what must be there.
"""

from __future__ import annotations

import string
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from random import Random
from typing import Final, NamedTuple

ATTRIBUTE_SETS: Final = 64
"""How many different sets of attributes there are; a span takes one of them."""
TASK_ATTRIBUTE: Final = "task"
REWARD_ATTRIBUTE: Final = "agentlightning.reward.0.value"
REWARD_NAME: Final = "agentlightning.annotation"
LAST_REWARD: Final = (1.0, 2.0)
"""Between these is the last reward of a task, and no other."""
_LETTERS: Final = string.ascii_letters + string.digits
_STATUS: Final = b"\x7a\x00"  # unset
_INTERNAL: Final = b"\x30\x01"


class Step(NamedTuple):
    """A span that the agent ends.

    Attributes:
        name: not unique.
        sleep: seconds that the agent sleeps before it ends this span.
        attributes: which set it carries, None for none.
        task: whether it carries the task's name.
        reward: that it carries.
        parent: which of the steps it lies within; that one ends later.
    """

    name: str
    sleep: float = 0.0
    attributes: int | None = None
    task: bool = False
    reward: float | None = None
    parent: int | None = None


def steps_of(task: int, max_rounds: int, sleep_seconds: float) -> list[Step]:
    """What the agent of a task does, in order."""
    draw = Random(task)
    rounds = draw.randint(1, max_rounds)
    with_task = draw.randrange(rounds)
    steps: list[Step] = []

    def working(name: str, *, task: bool = False, parent: int | None = None) -> Step:
        return Step(name, draw.uniform(0.0, sleep_seconds), draw.randrange(ATTRIBUTE_SETS), task, parent=parent)

    for number in range(rounds):
        whole = len(steps) + 2
        steps.append(working(f"round {number}: think", task=number == with_task, parent=whole))
        steps.append(working(f"round {number}: act", parent=whole))
        steps.append(Step(f"round {number}"))
        if draw.random() < 0.5:
            steps.append(Step(REWARD_NAME, reward=draw.random()))
    steps.append(working("answer"))
    steps.append(Step(REWARD_NAME, reward=draw.uniform(*LAST_REWARD)))
    session = len(steps)
    within = [step if step.parent is not None else step._replace(parent=session) for step in steps]
    return [*within, Step("session")]


def mean_sleep(max_rounds: int, sleep_seconds: float) -> float:
    """Seconds that the agent of a task sleeps on average: half of `sleep_seconds` twice a round, and once more."""
    return (max_rounds + 2) * sleep_seconds / 2


def prepare() -> None:
    """Make now what would otherwise be made with the first span."""
    _attribute_sets()


@cache
def _attribute_sets() -> tuple[bytes, ...]:
    """The sets of attributes as OTLP, some 28 of them each and 5 KB on average: nested dictionaries, flattened."""
    draw = Random(5)

    def text(low: int, high: int) -> str:
        return "".join(draw.choices(_LETTERS, k=draw.randint(low, high)))

    def leaves(level: int, path: str) -> Iterator[bytes]:
        breadth = draw.randint(2, 6)
        deeper = draw.randint(level, 3) > level
        for _ in range(breadth):
            key = path + text(3, 20)
            if deeper:
                yield from leaves(level + 1, f"{key}.")
            else:
                yield _attribute(9, key, _text(1, text(5, 300)))

    return tuple(b"".join(leaves(1, "")) for _ in range(ATTRIBUTE_SETS))


def span_id(step: int) -> bytes:
    """The id of the span of a step, unique within its trace: 8 bytes."""
    return (step + 1).to_bytes(8, "big")


class Trace:
    """The exports of a task's agent.

    Args:
        task: its number.
        name: what stands in the attribute of the span that carries it.
    """

    def __init__(self, rollout_id: str, attempt_id: str, task: int, name: str) -> None:
        self._trace_id = _bytes(1, (task + 1).to_bytes(16, "big"))
        self._name = _attribute(9, TASK_ATTRIBUTE, _text(1, name))
        self._resource = _bytes(
            1,
            b"".join(
                _attribute(1, key, _text(1, value))
                for key, value in (
                    ("telemetry.sdk.language", "python"),
                    ("telemetry.sdk.name", "opentelemetry"),
                    ("telemetry.sdk.version", "1.45.2"),
                    ("service.name", "unknown_service"),
                    ("agentlightning.rollout_id", rollout_id),
                    ("agentlightning.attempt_id", attempt_id),
                )
            ),
        )

    def span(self, number: int, step: Step, started: float, ended: float) -> bytes:
        """The span of a step, for `export`.

        Args:
            number: of the step.
            started: seconds since the epoch.
            ended: likewise.
        """
        parts = [self._trace_id, _bytes(2, span_id(number))]
        if step.parent is not None:
            parts.append(_bytes(4, span_id(step.parent)))
        parts += [_text(5, step.name), _INTERNAL, struct.pack("<BQ", 0x39, int(started * 1e9))]
        parts.append(struct.pack("<BQ", 0x41, int(ended * 1e9)))
        if step.attributes is not None:
            parts.append(_attribute_sets()[step.attributes])
        if step.task:
            parts.append(self._name)
        if step.reward is not None:
            parts.append(_attribute(9, "agentlightning.reward.0.name", _text(1, "primary")))
            parts.append(_attribute(9, REWARD_ATTRIBUTE, struct.pack("<Bd", 0x21, step.reward)))
        parts.append(_STATUS)
        return _bytes(2, b"".join(parts))

    def export(self, spans: Iterable[bytes]) -> bytes:
        """The `ExportTraceServiceRequest` of some spans."""
        scope_spans = _bytes(2, b"".join((_SCOPE, *spans)))
        return _bytes(1, self._resource + scope_spans)


def _bytes(field: int, value: bytes) -> bytes:
    """A length-delimited field of protobuf's wire format; numbers above 15 do not occur."""
    length, head = len(value), bytearray((field << 3 | 2,))
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(field: int, key: str, value: bytes) -> bytes:
    """A `KeyValue` whose `AnyValue` is what is given."""
    return _bytes(field, _text(1, key) + _bytes(2, value))


_SCOPE: Final = _bytes(1, _text(1, "bench"))
