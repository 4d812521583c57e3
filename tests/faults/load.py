"""A process that calls a server: `python -m tests.faults.load PORT`.

On standard input it takes lines of JSON and answers each with one. `{"clients": N, "seconds": S}` lets so many clients
call for so long, each its next call when the one before is answered. `{"rate": R, "seconds": S}` begins so many calls a
second, whatever becomes of those before: each on a connection that nobody uses, or on a new one.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import uvloop

from tests.faults.stage import until

BATCH = 100
"""What one call asks for: small on the wire, and some work for the server."""
WORKERS = 2000
MOST_CONNECTIONS = 3000
TICK_SECONDS = 0.002
LAST_SECONDS = 20.0
"""How long those who were not answered are waited for in the end."""


def request(port: int, method: str, path: str, content: Any = None) -> bytes:
    body = b"" if content is None else json.dumps(content).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def calls(port: int) -> Iterator[bytes]:
    """Enqueues, claims and pages, over and over."""
    enqueue = request(port, "POST", "/v1/agl/queues/rollouts/enqueue", {"rollouts": [{"input": "x" * 50}] * BATCH})
    page = request(port, "GET", f"/v1/lightning/rollouts?total=false&limit={BATCH}&sort_by=start_time&sort_order=desc")
    for number in count():
        # Claims of one worker would go one after the other.
        claim = {"limit": BATCH, "worker_id": f"w{number % WORKERS}"}
        yield enqueue
        yield request(port, "POST", "/v1/agl/queues/rollouts/dequeue", claim)
        yield enqueue
        yield page


class Client(asyncio.Protocol):
    """One connection, with one call at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._transport: Any = None
        self._begun = 0.0
        self._head = b""
        self._left = -1
        self._status = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._load.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self, busy=bool(self._begun))

    def send(self, message: bytes, begun: float) -> None:
        self._begun = begun
        self._head, self._left = b"", -1
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            self._status = int(head[9:12])
            self._left = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if self._status == 503 and b"retry-after: " not in head:
                self._status = -503
            data = self._head[end + 4 :]
        self._left -= len(data)
        if self._left <= 0:
            begun, self._begun = self._begun, 0.0
            self._load.answered(self, self._status, time.perf_counter() - begun)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Load:
    """All connections of the process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._calls = calls(port)
        self._free: list[Client] = []
        self._count = 0
        self._opening: set[asyncio.Task[Any]] = set()
        self._closed_loop = False
        self._deadline = 0.0
        self._waiting: list[float] = []
        self._busy = 0
        self.answers: Counter[str] = Counter()
        self.seconds: list[float] = []
        """How long each call took that was done."""

    def connected(self, client: Client) -> None:
        if self._waiting:
            self._send(client, self._waiting.pop())
        else:
            self._free.append(client)

    def lost(self, client: Client, *, busy: bool) -> None:
        self._count -= 1
        if busy:
            self._busy -= 1
            self.answers["lost"] += 1
        elif client in self._free:
            self._free.remove(client)

    def answered(self, client: Client, status: int, seconds: float) -> None:
        self._busy -= 1
        if status in (200, 201):
            self.answers["done"] += 1
            self.seconds.append(seconds)
        else:
            self.answers[str(status)] += 1
        if self._closed_loop and time.perf_counter() < self._deadline:
            self._send(client, time.perf_counter())
        else:
            self._free.append(client)

    def _send(self, client: Client, begun: float) -> None:
        self._busy += 1
        client.send(next(self._calls), begun)

    async def _open(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: Client(self), "127.0.0.1", self._port)
        except OSError:
            self._count -= 1
            if self._waiting:
                self._waiting.pop()
                self.answers["not connected"] += 1

    def _begin(self, begun: float) -> None:
        """A call that began when it was due."""
        if self._free:
            self._send(self._free.pop(), begun)
        elif self._count < MOST_CONNECTIONS:
            self._count += 1
            self._waiting.append(begun)
            task = asyncio.ensure_future(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self.answers["no socket"] += 1

    async def run(self, job: dict[str, Any]) -> dict[str, Any]:
        self.answers.clear()
        self.seconds.clear()
        begun = time.perf_counter()
        self._deadline = begun + job["seconds"]
        self._closed_loop = "clients" in job
        if self._closed_loop:
            for _ in range(job["clients"]):
                self._begin(begun)
            await asyncio.sleep(job["seconds"])
        else:
            await self._offer(begun, job["rate"], job["seconds"])
        elapsed = time.perf_counter() - begun
        done = self.answers["done"]
        await self._settle()
        ordered = sorted(self.seconds) or [0.0]
        return {
            "answers": dict(self.answers),
            "rate": done / elapsed,
            "median": ordered[len(ordered) // 2],
            "p99": ordered[int(len(ordered) * 0.99)],
            "unanswered": self._busy,
        }

    async def _offer(self, begun: float, rate: float, seconds: float) -> None:
        offered = 0
        while (now := time.perf_counter()) < self._deadline:
            due = int((now - begun) * rate)
            for number in range(offered, due):
                self._begin(begun + number / rate)
            self.answers["offered"] += due - offered
            offered = due
            await asyncio.sleep(TICK_SECONDS)

    async def _settle(self) -> None:
        with suppress(TimeoutError):
            await until(lambda: not self._busy and not self._opening, pause=0.02, patience=LAST_SECONDS)


async def main(port: str) -> None:
    load = Load(int(port))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        sys.stdout.write(json.dumps(await load.run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
