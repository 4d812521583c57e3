"""A process of the fault tests: an algorithm and some runners who work on a server until they are told to stop.

Arguments: the kind of client (`own` or `upstream`), the folder of its notebook, its name, how many runners,
and the URLs of the servers, of which each runner has one. On standard input it takes lines: `flight` is
answered with how many requests are on their way, and the end of the input ends it.
"""

import asyncio
import itertools
import random
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp

from lightning_api.client import LightningClient
from lightning_sql.errors import LightningError
from tests.faults.ledger import Notebook

T = TypeVar("T")

SPANS = 3
ENQUEUED_AT_ONCE = 10
QUEUE_LENGTH = 200
"""An algorithm enqueues while fewer than this many of its rollouts were given out less than it enqueued."""
FAILURES = (LightningError, aiohttp.ClientError, OSError, TimeoutError, RuntimeError)
"""What a call may end with while servers come and go."""
RETRIES = {"max_attempts": 10_000, "retry_condition": ["timeout", "unresponsive", "failed"]}


class Own:
    """Our own client's way to do what the crew does."""

    limits: ClassVar = {"timeout_seconds": 150.0, "unresponsive_seconds": 120.0} | RETRIES
    """Longer than any answer may be on its way: whatever is claimed here, somebody is told of in time."""

    def __init__(self, url: str) -> None:
        from lightning_sql import records

        self.types: Any = records
        # As its users have it: it makes its calls again until the servers are back.
        self.client: Any = LightningClient(url, request_seconds=15.0, connect_seconds=2.0)


class Upstream:
    """The upstream client's."""

    limits: ClassVar = {"timeout_seconds": 8.0, "unresponsive_seconds": 4.0} | RETRIES
    """Soon over: of what this client claimed it may never hear."""

    def __init__(self, url: str) -> None:
        from tests.upstream import agl

        self.types: Any = agl
        # It tries again by itself, as it does for its users, only not for as long.
        self.client: Any = agl.LightningStoreClient(
            url, retry_delays=(0.1, 0.5), health_retry_delays=(0.1, 0.5), request_timeout=15.0, connection_timeout=2.0
        )


class Crew:
    """Everybody who works in this process."""

    def __init__(self, kind: str, folder: Path, name: str, runners: int, urls: list[str]) -> None:
        self._kind = {"own": Own, "upstream": Upstream}[kind]
        self._notebook = Notebook(folder / f"{name}.jsonl")
        self._name = name
        self._runners = runners
        self._urls = urls
        self._enqueued = 0
        self._claimed = 0
        self._leaving = False
        self.flight = 0

    def leave(self) -> None:
        """Let everybody finish the call that they are at, and go."""
        self._leaving = True

    async def work(self) -> None:
        """Work until told to leave."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._algorithm(self._kind(random.choice(self._urls))))
            for number in range(self._runners):
                url = self._urls[number % len(self._urls)]
                group.create_task(self._runner(self._kind(url), f"{self._name}-{number}"))

    async def _try(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """What a call answers, or None when there is no telling whether it took place."""
        self.flight += 1
        try:
            return await call()
        except FAILURES:
            self._notebook.note("failure", self._name)
            await asyncio.sleep(random.uniform(0.02, 0.2))
            return None
        finally:
            self.flight -= 1

    async def _algorithm(self, way: Any) -> None:
        types, client = way.types, way.client
        request = types.EnqueueRolloutRequest(input={"task": self._name}, config=types.RolloutConfig(**way.limits))
        async with closing(client):
            for turn in itertools.takewhile(lambda _: not self._leaving, itertools.count()):
                if self._enqueued - self._claimed < QUEUE_LENGTH:
                    queued = await self._try(lambda: client.enqueue_many_rollouts([request] * ENQUEUED_AT_ONCE))
                    if queued:
                        self._notebook.note("enqueue", *(rollout.rollout_id for rollout in queued))
                        self._enqueued += len(queued)
                else:
                    await asyncio.sleep(0.02)
                if turn % 20 == 0:
                    template = {"prompt": types.PromptTemplate(template=f"{turn}", engine="f-string")}
                    resources_id = f"rs-{self._name}-{turn % 3}"
                    written = await self._try(lambda: client.update_resources(resources_id, template))  # noqa: B023
                    if written:
                        self._notebook.note("resources", written.resources_id, written.version)

    async def _runner(self, way: Any, worker_id: str) -> None:
        async with closing(way.client):
            while not self._leaving:
                claimed = await self._try(lambda: way.client.dequeue_rollout(worker_id))
                if not claimed:
                    await asyncio.sleep(0.02)
                    continue
                self._claimed += 1
                key = claimed.rollout_id, claimed.attempt.attempt_id
                self._notebook.note("claim", *key, claimed.attempt.sequence_id)
                await self._attempt(way, key)

    async def _attempt(self, way: Any, key: tuple[str, str]) -> None:
        """Some spans and the end of an attempt; whoever gets no answer leaves the rest to the watchdog."""
        for number in range(1, SPANS + 1):
            span = self.span(way.types, key, number)
            if await self._try(lambda: way.client.add_span(span)) is None:  # noqa: B023
                return
            self._notebook.note("spans", *key, span.span_id)
        ended = await self._try(lambda: way.client.update_attempt(*key, status="succeeded"))
        if ended is not None:
            self._notebook.note("end", *key, ended.status)

    @staticmethod
    def span(types: Any, key: tuple[str, str], number: int) -> Any:
        return types.Span(
            rollout_id=key[0],
            attempt_id=key[1],
            sequence_id=number,
            trace_id=uuid.uuid4().hex,
            span_id=uuid.uuid4().hex[:16],
            parent_id=None,
            name="step",
            status=types.TraceStatus(status_code="OK"),
            attributes={"text": "x" * 200},
            events=[],
            links=[],
            start_time=1.0,
            end_time=2.0,
            context=None,
            parent=None,
            resource=types.OtelResource(attributes={}, schema_url=""),
        )


@asynccontextmanager
async def closing(client: Any) -> AsyncGenerator[None]:
    """Close a client in the end."""
    try:
        yield
    finally:
        await client.close()


async def main(kind: str, folder: str, name: str, runners: str, *urls: str) -> None:
    """Work, and answer, until there is no more input."""
    crew = Crew(kind, Path(folder), name, int(runners), list(urls))
    working = asyncio.create_task(crew.work())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if working.done():
            break
        if line == b"flight\n":
            sys.stdout.write(f"{crew.flight}\n")
            sys.stdout.flush()
    crew.leave()
    await working


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
