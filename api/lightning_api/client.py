"""The store of a running service, over HTTP."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast

from typing_extensions import override

from lightning_api.client_claims import OpenClaims
from lightning_api.client_reads import ClientReads, is_segment, segment
from lightning_api.client_spans import SpanBatches, Unsent, take_batch
from lightning_api.client_transport import encoded
from lightning_sql.errors import (
    ConfigurationError,
    IdempotencyKeyReusedError,
    InvalidRequestError,
    LightningError,
    RecordNotFoundError,
    UnstorableValueError,
)
from lightning_sql.loops import PerLoop
from lightning_sql.records import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    IdempotencyKey,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
    Unset,
    Worker,
    given,
)
from lightning_sql.store.interface import SpanReceipt, check_import
from lightning_sql.store.transaction import LATEST

__all__ = ["LightningClient"]

_WAIT_AT_ONCE: Final = 30.0
"""How many seconds one request waits for something in the queue: others on the way may cut longer ones off."""
_POLL_SECONDS: Final = 0.2
"""How often the queue is looked into where the service does not wait."""
_WORKED_ON: Final = frozenset({"preparing", "running"})


def _key_text(key: IdempotencyKey | None) -> str:
    """What names a call in a header: the caller's key, or a new one.

    Raises:
        InvalidRequestError: no header can carry it.
    """
    if key is None:
        return uuid.uuid4().hex
    if not (key.key.isascii() and key.key.isprintable() and key.key.strip() == key.key and key.key):
        raise InvalidRequestError("an idempotency key must be printable ASCII to be sent")
    return key.key


def _numbered(span: Span, number: int) -> Span:
    return span if span.sequence_id == number else span.model_copy(update={"sequence_id": number})


def _text(span: Span) -> str:
    return json.dumps(span.model_dump(), sort_keys=True)


class LightningClient(ClientReads):
    """A store that asks a lightning-sql service (or another server of the protocol) for everything.

    Every call is made again while the service cannot be reached or says that it is not available. Calls
    that create or claim carry an idempotency key, so that they take place once; the others may be
    done twice without harm. (A server of the protocol that knows no keys may do the first kind twice.)
    A claim whose answer never came is asked for again by the next call that claims the same for the
    same worker. It may be used from any number of event loops and threads at once; each loop has
    connections of its own, which are closed with it. Spans that are added while others are on their way
    go together in the next request.

    What the protocol has no words for:
    - `add_many_spans` is not all or nothing: when an attempt turns out not to exist, the other spans are
      stored already.
    - Of spans without a number whose first answer was lost, `import_spans` says that they are duplicates.
    - of a key that it is given, `route` and `fingerprint` are the service's affair.
    - `sweep` can only trigger the scan that a read begins with, at most one in the service's debounce
      time, and answers 0.
    - an id that is empty or contains `/` can be asked for, but not written under.

    Args:
        base_url: `http://host:port`, without `/v1`.
        token: the bearer token, if the service asks for one.
        request_seconds: longest time for one request; a wait may take longer. A server may wait 40 of them for its
            database.
        connect_seconds: longest time for connecting.
        retry_seconds: how long a call is made again after it failed; a service may be away for a minute.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        request_seconds: float = 60.0,
        connect_seconds: float = 5.0,
        retry_seconds: float = 90.0,
    ) -> None:
        super().__init__(
            base_url,
            token=token,
            request_seconds=request_seconds,
            connect_seconds=connect_seconds,
            retry_seconds=retry_seconds,
        )
        self._open_claims = OpenClaims()
        self._takes_many = True
        """Whether the service takes many spans in one request, as far as is known."""
        self._batches = self._new_batches()

    def _new_batches(self) -> PerLoop[SpanBatches]:
        return PerLoop(lambda: SpanBatches(self._add_together))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_batches"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._batches = self._new_batches()

    @override
    async def sweep(self) -> int:
        await self.query_workers(limit=1)
        return 0

    @override
    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> AttemptedRollout:
        request = {
            "input": input,
            "mode": mode,
            "resources_id": resources_id,
            "config": config,
            "metadata": metadata,
            "worker_id": worker_id,
        }
        started = await self._transport.write("/v1/agl/rollouts", request, key=_key_text(idempotency_key))
        return AttemptedRollout.model_validate(started)

    @override
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        [rollout] = await self.enqueue_many_rollouts([request], idempotency_key=idempotency_key)
        return rollout

    @override
    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: IdempotencyKey | None = None
    ) -> Sequence[Rollout]:
        if not rollouts:
            return []
        request = {"rollouts": list(rollouts)}
        key = _key_text(idempotency_key)
        created = await self._transport.write("/v1/agl/queues/rollouts/enqueue", request, key=key)
        return [Rollout.model_validate(value) for value in created]

    @override
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, wait: float = 0.0, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(worker_id=worker_id, wait=wait, idempotency_key=idempotency_key)
        return claimed[0] if claimed else None

    @override
    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float = 0.0,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            return []
        clock = asyncio.get_running_loop().time
        deadline = clock() + max(wait, 0.0)
        while True:
            begun = clock()
            asked = min(max(deadline - begun, 0.0), _WAIT_AT_ONCE)
            claimed = await self._claim_once(limit, worker_id, asked, idempotency_key)
            if claimed or clock() >= deadline:
                return claimed
            if clock() < begun + asked:
                # A service that is stopping, or one that does not know of waiting.
                await asyncio.sleep(min(_POLL_SECONDS, deadline - clock()))

    async def _claim_once(
        self, limit: int, worker_id: str | None, wait: float, idempotency_key: IdempotencyKey | None
    ) -> Sequence[AttemptedRollout]:
        if idempotency_key is not None:
            claimed, _ = await self._claim(limit, worker_id, wait, _key_text(idempotency_key))
            return claimed
        # First under the keys of claims whose answers never came.
        while True:
            earlier = self._open_claims.take(limit, worker_id)
            key = earlier or _key_text(None)
            try:
                claimed, repeated = await self._claim(limit, worker_id, wait, key)
            except IdempotencyKeyReusedError:
                if earlier is None:
                    raise
                continue  # a service to which a claim that waits for less long is another one
            except (ConfigurationError, InvalidRequestError, RecordNotFoundError, UnstorableValueError):
                raise  # it did not take place
            except BaseException:
                # Cancelled or failed: it may have taken place, or may still do so.
                self._open_claims.put(limit, worker_id, key)
                raise
            if not claimed:
                if repeated or earlier:
                    self._open_claims.put(limit, worker_id, key)  # an earlier try may still be on its way
                return claimed
            if not (earlier or repeated):
                return claimed
            # Its answer comes late: what the watchdog ended meanwhile is nobody's to work on.
            alive = [rollout for rollout in claimed if rollout.attempt.status in _WORKED_ON]
            if alive:
                return alive

    async def _claim(
        self, limit: int, worker_id: str | None, wait: float, key: str
    ) -> tuple[list[AttemptedRollout], bool]:
        request: dict[str, Any] = {"limit": limit, "worker_id": worker_id}
        if wait:
            request["wait"] = wait
        path = "/v1/agl/queues/rollouts/dequeue"
        claimed, repeated = await self._transport.write_again(path, request, key=key, extra_seconds=wait)
        return [AttemptedRollout.model_validate(value) for value in claimed], repeated

    @override
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, idempotency_key: IdempotencyKey | None = None
    ) -> AttemptedRollout:
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}/attempts"
        started = await self._transport.write(path, {"worker_id": worker_id}, key=_key_text(idempotency_key))
        return AttemptedRollout.model_validate(started)

    def _existing(self, identifier: str) -> str:
        """An id that the service made, as a segment of a path."""
        if not is_segment(identifier):
            raise RecordNotFoundError(f"there is nothing with the id {identifier!r:.200}")
        return segment(identifier)

    @override
    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: RolloutMode | None | Unset = UNSET,
        resources_id: str | None | Unset = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | None | Unset = UNSET,
        *,
        idempotency_key: IdempotencyKey | None = None,
    ) -> Rollout:
        changes = given(
            {
                "input": input,
                "mode": mode,
                "resources_id": resources_id,
                "status": status,
                "config": config,
                "metadata": metadata,
            }
        )
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}"
        return Rollout.model_validate(await self._transport.write(path, changes, key=_key_text(idempotency_key)))

    @override
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        changes = given(
            {
                "status": status,
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": metadata,
            }
        )
        path = f"/v1/agl/rollouts/{self._existing(rollout_id)}/attempts/{self._existing(attempt_id)}"
        # The second time, the latest attempt may be another one.
        changed, _ = await self._transport.write_again(path, changes, repeatable=attempt_id != LATEST)
        return Attempt.model_validate(changed)

    @override
    async def add_span(self, span: Span) -> Span | None:
        # Written first, so that what cannot be is the error of this call only.
        return await self._batches.here().add(Unsent(span, encoded(span)))

    async def _add_alone(self, unsent: Unsent) -> Span | None:
        span, body = unsent
        stored, repeated = await self._transport.write_again("/v1/agl/spans", body)
        if stored is None and repeated and await self._is_stored(span, equal=True):
            return span  # by the try whose answer was lost
        return None if stored is None else span

    async def _add_together(self, batch: Sequence[Unsent]) -> list[Span | LightningError | None]:
        """What `add_span` gives or raises for each."""
        if len(batch) > 1 and self._takes_many:
            request = b'{"spans":[%b]}' % b",".join(unsent.body for unsent in batch)
            try:
                answer = await self._transport.write("/v1/lightning/spans", request, key=_key_text(None))
            except RecordNotFoundError:  # another server of the protocol, which does not have this
                self._takes_many = False
            except UnstorableValueError:  # too large together
                pass
            else:
                given = list(zip(batch, answer["results"], strict=True))
                # Alone, what is wrong with a span has a name.
                return [
                    await self._outcome(unsent)
                    if result["status"] == "rejected"
                    else (unsent.span if result["status"] == "stored" else None)
                    for unsent, result in given
                ]
        return [await self._outcome(unsent) for unsent in batch]

    async def _outcome(self, unsent: Unsent) -> Span | LightningError | None:
        try:
            return await self._add_alone(unsent)
        except LightningError as error:
            return error

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        stored: list[Span] = []
        unsent = [Unsent(span, encoded(span)) for span in spans]
        while unsent:
            for outcome in await self._add_together(take_batch(unsent)):
                if isinstance(outcome, LightningError):
                    raise outcome
                if outcome is not None:
                    stored.append(outcome)
        return stored

    @override
    async def import_spans(
        self,
        spans: Sequence[Span],
        *,
        unnumbered: AbstractSet[int] = frozenset(),
        idempotency_key: IdempotencyKey | None = None,
    ) -> SpanReceipt:
        check_import(unnumbered, idempotency_key)
        if not spans:
            return SpanReceipt([], 0, [])
        request: dict[str, Any] = {"spans": list(spans)}
        key = None
        if unnumbered:
            # A repeat finds them stored, and gives out no other numbers.
            request["unnumbered"] = sorted(place for place in unnumbered if 0 <= place < len(spans))
        else:
            key = _key_text(idempotency_key)
        try:
            answer = await self._transport.write("/v1/lightning/spans", request, key=key)
        except RecordNotFoundError:  # another server of the protocol, which does not have this
            return await self._import_each(spans, unnumbered)
        results = list(zip(spans, answer["results"], strict=True))
        return SpanReceipt(
            [_numbered(span, result["sequence_id"]) for span, result in results if result["status"] == "stored"],
            sum(result["status"] == "duplicate" for _, result in results),
            [span for span, result in results if result["status"] == "rejected"],
        )

    async def _import_each(self, spans: Sequence[Span], unnumbered: AbstractSet[int]) -> SpanReceipt:
        """As `import_spans`, with a request for each span."""
        stored: list[Span] = []
        rejected: list[Span] = []
        attempts = await self._attempts_of([spans[index] for index in sorted(unnumbered)])
        for index, offered in enumerate(spans):
            span = offered
            if index in unnumbered:
                # Looked at first, so that a span that is not stored does not use up a number.
                if (span.rollout_id, span.attempt_id) not in attempts:
                    rejected.append(span)
                    continue
                if await self._is_stored(span):
                    continue
                number = await self.get_next_span_sequence_id(span.rollout_id, span.attempt_id)
                span = span.model_copy(update={"sequence_id": number})
            try:
                answer = await self.add_span(span)
            except RecordNotFoundError:
                rejected.append(offered)
                continue
            if answer is not None:
                stored.append(answer)
        return SpanReceipt(stored, len(spans) - len(stored) - len(rejected), rejected)

    async def _attempts_of(self, spans: Sequence[Span]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for rollout_id in dict.fromkeys(span.rollout_id for span in spans if is_segment(span.rollout_id)):
            found.update((rollout_id, attempt.attempt_id) for attempt in await self.query_attempts(rollout_id))
        return found

    async def _is_stored(self, span: Span, *, equal: bool = False) -> bool:
        found = await self.query_spans(span.rollout_id, span.attempt_id, span_id=span.span_id, limit=1)
        return found.total > 0 and (not equal or _text(found.items[0]) == _text(span))

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        request = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        return cast(int, (await self._transport.write("/v1/agl/spans/next", request))["sequence_id"])

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return [await self.get_next_span_sequence_id(*pair) for pair in rollout_attempt_ids]

    @override
    async def add_resources(
        self, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        added = await self._transport.write("/v1/agl/resources", resources, key=_key_text(idempotency_key))
        return ResourcesUpdate.model_validate(added)

    @override
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, idempotency_key: IdempotencyKey | None = None
    ) -> ResourcesUpdate:
        path = f"/v1/agl/resources/{segment(resources_id)}"
        updated = await self._transport.write(path, resources, key=_key_text(idempotency_key))
        return ResourcesUpdate.model_validate(updated)

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        if heartbeat_stats is None:  # pyright: ignore[reportUnnecessaryComparison] - callers need not be typed
            raise TypeError("heartbeat_stats cannot be null")
        if worker_id == "search":
            raise InvalidRequestError("the protocol cannot write a worker of the name 'search'")
        path = f"/v1/agl/workers/{segment(worker_id)}"
        return Worker.model_validate(await self._transport.write(path, given({"heartbeat_stats": heartbeat_stats})))
