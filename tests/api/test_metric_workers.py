"""Metrics of real servers with several processes, which are killed, and of the exporter beside them."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from lightning_api.metrics import DIRECTORY_VARIABLE
from tests.api.conftest import Server, environment

pytestmark = pytest.mark.slow

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Start = Callable[..., Server]

ROLLOUTS = "/v1/agl/rollouts"
ENQUEUE = "/v1/agl/queues/rollouts/enqueue"
ANSWERED = ("agl_http_total", (("method", "POST"), ("path", ENQUEUE), ("status", "201")))
ENQUEUED = ("lightning_sql_enqueued_total", ())
QUEUED = ("lightning_sql_queue_depth", ())
SUMMED = ("_total", "_count", "_bucket", "_sum")


def fetch(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """One request on a connection of its own, which any worker may take."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(port: int, path: str = "/v1/prometheus/") -> Samples:
    status, text = fetch(port, path)
    assert status == 200, text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def enqueue(server: Server, count: int) -> None:
    for number in range(count):
        assert server.call("POST", ENQUEUE, {"rollouts": [{"input": number}]})[0] == 201


def workers_of(server: Server) -> set[int]:
    """The children that serve, which the resource tracker of `multiprocessing` does not."""
    found: set[int] = set()
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def samplers_of(directory: Path) -> set[int]:
    """The processes that have looked at the queue."""
    found: set[int] = set()
    for path in directory.glob("gauge_mostrecent_*.db"):
        values: Any = MmapedDict.read_all_values_from_file
        if any("queue_depth" in key and timestamp for key, _, timestamp, _ in values(str(path))):
            found.add(int(path.stem.rpartition("_")[2]))
    return found


def pids_in(directory: Path) -> set[str]:
    return {path.stem.rpartition("_")[2] for path in directory.glob("*.db")}


class Exporter:
    """A `lightning-sql prometheus` process."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_api", "prometheus", "--host", "127.0.0.1", "--port", "0", *arguments],
            env=environment(**variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert " serving the metrics " in line, line
        self.port = int(line.rpartition(":")[2].partition("/")[0])

    def stop(self) -> str:
        """End it, and return what it has logged."""
        self.process.send_signal(signal.SIGTERM)
        _, logged = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, logged
        return logged


@pytest.fixture
def start_exporter() -> Iterator[Callable[..., Exporter]]:
    exporters: list[Exporter] = []

    def start(*arguments: str, **variables: str) -> Exporter:
        exporters.append(Exporter(*arguments, **variables))
        return exporters[-1]

    yield start
    for exporter in exporters:
        exporter.process.kill()
        exporter.process.communicate(timeout=60)


def agreed(server: Server, exporter: Exporter) -> Samples | None:
    """What both say, if it is the same.

    A scrape of the server counts once it is answered, and now and then the queue is looked at in between.
    """
    apart = scrape(exporter.port)
    return apart if apart == scrape(server.port) else None


def test_all_workers_show_everything_however_often_they_are_killed(
    start_server: Start, start_exporter: Any, sqlite_url: str, tmp_path: Path, eventually: Any
) -> None:
    directory = tmp_path / "metrics" / "here"
    options = ("--database-url", sqlite_url, "--workers", "2", "--tracker", "prometheus")
    server = start_server(*options, **{DIRECTORY_VARIABLE: str(directory)}).ready()
    exporter = start_exporter(**{DIRECTORY_VARIABLE: str(directory)})
    enqueue(server, 20)
    last = scrape(server.port)
    sampler: set[int] = set()
    for round_number in (1, 2):
        # A request counts once it is answered, so that who asked may be the first to know of it.
        eventually(lambda: scrape(server.port)[ANSWERED] == 20 * round_number)  # noqa: B023 - called at once
        for _ in range(6):
            seen = scrape(server.port)
            assert seen[ANSWERED] == seen[ENQUEUED] == 20 * round_number
            smaller = {key for key, value in last.items() if key[0].endswith(SUMMED) and seen.get(key, 0.0) < value}
            assert not smaller
            last = seen
        workers = workers_of(server)
        assert len(workers) == 2
        eventually(lambda: len(samplers_of(directory)) == 1)
        [sampling] = samplers_of(directory)
        assert sampling in workers
        # Once the one that looks at the queue, and once the other.
        killed = sampling if round_number % 2 else (workers - {sampling}).pop()
        if sampler:
            assert ({sampling} == sampler) != (round_number % 2 == 0)
        sampler = {sampling}
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(workers_of(server) - {killed}) == 2)  # noqa: B023 - called at once
        eventually(lambda: pids_in(directory) == {"archive", *map(str, workers_of(server))})
        enqueue(server, 20)
    eventually(lambda: scrape(server.port).get(QUEUED) == 60)
    eventually(lambda: agreed(server, exporter))
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert pids_in(directory) == {"archive"}
    assert scrape(exporter.port)[ANSWERED] == 60
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]
    # A kill of the whole server leaves its files, and the next one goes on from there.
    killed_server = start_server(*options, **{DIRECTORY_VARIABLE: str(directory)}).ready()
    enqueue(killed_server, 5)
    eventually(lambda: scrape(killed_server.port)[ANSWERED] == 65)
    killed_server.kill()
    assert len(pids_in(directory)) == 3
    again = start_server(*options, **{DIRECTORY_VARIABLE: str(directory)}).ready()
    eventually(lambda: len(pids_in(directory)) == 3)
    seen = scrape(again.port)
    assert seen[ANSWERED] == seen[ENQUEUED] == 65


def test_a_directory_of_its_own_goes_with_the_server(
    start_server: Start, sqlite_url: str, tmp_path: Path, eventually: Any
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ("--database-url", sqlite_url, "--workers", "2", "--tracker", "prometheus")
    server = start_server(*options, TMPDIR=str(temporary)).ready()
    enqueue(server, 10)
    assert scrape(server.port)[ANSWERED] == 10
    assert len(list(temporary.iterdir())) == 1
    server.signal(signal.SIGKILL)
    # Its workers end by themselves, and take it with them.
    eventually(lambda: not list(temporary.iterdir()))


def test_the_exporter_and_a_server_with_one_worker(
    start_server: Start, start_exporter: Any, tmp_path: Path, eventually: Any
) -> None:
    variables = {DIRECTORY_VARIABLE: str(tmp_path / "metrics")}
    server = start_server("--database-url", "memory://", "--tracker", "prometheus", **variables).ready()
    exporter = start_exporter(**variables)
    enqueue(server, 10)
    eventually(lambda: scrape(exporter.port).get(QUEUED) == 10)
    eventually(lambda: agreed(server, exporter))
    samples = scrape(exporter.port)
    assert samples[ANSWERED] == 10
    assert fetch(exporter.port, "/v1/prometheus")[1] == fetch(exporter.port, "/v1/prometheus/")[1]
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    after = scrape(exporter.port)
    assert after[ANSWERED] == 10
    assert QUEUED not in after
    assert "Traceback" not in exporter.stop()


def test_what_the_exporter_answers(start_exporter: Any, tmp_path: Path) -> None:
    directory = tmp_path / "metrics"
    directory.mkdir()
    variables = {DIRECTORY_VARIABLE: str(directory), "LIGHTNING_SQL_TOKEN": "sesame", "LIGHTNING_SQL_PORT": "1"}
    exporter = start_exporter("--metrics-path", "/all/of-them/", "--access-log", **variables)
    port = exporter.port
    for path in ("/health", "/health/"):
        assert fetch(port, path) == (200, '{"status":"ok"}')
    for path in ("/all/of-them", "/elsewhere", "/"):
        assert fetch(port, path)[0] == 401
        assert fetch(port, path, Authorization="Bearer wrong")[0] == 401
    own = {"Authorization": "Bearer sesame"}
    for path in ("/all/of-them", "/all/of-them/", "/all/of-them?name=x"):
        assert fetch(port, path, **own) == (200, "")
    for path in ("/elsewhere", "/", "/v1/prometheus", "/all", "/all/of-them/too", "//all/of-them"):
        assert fetch(port, path, **own)[0] == 404
    assert fetch(port, "/all/of-them", "POST", **own)[0] == 405
    assert fetch(port, "/all/of-them", "HEAD", **own) == (200, "")
    directory.rmdir()
    assert fetch(port, "/all/of-them", **own)[0] == 503
    assert fetch(port, "/health")[0] == 200
    logged = exporter.stop()
    assert '"GET /all/of-them?name=x HTTP/1.1" 200' in logged
    assert "sesame" not in logged
    assert "Traceback" not in logged


def test_the_exporter_leaves_the_directory_as_it_is(start_exporter: Any, tmp_path: Path) -> None:
    exporter = start_exporter(**{DIRECTORY_VARIABLE: str(tmp_path)})
    assert fetch(exporter.port, "/v1/prometheus") == (200, "")
    assert "GET" not in exporter.stop()
    assert not list(tmp_path.iterdir())
