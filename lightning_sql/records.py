"""What the store keeps and exchanges, field for field as the protocol has it (CONTRACT.md section 2).

All times are float seconds since the epoch, all durations float seconds. Validation is lax about
scalars (`"2"` is an integer, `3` a float) and strict about everything a column could not hold:
identifiers are bounded and free of NUL and lone surrogates, scalar integers fit 64 bits, scalar
floats are not NaN. Payloads (`input`, `metadata`, attributes, ...) carry any JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, overload

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "ATTEMPT_ACTIVE",
    "IDENTIFIER_BYTES",
    "LLM",
    "ROLLOUT_ACTIVE",
    "ROLLOUT_FINISHED",
    "ROLLOUT_QUEUED",
    "UNSET",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "EnqueueRolloutRequest",
    "Event",
    "IdempotencyKey",
    "Link",
    "NamedResources",
    "OtelResource",
    "PaginatedResult",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "Span",
    "SpanContext",
    "TraceStatus",
    "Unset",
    "Worker",
    "WorkerStatus",
    "given",
    "unsigned_zero",
]

T = TypeVar("T")

IDENTIFIER_BYTES: Final = 512
"""Longest identifier, in bytes of UTF-8: three of them and a partition fit one index entry of PostgreSQL."""

SEQUENCE_LIMIT: Final = 2**62
"""A span's own sequence number stays below this, so that the counter it pushes up cannot run out."""

RolloutStatus: TypeAlias = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus: TypeAlias = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
RolloutMode: TypeAlias = Literal["train", "val", "test"]
WorkerStatus: TypeAlias = Literal["idle", "busy", "unknown"]
StatusCode: TypeAlias = Literal["UNSET", "OK", "ERROR"]

ROLLOUT_QUEUED: Final[frozenset[RolloutStatus]] = frozenset({"queuing", "requeuing"})
ROLLOUT_ACTIVE: Final[frozenset[RolloutStatus]] = frozenset({"preparing", "running"})
ROLLOUT_FINISHED: Final[frozenset[RolloutStatus]] = frozenset({"failed", "succeeded", "cancelled"})
ATTEMPT_ACTIVE: Final[frozenset[AttemptStatus]] = frozenset({"preparing", "running"})


class Unset(Enum):
    """The type of `UNSET`: an update leaves the field as it is, which None would not say."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset.UNSET


def given(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes of an update without those that are `UNSET`."""
    return {name: value for name, value in changes.items() if value is not UNSET}


def _check_identifier(value: str) -> str:
    if "\x00" in value:
        raise ValueError("an identifier cannot contain NUL")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("an identifier cannot contain lone surrogates") from None
    if size > IDENTIFIER_BYTES:
        raise ValueError(f"an identifier cannot be longer than {IDENTIFIER_BYTES} bytes")
    return value


def is_plain_identifier(value: Any) -> bool:
    """Whether something is an identifier for certain; of others only the check of `Identifier` can say."""
    return type(value) is str and len(value) <= IDENTIFIER_BYTES and value.isascii() and "\x00" not in value


def _check_seconds(value: float) -> float:
    if math.isnan(value):
        raise ValueError("NaN is not a time")
    return unsigned_zero(value)


def unsigned_zero(seconds: float) -> float:
    """The same time, but 0.0 for -0.0: not every database keeps that sign, and no time means anything by it."""
    return seconds + 0.0


Identifier = Annotated[str, AfterValidator(_check_identifier)]
Seconds = Annotated[float, AfterValidator(_check_seconds)]
Integer64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
SequenceNumber = Annotated[int, Field(ge=-(2**63), lt=SEQUENCE_LIMIT)]

Scalar: TypeAlias = str | bool | int | float
AttributeValue: TypeAlias = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
Attributes: TypeAlias = dict[str, AttributeValue]


class RolloutConfig(BaseModel):
    """Limits and retries of one rollout."""

    timeout_seconds: Seconds | None = None
    """Longest an attempt may take, counted from its start; None is no limit."""
    unresponsive_seconds: Seconds | None = None
    """Longest an attempt may stay without a heartbeat; None is no limit."""
    max_attempts: Annotated[int, Field(ge=1, le=2**63 - 1)] = 1
    """How many attempts the rollout may have, the first one included."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])
    """The attempt statuses after which the rollout is queued again."""


class Attempt(BaseModel):
    """One execution of a rollout. Its identity is (rollout_id, attempt_id)."""

    rollout_id: Identifier
    attempt_id: Identifier
    sequence_id: Integer64
    """1 for the first attempt of the rollout, then 2, 3, ... without gap."""
    start_time: Seconds
    end_time: Seconds | None = None
    status: AttemptStatus = "preparing"
    worker_id: Identifier | None = None
    last_heartbeat_time: Seconds | None = None
    metadata: dict[str, Any] | None = None


class Rollout(BaseModel):
    """One task for an agent, from its creation to its last attempt."""

    rollout_id: Identifier
    input: Any
    start_time: Seconds
    """When the rollout was created."""
    end_time: Seconds | None = None
    mode: RolloutMode | None = None
    resources_id: Identifier | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class AttemptedRollout(Rollout):
    """A rollout together with its latest attempt."""

    attempt: Attempt

    @model_validator(mode="after")
    def _attempt_is_of_this_rollout(self) -> Self:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError("the attempt belongs to another rollout")
        return self


class IdempotencyKey(NamedTuple):
    """Names a call that may be made again: once it took place, a repeat does nothing and gets the same records.

    Keys are kept a day, by partition. A claim that found nothing is not kept, so that its repeat may
    find something.
    """

    key: str
    """Made by the caller, a new one for each call that is no repeat; up to 512 bytes."""
    route: str = ""
    fingerprint: str = ""
    """What is called, and a digest of what it is given; a repeat must have the same."""


class EnqueueRolloutRequest(BaseModel):
    """What a caller says of a rollout that it enqueues."""

    input: Any
    mode: RolloutMode | None = None
    resources_id: Identifier | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class SpanContext(BaseModel):
    """Where a span stands in its trace. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: dict[str, str]


class TraceStatus(BaseModel):
    """The outcome that a span reports. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    status_code: StatusCode
    description: str | None = None


class Event(BaseModel):
    """Something that happened during a span. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    name: str
    attributes: Attributes
    timestamp: float | None = None


class Link(BaseModel):
    """A pointer from a span to another one. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(BaseModel):
    """What produced a span: a process, a host, a service."""

    attributes: Attributes
    schema_url: str


class Span(BaseModel):
    """One OpenTelemetry span of an attempt, identified by (rollout_id, attempt_id, span_id). Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    rollout_id: Identifier
    attempt_id: Identifier
    sequence_id: SequenceNumber
    """The span's place in its rollout; need not be unique."""
    trace_id: Identifier
    span_id: Identifier
    parent_id: Identifier | None
    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    start_time: Seconds | None
    end_time: Seconds | None
    context: SpanContext | None
    parent: SpanContext | None
    resource: OtelResource


class LLM(BaseModel):
    """A model endpoint that speaks the OpenAI API."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])

    def get_base_url(self) -> str:
        """The URL to give to an OpenAI client."""
        return self.endpoint


class ProxyLLM(BaseModel):
    """A model endpoint behind a proxy that tells attempts apart by the URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])

    def get_base_url(self, rollout_id: str | None, attempt_id: str | None) -> str:
        """The URL to give to an OpenAI client that works for one attempt; without ids, the bare endpoint.

        Raises:
            ValueError: only one of the two ids is given.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if rollout_id is None or attempt_id is None:
            raise ValueError("give both rollout_id and attempt_id, or neither")
        base = self.endpoint.rstrip("/")
        root, version = (base[: -len("/v1")], "/v1") if base.endswith("/v1") else (base, "")
        return f"{root}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """This endpoint, bound to one attempt."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


class PromptTemplate(BaseModel):
    """A prompt with holes, and the engine that fills them."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]


NamedResources: TypeAlias = dict[str, Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]]


class ResourcesUpdate(BaseModel):
    """One versioned set of named resources."""

    resources_id: Identifier
    create_time: Seconds
    update_time: Seconds
    """When it was last written; later writes of any resources have strictly later times."""
    version: Integer64
    """1 when created, then one more for each write."""
    resources: NamedResources


class Worker(BaseModel):
    """A runner process, as the store last heard of it."""

    worker_id: Identifier
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: Seconds | None = None
    last_dequeue_time: Seconds | None = None
    last_busy_time: Seconds | None = None
    last_idle_time: Seconds | None = None
    current_rollout_id: Identifier | None = None
    current_attempt_id: Identifier | None = None


class PaginatedResult(BaseModel, Generic[T]):
    """One page of a query; also a sequence over its items."""

    items: list[T]
    limit: int
    """As requested; -1 is unlimited."""
    offset: int
    total: int
    """How many records match, before paging."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        return iter(self.items)

    def __contains__(self, item: object) -> bool:
        return item in self.items
