"""The targets: our server on each of its backends, and upstream's."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from bench.databases import Postgres, fill
from bench.processes import FILL_SECONDS, START_SECONDS, BenchError, free_port, started, wait_until_healthy

Kind = Literal["memory", "sqlite", "sqlite-normal", "postgres", "upstream"]

OURS: Final[tuple[Kind, ...]] = tuple(kind for kind in get_args(Kind) if kind != "upstream")
UPSTREAM: Final = "upstream"


def size_name(rollouts: int) -> str:
    """`1k`, `100k`, `1m`."""
    return f"{rollouts // 1_000_000}m" if rollouts >= 1_000_000 else f"{rollouts // 1000}k"


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured.

    Attributes:
        kind: which store.
        rollouts: how many finished ones it holds at the start.
        served: whether there is a server in front of the database.
        tracked: whether the server takes down metrics for Prometheus.
    """

    kind: Kind
    rollouts: int = 0
    served: bool = True
    tracked: bool = False

    def __str__(self) -> str:
        size = f"@{size_name(self.rollouts)}" if self.rollouts else ""
        if self.tracked:
            size += ", with metrics"
        return f"{self.kind}{size}" if self.served else f"{self.kind} (in process)"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a target is, and whose CPU time is its."""

    base_url: str | None = None
    database_url: str | None = None
    watched: dict[str, int] | None = None


class Places:
    """What targets are started with.

    Args:
        folder: where SQLite files and logs go.
        postgres: None when no target needs it.
        peer_python: the Python of the upstream server's environment, None without it.
        options: further ones of our server's command line.
    """

    def __init__(
        self, folder: Path, postgres: Postgres | None, peer_python: str | None, options: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.peer_python = peer_python
        self._postgres = postgres
        self._options = options

    @property
    def postgres_url(self) -> str | None:
        """Where PostgreSQL can be told to create databases, None when no target needs it."""
        return self._postgres.url if self._postgres else None

    @contextlib.contextmanager
    def open(self, target: Target) -> Iterator[Endpoint | str]:
        """Start a target; the reason when this release cannot be one."""
        with contextlib.ExitStack() as stack:
            if target.kind == UPSTREAM:
                yield stack.enter_context(self._upstream(target))
                return
            database_url, engine_pid = stack.enter_context(self._database(target))
            if target.rollouts and (reason := fill(database_url, target.rollouts)):
                yield reason
            elif target.served:
                yield stack.enter_context(self._own(database_url, engine_pid, tracked=target.tracked))
            else:
                yield Endpoint(database_url=database_url)

    @contextlib.contextmanager
    def _database(self, target: Target) -> Iterator[tuple[str, int | None]]:
        """The URL of an empty database of a kind, and the process that works for it."""
        match target.kind:
            case "memory":
                yield "memory://", None
            case "postgres":
                if self._postgres is None:
                    raise BenchError("there is no PostgreSQL for this target")
                with self._postgres.database() as url:
                    yield url, self._postgres.pid
            case _:
                file = self.folder / f"{target.kind}-{uuid.uuid4().hex[:8]}.db"
                option = "?synchronous=NORMAL" if target.kind == "sqlite-normal" else ""
                try:
                    yield f"sqlite:///{file}{option}", None
                finally:
                    for left in self.folder.glob(f"{file.name}*"):
                        left.unlink()

    @contextlib.contextmanager
    def _own(self, database_url: str, engine_pid: int | None, *, tracked: bool) -> Iterator[Endpoint]:
        port = free_port()
        command = [sys.executable, "-m", "lightning_api", "serve", "--port", str(port), "--database-url", database_url]
        if tracked:
            command += ["--tracker", "prometheus"]
        command += self._options
        with self._served(command, port, START_SECONDS) as pid:
            watched = {"server": pid} | ({"database": engine_pid} if engine_pid else {})
            # Where the database's share cannot be seen, the server's alone would look like all of it.
            whole = engine_pid is not None or not database_url.startswith("postgresql")
            yield Endpoint(f"http://127.0.0.1:{port}", database_url, watched if whole else None)

    @contextlib.contextmanager
    def _upstream(self, target: Target) -> Iterator[Endpoint]:
        if self.peer_python is None:
            raise BenchError("there is no environment of the upstream server")
        port = free_port()
        command = [self.peer_python, "-m", "bench.peer_server", "--rollouts", str(target.rollouts)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with self._served(command, port, FILL_SECONDS if target.rollouts else START_SECONDS) as pid:
            yield Endpoint(f"http://127.0.0.1:{port}", None, {"server": pid})

    @contextlib.contextmanager
    def _served(self, command: list[str], port: int, seconds: float) -> Iterator[int]:
        log = self.folder / f"server-{port}.log"
        with log.open("wb") as output, started(command, stdout=output, stderr=output) as process:
            wait_until_healthy(process, f"http://127.0.0.1:{port}", log, seconds)
            yield process.pid
