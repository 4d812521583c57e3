"""The files of metrics: added up when their processes end, exactly, whoever is killed or reads meanwhile."""

import fcntl
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.parser import text_string_to_metric_families

from lightning_api import metric_directory, metric_files
from lightning_api.metric_directory import MetricDirectory, kept_metrics
from lightning_api.metric_files import MetricFiles
from lightning_api.metrics import DIRECTORY_VARIABLE, exposition_of
from lightning_api.settings import Settings
from lightning_sql.errors import ConfigurationError, OverloadedError
from tests.api.conftest import environment

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# Of every process the same: a counter of 1, another of its own label, a histogram of three buckets, and two gauges.
BUCKETS = {"1.0": 2.0, "5.0": 1.0, "+Inf": 1.0}


def make_files(directory: Path, pid: int) -> None:
    """What a process leaves."""

    def write(name: str, values: dict[str, tuple[float, float]]) -> None:
        file: Any = MmapedDict(str(directory / f"{name}_{pid}.db"))
        for key, (value, timestamp) in values.items():
            file.write_value(key, value, timestamp)
        file.close()

    write(
        "counter",
        {
            mmap_key("jobs", "jobs_total", ["kind"], ["any"], "Jobs."): (1.0, 0.0),
            mmap_key("jobs", "jobs_total", ["kind"], [f"k{pid % 7}"], "Jobs."): (10.0, 0.0),
        },
    )
    histogram = {
        mmap_key("seconds", "seconds_bucket", ["le"], [bound], "Seconds."): (count, 0.0)
        for bound, count in BUCKETS.items()
    }
    write("histogram", {**histogram, mmap_key("seconds", "seconds_sum", [], [], "Seconds."): (8.25, 0.0)})
    write("gauge_livesum", {mmap_key("busy", "busy", [], [], "Busy."): (1.0, 0.0)})
    write("gauge_mostrecent", {mmap_key("depth", "depth", [], [], "Depth."): (float(pid), float(pid))})


def samples_of(directory: Path) -> Samples:
    """What a scrape says."""
    body, _ = exposition_of(directory, "")
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def added_up(samples: Samples) -> Samples:
    """What of it outlives the processes."""
    return {key: value for key, value in samples.items() if key[0] not in ("busy", "depth")}


def left_by(count: int) -> Samples:
    """What `count` processes with ids from 1 on have counted together."""
    kinds = {f"k{kind}": 10.0 * sum(pid % 7 == kind for pid in range(1, count + 1)) for kind in range(7)}
    return {
        ("jobs_total", (("kind", "any"),)): float(count),
        **{("jobs_total", (("kind", kind),)): total for kind, total in kinds.items() if total},
        ("seconds_bucket", (("le", "1.0"),)): 2.0 * count,
        ("seconds_bucket", (("le", "5.0"),)): 3.0 * count,
        ("seconds_bucket", (("le", "+Inf"),)): 4.0 * count,
        ("seconds_count", ()): 4.0 * count,
        ("seconds_sum", ()): 8.25 * count,
    }


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


ARCHIVES = {"counter_archive.db", "histogram_archive.db"}


@pytest.mark.slow
def test_three_hundred_restarts_leave_few_files_and_exact_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _file: None)  # what it is for, no test can see
    files = MetricFiles(tmp_path)
    for pid in range(1, 301):
        make_files(tmp_path, pid)
        assert files.absorb([pid + 1])
        assert names_in(tmp_path) == ARCHIVES
        if not pid % 20:
            assert samples_of(tmp_path) == left_by(pid)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300_000


def test_files_of_those_who_live_are_left_alone(tmp_path: Path) -> None:
    for pid in (1, 2, 3):
        make_files(tmp_path, pid)
    before = samples_of(tmp_path)
    assert (before["busy", ()], before["depth", ()]) == (3.0, 3.0)
    assert added_up(before) == left_by(3)
    assert MetricFiles(tmp_path).absorb([1, 2])
    after = samples_of(tmp_path)
    assert (after["busy", ()], after["depth", ()]) == (2.0, 2.0)
    assert added_up(after) == left_by(3)
    assert {name for name in names_in(tmp_path) if name.endswith(("_1.db", "_2.db"))} == {
        f"{kind}_{pid}.db" for kind in ("counter", "histogram", "gauge_livesum", "gauge_mostrecent") for pid in (1, 2)
    }


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ends the process before the nth time that it changes something in the file system."""
    left = -1

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, change)

    for name in ("rename", "unlink", "write_text"):
        counted(Path, name)
    for name in ("__init__", "write_value"):
        counted(MmapedDict, name)

    def kill(number: int) -> None:
        nonlocal left
        left = number

    return kill


@pytest.mark.slow
def test_a_kill_at_any_step_neither_loses_nor_doubles(tmp_path: Path, kill_at: Callable[[int], None]) -> None:
    step, completed = 0, False
    while not completed:
        step += 1
        directory = tmp_path / str(step)
        directory.mkdir()
        kill_at(-1)
        for pid in (1, 2):
            make_files(directory, pid)
        assert MetricFiles(directory).absorb()
        for pid in (3, 4, 5):
            make_files(directory, pid)
        kill_at(step)
        try:
            completed = MetricFiles(directory).absorb([5])
        except Killed:
            kill_at(-1)
            assert added_up(samples_of(directory)) == left_by(5)
            # Whoever goes on may be killed at the same step again.
            kill_at(step)
            try:
                MetricFiles(directory).absorb()
            except Killed:
                kill_at(-1)
                assert added_up(samples_of(directory)) == left_by(5)
        kill_at(-1)
        assert MetricFiles(directory).absorb()
        assert samples_of(directory) == left_by(5)
        assert names_in(directory) == ARCHIVES
    assert step > 30


@pytest.mark.slow
def test_whoever_reads_meanwhile_sees_each_file_once(tmp_path: Path) -> None:
    count = 60
    for pid in range(1, count + 1):
        make_files(tmp_path, pid)
    wrong: list[Samples] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen = added_up(samples_of(tmp_path))
            if seen != left_by(count):
                wrong.append(seen)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for pid in range(1, count + 1):
            # A lock that is taken in turns is had in time.
            assert MetricFiles(tmp_path).absorb(range(pid + 1, count + 1))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert names_in(tmp_path) == ARCHIVES


def test_somebody_who_never_stops_to_read_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(metric_files, "_READ_LOCK_SECONDS", 0.05)
    make_files(tmp_path, 1)
    before = names_in(tmp_path)
    reading = metric_files.take_lock(tmp_path / ".lock", fcntl.LOCK_EX, 0)
    assert reading is not None
    with pytest.raises(OverloadedError):
        samples_of(tmp_path)
    assert not MetricFiles(tmp_path).absorb()
    os.close(reading)
    assert names_in(tmp_path) == before
    assert MetricFiles(tmp_path).absorb()
    assert samples_of(tmp_path) == left_by(1)


def test_a_file_that_has_just_been_made_is_not_read_yet(tmp_path: Path) -> None:
    make_files(tmp_path, 1)
    (tmp_path / "counter_2.db").touch()
    assert added_up(samples_of(tmp_path)) == left_by(1)
    assert MetricFiles(tmp_path).absorb()
    assert samples_of(tmp_path) == left_by(1)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\x10\x00\x00\0\0\0\0" + b"\xff" * 4096,
        b"\x10\x27\x00\x00" + b"\0" * 60_000,
        b"\x40",
        b"\x40\x00\x00\x00" * 3,
    ],
)
def test_what_is_damaged_is_left_out(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    make_files(tmp_path, 1)
    (tmp_path / "counter_2.db").write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert MetricFiles(tmp_path).absorb()
    assert "counter_2.db" in caplog.text
    assert samples_of(tmp_path) == left_by(1)


RECORD = """
import random, sys
from lightning_api.metrics import PrometheusRecorder
from lightning_sql.metrics import METRICS, ROLLOUTS_DURATION, SPANS
recorder = PrometheusRecorder()
seeded = random.Random(int(sys.argv[1]))
for number in range(300):
    recorder.observe(ROLLOUTS_DURATION, ("succeeded", f"mode {number % 60}"), seeded.expovariate(0.1))
recorder.count(SPANS, (), 3)
"""


@pytest.mark.slow
def test_no_order_of_adding_makes_a_sum_smaller(tmp_path: Path) -> None:
    """Prometheus takes a sum that is smaller by its last digit for a process that began anew."""
    pids: list[int] = []
    for seed in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", RECORD, str(seed)], env=environment(**{DIRECTORY_VARIABLE: str(tmp_path)})
        )
        assert process.wait(60) == 0
        pids.append(process.pid)
    before = samples_of(tmp_path)
    assert before["lightning_sql_spans_total", ()] == 15
    labels = (("mode", "mode 59"), ("status", "succeeded"))
    assert before["agl_rollouts_duration_count", labels] == 25
    for ended in (3, 1, 4, 0, 2):
        pids[ended] = 0
        assert MetricFiles(tmp_path).absorb(pids)
        after = samples_of(tmp_path)
        gone = before.keys() - after.keys()
        assert {name for name, _ in gone} <= {"lightning_sql_build_info", "lightning_sql_calls_in_flight"}
        assert after == {key: value for key, value in before.items() if key in after}
    assert names_in(tmp_path) == ARCHIVES


PROMETHEUS = Settings(database_url="sqlite:///x", tracker="prometheus", workers=2)


def test_a_directory_belongs_to_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_directory, "_SERVER_SECONDS", 0.05)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "made" / "here"))
    for _ in range(2):
        with kept_metrics(PROMETHEUS) as kept:
            assert kept is not None
            assert kept.path.is_dir()
            make_files(kept.path, 1)
            with pytest.raises(ConfigurationError, match="another server"), kept_metrics(PROMETHEUS):
                pass
    assert names_in(kept.path) == ARCHIVES
    assert samples_of(kept.path)["jobs_total", (("kind", "any"),)] == 2.0


@pytest.mark.parametrize("place", ["file", "file/below", "link"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / place))
    with pytest.raises(ConfigurationError, match="cannot be written: "), kept_metrics(PROMETHEUS):
        pass


def test_a_directory_is_made_only_where_one_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for settings in (Settings(workers=2), Settings(tracker="prometheus"), Settings(tracker="console")):
        with kept_metrics(settings) as kept:
            assert kept is None
            assert DIRECTORY_VARIABLE not in os.environ
    with kept_metrics(PROMETHEUS) as kept:
        assert kept is not None
        assert [kept.path] == list(tmp_path.iterdir())
        assert os.environ[DIRECTORY_VARIABLE] == str(kept.path)
        make_files(kept.path, 1)
    assert DIRECTORY_VARIABLE not in os.environ
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(DIRECTORY_VARIABLE, "")
    with kept_metrics(Settings(tracker="prometheus")) as kept:
        assert kept is not None
        assert [kept.path] == list(tmp_path.iterdir())


def wait_for(connection: Connection, _kept: MetricDirectory) -> None:
    connection.recv()


@pytest.mark.slow
def test_a_directory_is_in_use_until_the_last_process_of_its_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was killed may have workers that still count."""
    monkeypatch.setattr(metric_directory, "_SERVER_SECONDS", 0.05)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with kept_metrics(PROMETHEUS) as kept:
        assert kept is not None
        worker = spawn.Process(target=wait_for, args=(theirs, kept))
        worker.start()
    try:
        with pytest.raises(ConfigurationError, match="another server"), kept_metrics(PROMETHEUS):
            pass
        ours.send("enough")
    finally:
        worker.join(60)
        worker.close()
    with kept_metrics(PROMETHEUS):
        pass
