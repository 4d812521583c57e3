"""A server that is killed and comes back a minute later: `python -m tests.faults.absence [SECONDS]`.

Our client's calls, made all the while with its default settings, must all succeed, each once.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from aiohttp.test_utils import unused_port

from lightning_api.client import LightningClient

CALLERS = 8


def start(folder: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightning_api", "serve", "--port", str(port)]
    command += ["--database-url", f"sqlite:///{Path(folder) / 'absence.db'}", "--log-level", "error"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


async def call(client: LightningClient, name: str, over: asyncio.Event) -> list[str]:
    """Rollouts from their queueing to their end."""
    done: list[str] = []
    while not over.is_set():
        await client.enqueue_rollout({"by": name})
        claimed = await client.dequeue_rollout(name)
        if claimed is None:
            continue
        await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        done.append(claimed.rollout_id)
    return done


async def run(seconds: float) -> dict[str, float]:
    over = asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        port = unused_port()
        server = start(folder, port)
        async with LightningClient(f"http://127.0.0.1:{port}") as client:
            calls = [asyncio.create_task(call(client, f"w{number}", over)) for number in range(CALLERS)]
            await asyncio.sleep(3)
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            killed = time.monotonic()
            await asyncio.sleep(seconds)
            server = start(folder, port)
            try:
                await client.statistics()
                away = time.monotonic() - killed
                await asyncio.sleep(3)
                over.set()
                done = [rollout_id for ids in await asyncio.gather(*calls) for rollout_id in ids]
                assert max(Counter(done).values()) == 1, "a rollout was claimed twice"
                statistics = await client.statistics()
                found = await client.query_rollouts(status_in=["succeeded"], limit=1)
                assert found.total == len(done), (found.total, len(done))
                assert statistics["total_rollouts"] >= len(done)
            finally:
                server.terminate()
                server.wait()
    return {"away": round(away, 1), "rollouts": len(done)}


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(run(float(sys.argv[1]) if sys.argv[1:] else 60.0))}\n")
