"""Ten times more calls than a server can take: `python -m tests.faults.overload --seconds 10`.

First so many clients call one after the other as it takes to find what the server can do; then ten times as many calls
a second are begun, whatever becomes of those before; then those clients call again. On SQLite and on PostgreSQL. The
last line of the output for each is the verdict, and the exit code is 1 when anything is wrong.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.processes import python_path
from lightning_api.load import FEW_CALLS
from lightning_sql.store.factory import prepare_database
from lightning_sql.testing.postgres import postgres_cluster
from tests.faults.stage import ROOT, Server

__all__ = ["Outcome", "overload"]

CLIENTS = 128
"""So many at once find what the server can do."""
TIMES = 10
WATCH_SECONDS = 0.1


@dataclass
class Outcome:
    """What became of the calls, by phase, and what the server was like."""

    phases: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    """The largest resident set, in bytes, by phase."""
    cores: dict[str, float] = field(default_factory=dict[str, float])
    """How much of a core the server had, by phase."""
    health: list[int] = field(default_factory=list[int])
    """What its health routes answered under load."""

    @property
    def wrong(self) -> list[str]:
        """What should not have happened."""
        wrong: list[str] = []
        for name, phase in self.phases.items():
            answers = dict(phase["answers"])
            # Those for which the calling process had no socket left never reached the server.
            allowed = {"done", "503", "offered", "no socket"} if name == "overload" else {"done"}
            wrong += [
                f"{name}: {count} calls ended as {what!r}" for what, count in answers.items() if what not in allowed
            ]
            if phase["unanswered"]:
                wrong.append(f"{name}: {phase['unanswered']} calls were not answered")
        if not self.phases["overload"]["answers"].get("503"):
            wrong.append("nothing was refused")
        if set(self.health) != {200}:
            wrong.append(f"health was answered with {sorted(set(self.health))}")
        return wrong


class _Caller:
    """The process that calls."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def run(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


@asynccontextmanager
async def _caller(port: int, folder: Path) -> AsyncGenerator[_Caller]:
    with (folder / "load.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.faults.load", str(port)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            env=python_path(),
            cwd=ROOT,
        )
    try:
        yield _Caller(process)
    finally:
        process.kill()
        await process.wait()


async def _watch(server: psutil.Process, port: int, name: str, outcome: Outcome) -> None:
    """Look at the server until cancelled, and ask for its health."""
    before, begun = sum(server.cpu_times()[:2]), time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            outcome.memory[name] = max(outcome.memory.get(name, 0), server.memory_info().rss)
            outcome.cores[name] = (sum(server.cpu_times()[:2]) - before) / max(0.001, time.monotonic() - begun)
            for path in ("/healthz", "/v1/agl/health"):
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    outcome.health.append(response.status)
            await asyncio.sleep(WATCH_SECONDS)


async def overload(
    database_url: str, folder: Path, seconds: float, *, module: Sequence[str] = ("lightning_api",)
) -> Outcome:
    """Serve an empty database, and offer the server what it can take, ten times that, and what it can take again.

    Args:
        database_url: the database.
        folder: for logs.
        seconds: how long each of the three phases takes.
        module: what runs as a server.
    """
    outcome = Outcome()
    await prepare_database(database_url)
    async with AsyncExitStack() as stack:
        server = Server(database_url, folder / "server.log", module)
        stack.push_async_callback(server.kill)
        await server.start()
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        caller = await stack.enter_async_context(_caller(server.port, folder))
        await caller.run(clients=CLIENTS, seconds=min(1.0, seconds))  # nothing is measured cold
        jobs: dict[str, dict[str, Any]] = {
            "capacity": {"clients": CLIENTS},
            "overload": {"rate": 0.0},
            "recovery": {"clients": CLIENTS},
        }
        for name, job in jobs.items():
            if "rate" in job:
                # More than may stand in line, too, however slow the machine is.
                job["rate"] = max(TIMES * outcome.phases["capacity"]["rate"], 4 * FEW_CALLS / seconds)
            watching = asyncio.create_task(_watch(process, server.port, name, outcome))
            outcome.phases[name] = await caller.run(**job, seconds=seconds)
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()
    return outcome


def report(outcome: Outcome, dialect: str) -> str:
    """What to say about it."""
    lines: list[str] = []
    for name, phase in outcome.phases.items():
        lines.append(
            f"{dialect} {name}: done {phase['rate']:.0f}/s, median {1000 * phase['median']:.0f} ms,"
            f" p99 {1000 * phase['p99']:.0f} ms, at most {outcome.memory[name] / 1e6:.0f} MB,"
            f" {outcome.cores[name]:.2f} cores; {phase['answers']}"
        )
    capacity, loaded, recovered = (outcome.phases[name] for name in ("capacity", "overload", "recovery"))
    lines.append(
        f"overload: dialect={dialect} offered={TIMES}x refused={loaded['answers'].get('503', 0)}"
        f" goodput={loaded['rate'] / capacity['rate']:.2f}x median={loaded['median'] / capacity['median']:.1f}x"
        f" p99={loaded['p99'] / capacity['p99']:.1f}x recovered={recovered['rate'] / capacity['rate']:.2f}x"
        f" memory={outcome.memory['overload'] / outcome.memory['capacity']:.2f}x wrong={len(outcome.wrong)}"
    )
    return "\n".join([*outcome.wrong, *lines])


def main() -> int:
    """Overload a server on each dialect, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--dialect", choices=["sqlite", "postgres"], action="append")
    options = parser.parse_args()
    dialects: list[str] = options.dialect or ["sqlite", "postgres"]
    wrong = 0
    for dialect in dialects:
        with tempfile.TemporaryDirectory(prefix="lightning-sql-overload-") as folder:
            place = Path(folder)
            if dialect == "sqlite":
                outcome = asyncio.run(overload(f"sqlite:///{place / 'overload.db'}", place, options.seconds))
            else:
                with postgres_cluster(settings={"fsync": "on"}) as cluster:
                    outcome = asyncio.run(overload(cluster.create_database(), place, options.seconds))
        sys.stdout.write(report(outcome, dialect) + "\n")
        sys.stdout.flush()
        wrong += len(outcome.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
