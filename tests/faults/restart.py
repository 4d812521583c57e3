"""PostgreSQL stopped for a while and started again under load: `python -m tests.faults.restart --seconds 30`.

Callers of three kinds work on two servers: requests that are sent once and nothing is made of their failures, our own
client, and Agent Lightning's. Each failure of each of them is counted. The last line of the output says how it went,
and the exit code is 1 when anything failed.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lightning_sql.testing.postgres import PostgresCluster, postgres_cluster
from tests.faults.crew import Crew, Own, Upstream, closing
from tests.faults.stage import Stage, stage_on

__all__ = ["Report", "Restart", "restart_under_load"]

CALM_SECONDS = 3.0
"""Before the stop, and after the start."""
PLAIN_CALLERS = 24
CLIENTS_OF_A_KIND = 6
PATIENCE_SECONDS = 120.0


@dataclass
class Report:
    """What became of the calls."""

    calls: int = 0
    waited: int = 0
    """Calls that were made before the database was back, and answered afterwards."""
    longest: float = 0.0
    """Seconds that the slowest call took."""
    failures: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    """Laws of the tables that do not hold in the end."""

    def line(self, seconds: float) -> str:
        """The report in one line."""
        return (
            f"restart: seconds={seconds:g} calls={self.calls} waited={self.waited} failures={len(self.failures)}"
            f" longest={self.longest:.1f} wrong={len(self.wrong)}"
        )


class Restart:
    """Callers who work until they are told to stop.

    Args:
        urls: the servers.
    """

    def __init__(self, urls: list[str]) -> None:
        self.report = Report()
        self.returned: float | None = None
        """When the database was back."""
        self._urls = urls
        self._done = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Let everybody work."""
        for number in range(PLAIN_CALLERS):
            self._tasks.append(asyncio.create_task(self._plain(self._urls[number % len(self._urls)], number)))
        for number in range(CLIENTS_OF_A_KIND):
            url = self._urls[number % len(self._urls)]
            own = Own(url)
            own.client = type(own.client)(url)  # with the patience that it has by itself
            upstream = Upstream(url)
            upstream.client = upstream.types.LightningStoreClient(url)
            for way in (own, upstream):
                self._tasks.append(asyncio.create_task(self._client(way, f"{type(way).__name__}-{number}")))

    async def end(self) -> None:
        """Let everybody finish what was begun, and stop."""
        self._done.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*self._tasks)

    async def _made(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        begun = time.monotonic()
        self.report.calls += 1
        try:
            return await call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is counted
            self.report.failures.append(f"{name} after {time.monotonic() - begun:.1f} s: {error!r}")
            return None
        finally:
            now = time.monotonic()
            self.report.longest = max(self.report.longest, now - begun)
            if self.returned is not None and begun < self.returned < now:
                self.report.waited += 1

    async def _plain(self, url: str, number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        async with aiohttp.ClientSession(url, timeout=timeout, raise_for_status=True) as session:

            async def post(path: str, body: Mapping[str, Any]) -> Any:
                async with session.post(f"/v1/agl{path}", json=body) as response:
                    return await response.json()

            async def call(path: str, body: Mapping[str, Any]) -> Any:
                return await self._made(f"POST {path}", lambda: post(path, body))

            while not self._done.is_set():
                await call("/queues/rollouts/enqueue", {"rollouts": [{"input": number}]})
                await call("/rollouts/search", {"limit": 5})
                for claimed in await call("/queues/rollouts/dequeue", {"worker_id": f"plain-{number}"}) or ():
                    key = claimed["rollout_id"], claimed["attempt"]["attempt_id"]
                    await call("/spans/next", {"rollout_id": key[0], "attempt_id": key[1]})
                    await call("/spans", _span(*key))
                    await call(f"/rollouts/{key[0]}/attempts/{key[1]}", {"status": "succeeded"})
                await call(f"/workers/plain-{number}", {"heartbeat_stats": {"n": number}})
                await asyncio.sleep(random.uniform(0.0, 0.05))

    async def _client(self, way: Any, worker_id: str) -> None:
        client = way.client
        async with closing(client):
            while not self._done.is_set():
                started = await self._made("start_rollout", lambda: client.start_rollout("task", worker_id=worker_id))
                if started:
                    key = started.rollout_id, started.attempt.attempt_id
                    span = Crew.span(way.types, key, 1)
                    await self._made("add_span", lambda: client.add_span(span))  # noqa: B023
                    end = lambda: client.update_attempt(*key, status="succeeded")  # noqa: B023, E731
                    await self._made("update_attempt", end)
                await asyncio.sleep(random.uniform(0.0, 0.05))


def _span(rollout_id: str, attempt_id: str) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": 1,
        "trace_id": uuid.uuid4().hex,
        "span_id": uuid.uuid4().hex[:16],
        "parent_id": None,
        "name": "step",
        "status": {"status_code": "OK"},
        "attributes": {"text": "x" * 200},
        "events": [],
        "links": [],
        "start_time": 1.0,
        "end_time": 2.0,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }


async def restart_under_load(stage: Stage, cluster: PostgresCluster, seconds: float) -> Report:
    """Stop the database of a stage for so long while callers work."""
    restart = Restart(stage.urls)
    restart.begin()
    await asyncio.sleep(CALM_SECONDS)
    await asyncio.to_thread(cluster.stop)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(cluster.start)
    restart.returned = time.monotonic()
    await asyncio.sleep(CALM_SECONDS)
    await restart.end()
    for server in stage.servers:
        if await server.end(signal.SIGTERM) != 0:
            restart.report.wrong.append("a server that was asked to stop failed")
    restart.report.wrong += (await stage.verdict()).wrong
    return restart.report


async def _play(seconds: float) -> Report:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-sql-restart-")))
        cluster = stack.enter_context(postgres_cluster(settings={"fsync": "on"}))
        stage = await stack.enter_async_context(stage_on(cluster.create_database(), folder, cluster=cluster, servers=2))
        return await restart_under_load(stage, cluster, seconds)


def main() -> int:
    """Play it, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    report = asyncio.run(_play(seconds))
    for failure in (*report.failures[:20], *report.wrong):
        sys.stdout.write(f"{failure}\n")
    sys.stdout.write(f"{report.line(seconds)}\n")
    return 1 if report.failures or report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
