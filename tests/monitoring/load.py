"""Work for a server, of every kind that the dashboard shows: what succeeds, fails, waits, and is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from typing import Any, Final

import aiohttp

__all__ = ["load"]

RUNNERS: Final = 8
WAIT_SECONDS: Final = 5.0
"""Long enough for four rollouts, on a machine that does something else beside."""
MODES: Final = ("train", "val", "test", None)
_AGL: Final = "/v1/agl"


async def load(url: str, token: str, seconds: float) -> int:
    """Keep a server busy for some seconds; how many rollouts finished.

    Raises:
        aiohttp.ClientError: it cannot be reached.
    """
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=64)) as session:
        worker = _Worker(session, time.monotonic() + seconds)
        await asyncio.gather(
            worker.enqueue(),
            worker.look(),
            worker.hang_up(),
            *(worker.run(number) for number in range(RUNNERS)),
        )
    return worker.finished


class _Worker:
    def __init__(self, session: aiohttp.ClientSession, until: float) -> None:
        self.finished = 0
        self._session = session
        self._until = until
        self._random = random.Random(5)

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._until

    async def enqueue(self) -> None:
        """What an algorithm does: put in a batch, and wait for it."""
        resources = {"main": {"resource_type": "llm", "endpoint": "http://model", "model": "m"}}
        await self._call("POST", "/resources", resources)
        while self._goes_on:
            requests = [
                {"input": {"task": number}, "mode": mode, "config": {"max_attempts": 3, "retry_condition": ["failed"]}}
                for number, mode in enumerate(MODES)
            ]
            rollouts = await self._call("POST", "/queues/rollouts/enqueue", {"rollouts": requests})
            names = [rollout["rollout_id"] for rollout in rollouts]
            await self._call("POST", "/waits/rollouts", {"rollout_ids": names, "timeout": WAIT_SECONDS})

    async def run(self, number: int) -> None:
        """What a runner does: claim, write spans, end the attempt, now and then in failure."""
        name = f"runner-{number}"
        while self._goes_on:
            claimed = await self._call("POST", "/queues/rollouts/dequeue", {"limit": 1, "worker_id": name})
            if not claimed:
                await asyncio.sleep(0.05)
                continue
            rollout, attempt = claimed[0]["rollout_id"], claimed[0]["attempt"]["attempt_id"]
            await self._call("GET", "/resources/latest")
            for _ in range(3):
                await self._call("POST", "/spans", await self._span(rollout, attempt))
            status = "failed" if self._random.random() < 0.2 else "succeeded"
            await self._call("POST", f"/rollouts/{rollout}/attempts/{attempt}", {"status": status})
            await self._call("POST", f"/workers/{name}", {"heartbeat_stats": {"done": self.finished}})
            self.finished += 1

    async def _span(self, rollout: str, attempt: str) -> dict[str, Any]:
        body = {"rollout_id": rollout, "attempt_id": attempt}
        number = (await self._call("POST", "/spans/next", body))["sequence_id"]
        now = time.time()
        return {
            **body,
            "sequence_id": number,
            "trace_id": uuid.uuid4().hex,
            "span_id": uuid.uuid4().hex[:16],
            "parent_id": None,
            "name": "step",
            "status": {"status_code": "OK", "description": None},
            "attributes": {"reward": 0.5},
            "events": [],
            "links": [],
            "start_time": now - 0.1,
            "end_time": now,
            "context": None,
            "parent": None,
            "resource": {"attributes": {}, "schema_url": ""},
        }

    async def look(self) -> None:
        """What somebody does who looks, and who asks for what there is not."""
        while self._goes_on:
            for path in ("/rollouts?limit=20", "/spans?rollout_id=none", "/workers", "/resources", "/statistics"):
                await self._call("GET", path)
            await self._call("GET", "/rollouts?sort_by=nothing", wrong=True)
            await self._call("POST", "/rollouts/none", {"status": "failed"}, wrong=True)
            await self._call("POST", "/rollouts/none/attempts/none", {"status": "failed"}, wrong=True)
            await asyncio.sleep(0.2)

    async def hang_up(self) -> None:
        """What a client does that does not wait for its answer."""
        while self._goes_on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002 * self._random.random()):
                    await self._call("GET", "/rollouts?limit=500")
            await asyncio.sleep(0.05)

    async def _call(self, method: str, path: str, body: Any = None, *, wrong: bool = False) -> Any:
        async with self._session.request(method, f"{_AGL}{path}", json=body) as answer:
            text = await answer.text()
            if (answer.status >= 400) != wrong:
                raise AssertionError(f"{method} {path} was answered {answer.status}: {text[:300]}")
            return await answer.json()
