"""What docker/compose.postgres.yaml starts, started here without containers: the same commands, on other ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_sql.testing.postgres import PostgresUnavailableError, free_port, postgres_cluster
from tools.deployment.compose import host_file
from tools.deployment.composition import Composition, Service, compositions
from tools.deployment.prometheus import CONFIGURATION, FOLDER

__all__ = ["BINARIES_VARIABLE", "TOKEN", "Binaries", "MonitoringError", "Stack", "find_binaries", "running", "saved"]

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = "docker/compose.postgres.yaml"
SAVED_COMPOSE: Final = "docker/compose.grafana.yaml"
DATA: Final = "prometheus"
"""The volume, and the folder, in which Prometheus keeps what it scraped."""
BINARIES_VARIABLE: Final = "LIGHTNING_SQL_MONITORING_BIN"
TOKEN: Final = "a-token-of-this-test"
SCRAPE_SECONDS: Final = 1
START_SECONDS: Final = 60.0

_NAMES: Final = {
    "prometheus": ("prometheus",),
    "promtool": ("promtool",),
    "node-exporter": ("prometheus-node-exporter", "node_exporter"),
    "postgres-exporter": ("prometheus-postgres-exporter", "postgres_exporter"),
}
"""What each is called, by Debian and by those who make it."""


class MonitoringError(Exception):
    """The test cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where the programs are, by the service that runs them."""

    paths: Mapping[str, str]

    def promtool(self, *arguments: str) -> None:
        """Run promtool.

        Raises:
            MonitoringError: it found something.
        """
        done = subprocess.run(
            [self.paths["promtool"], *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise MonitoringError(f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


@dataclass(frozen=True, slots=True)
class Stack:
    """Where everything is."""

    server: str
    exporter: str
    prometheus: str
    database: str
    """The name of PostgreSQL's database."""
    processes: Mapping[str, subprocess.Popen[bytes]]


def find_binaries(environment: Mapping[str, str] = os.environ) -> Binaries:
    """Find Prometheus and the exporters, in the folder that `LIGHTNING_SQL_MONITORING_BIN` names, or on PATH.

    Raises:
        MonitoringError: some are missing; the message says how to get them.
    """
    folder = environment.get(BINARIES_VARIABLE)
    path = folder or environment.get("PATH", "")
    found = {
        what: next(filter(None, (shutil.which(name, path=path) for name in _NAMES[what])), None) for what in _NAMES
    }
    missing = [what for what, where in found.items() if where is None]
    if missing:
        raise MonitoringError(
            f"{', '.join(missing)} not found {f'in {folder}' if folder else 'on PATH'}: on Debian, "
            "`apt-get install prometheus prometheus-node-exporter prometheus-postgres-exporter` brings them; "
            f"elsewhere, name the folder that holds them with {BINARIES_VARIABLE}"
        )
    return Binaries({what: where for what, where in found.items() if where is not None})


@contextlib.contextmanager
def running(binaries: Binaries, folder: Path) -> Iterator[Stack]:
    """PostgreSQL, a server of several workers, its exporter, the other exporters and Prometheus.

    Args:
        binaries: the programs.
        folder: for files and logs.

    Raises:
        MonitoringError: something does not start.
    """
    [file] = [file for file in compositions(ROOT, []) if file.path == COMPOSE]
    ports = {name: free_port() for name in ("server", "exporter", "postgres-exporter", "node-exporter", "prometheus")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    (folder / "lightning_sql_token").write_text(TOKEN)
    (folder / "postgres_password").write_text("not-asked-for")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(file, ports, folder)))
    binaries.promtool("check", "config", str(folder / "prometheus.yml"))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(postgres_cluster())
        except PostgresUnavailableError as error:
            raise MonitoringError(str(error)) from error
        database = cluster.create_database()
        _, _, address = database.partition("@")
        given: dict[str, dict[str, str]] = {
            "server": {
                "LIGHTNING_SQL_TOKEN": TOKEN,
                "LIGHTNING_SQL_DATABASE_URL": database,
                "LIGHTNING_SQL_HOST": "127.0.0.1",
                "LIGHTNING_SQL_PORT": str(ports["server"]),
            },
            "exporter": {"LIGHTNING_SQL_TOKEN": TOKEN},
            "postgres-exporter": {
                "DATA_SOURCE_URI": f"{address}?sslmode=disable",
                "DATA_SOURCE_USER": database.partition("://")[2].partition("@")[0],
            },
        }
        for name, path in (
            ("server", "/readyz"),
            ("exporter", "/health"),
            ("postgres-exporter", "/"),
            ("node-exporter", "/"),
            ("prometheus", "/-/ready"),
        ):
            service = file.services[name]
            command = _command(file, service, binaries, ports[name], folder)
            environment = _environment(file, service, folder) | given.get(name, {})
            processes[name] = stack.enter_context(_started(command, environment, folder / f"{name}.log"))
            _wait(processes[name], f"{urls[name]}{path}", folder / f"{name}.log")
        yield Stack(urls["server"], urls["exporter"], urls["prometheus"], address.rpartition("/")[2], processes)


@contextlib.contextmanager
def saved(binaries: Binaries, folder: Path) -> Iterator[str]:
    """The Prometheus of docker/compose.grafana.yaml over what the one of a stack in this folder has left; its address.

    Raises:
        MonitoringError: it does not start.
    """
    [file] = [file for file in compositions(ROOT, []) if file.path == SAVED_COMPOSE]
    service = file.services["prometheus"]
    port = free_port()
    command = [binaries.paths["prometheus"], f"--web.listen-address=127.0.0.1:{port}"]
    for word in service.command:
        name, _, path = word.partition("=")
        here = host_file(file, service, path) or (folder / DATA if path == f"/{DATA}" else None)
        command.append(word if here is None else f"{name}={here}")
    log = folder / "saved.log"
    with _started(command, {"PATH": os.environ["PATH"]}, log) as process:
        _wait(process, f"http://127.0.0.1:{port}/-/ready", log)
        yield f"http://127.0.0.1:{port}"


def _configuration(file: Composition, ports: Mapping[str, int], folder: Path) -> Any:
    """Our configuration of Prometheus, where what it asks is here and asked every second."""
    configuration = yaml.safe_load((ROOT / CONFIGURATION).read_text())
    seconds = f"{SCRAPE_SECONDS}s"
    configuration["global"] = {"scrape_interval": seconds, "evaluation_interval": seconds}
    configuration["rule_files"] = [str(ROOT / FOLDER / name) for name in configuration["rule_files"]]
    for job in configuration["scrape_configs"]:
        job.pop("scrape_interval", None)
        for group in job["static_configs"]:
            group["targets"] = [f"127.0.0.1:{ports[target.partition(':')[0]]}" for target in group["targets"]]
        if "authorization" in job:
            credentials = job["authorization"]["credentials_file"]
            job["authorization"]["credentials_file"] = _here(file, file.services["prometheus"], credentials, folder)
    return configuration


def _command(file: Composition, service: Service, binaries: Binaries, port: int, folder: Path) -> list[str]:
    if service.ours:
        words = ["127.0.0.1" if word == "0.0.0.0" else word for word in service.command]
        words = [str(port) if before == "--port" else word for before, word in zip(["", *words], words, strict=False)]
        return [sys.executable, "-m", "lightning_api", *words]
    words = [_here(file, service, word, folder) for word in service.command]
    return [binaries.paths[service.name], f"--web.listen-address=127.0.0.1:{port}", *words]


def _environment(file: Composition, service: Service, folder: Path) -> dict[str, str]:
    """The variables that the service has in its container, for what is here."""
    ours = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}", "PATH": os.environ["PATH"]}
    given = {name: value for name, value in service.environment.items() if value is not None and name != "PATH"}
    return {**ours, **{name: _here(file, service, value, folder) for name, value in given.items()}}


def _here(file: Composition, service: Service, text: str, folder: Path) -> str:
    """A text in which paths of the container are those of what would be there."""
    if text.endswith(f"={service_file(service)}"):
        return f"--config.file={folder / 'prometheus.yml'}"
    text = text.replace("/run/secrets", str(folder))
    for mount in service.mounts:
        if mount.target in text and mount.source != "tmpfs":
            source = (file.folder / mount.source).resolve() if mount.is_folder else folder / mount.source
            source.mkdir(exist_ok=True)
            text = text.replace(mount.target, str(source))
    return text


def service_file(service: Service) -> str:
    """The configuration that Prometheus is started with, as it is called in the container."""
    found = [word.partition("=")[2] for word in service.command if word.startswith("--config.file=")]
    return found[0] if found else "nothing"


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError, socket.timeout):
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.1)
    raise MonitoringError(f"nothing answers at {url}\n{log.read_text(errors='replace')[-2000:]}")
