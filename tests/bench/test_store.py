"""The workloads of an algorithm and its runners: what they send, what is checked, and small runs of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click import ClickException
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench import presets, store
from bench.algorithm import compare
from bench.drivers.rollouts import StoredSpan
from bench.fleet import jobs_of
from bench.presets import PRESETS, PUBLISHED, Workload
from bench.processes import BenchError, free_port, started, wait_until_healthy
from bench.store import Settings, run_workload
from bench.traces import REWARD_NAME, Step, Trace, mean_sleep, span_id, steps_of
from tests.commands import call, run_module

SMALL = Workload(mode="batch", total_tasks=12, batch_size=5, n_runners=4, max_rounds=2, sleep_seconds=0.01)
QUICK = Settings(processes=2, poll_seconds=0.05, stale_seconds=30.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over a store in memory, whose queue is empty whenever a test begins."""
    with memory_server(tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[str]:
    """Such a server for a test that leaves something in the queue."""
    with memory_server(tmp_path / "server.log") as url:
        yield url


@contextmanager
def memory_server(log: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "lightning_api", "serve", "--port", str(port), "--database-url", "memory://"]
    with log.open("wb") as output, started(command, stdout=output, stderr=output) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url, log, 60.0)
        yield url


def bench_store(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("bench.store", *arguments)


class TestPresets:
    def test_each_is_what_the_field_runs(self) -> None:
        shapes = {
            name: (one.mode, one.total_tasks, one.n_runners, one.max_rounds, one.sleep_seconds)
            for name, one in PRESETS.items()
        }
        assert shapes == {
            "minimal": ("batch", 4096, 32, 6, 0.5),
            "medium": ("batch", 10_000, 100, 10, 0.1),
            "midhigh": ("batch", 20_000, 300, 6, 0.1),
            "large-batch": ("batch", 50_000, 1000, 3, 0.1),
            "long-queues": ("batch_partial", 50_000, 256, 4, 0.1),
            "high-concurrency": ("single", 50_000, 256, 2, 0.1),
            "heavy-traces": ("batch_partial", 10_000, 512, 20, 1.0),
        }
        assert set(PUBLISHED) == set(PRESETS) - {"high-concurrency"}

    def test_the_ceiling_is_that_of_the_sleeps(self) -> None:
        assert PRESETS["minimal"].ceiling == pytest.approx(32 / 3.0)
        assert PRESETS["large-batch"].ceiling == pytest.approx(1000 / 0.3)

    def test_a_scale_changes_the_number_of_tasks_alone(self) -> None:
        scaled = PRESETS["medium"].scaled(0.05)
        assert scaled.total_tasks == 500
        assert scaled.parameters() | {"total_tasks": 10_000} == PRESETS["medium"].parameters()
        assert PRESETS["medium"].scaled(1e-9).total_tasks == 1

    @pytest.mark.parametrize(
        ("mode", "missing"), [("batch", "batch-size"), ("batch_partial", "remaining-tasks"), ("single", "concurrency")]
    )
    def test_a_mode_needs_its_options(self, mode: Any, missing: str) -> None:
        with pytest.raises(BenchError, match=f"--mode {mode} needs .*--{missing}"):
            Workload(mode=mode, total_tasks=1, n_runners=1, max_rounds=1, sleep_seconds=0.0)

    def test_an_unknown_one_is_named(self) -> None:
        with pytest.raises(BenchError, match="'huge' is none of the presets minimal, medium"):
            presets.preset("huge")


class TestTraces:
    def test_a_task_always_does_the_same(self) -> None:
        assert steps_of(7, 6, 0.5) == steps_of(7, 6, 0.5)
        assert steps_of(7, 6, 0.5) != steps_of(8, 6, 0.5)

    def test_the_shape_of_a_trace(self) -> None:
        for task in range(50):
            steps = steps_of(task, 6, 0.5)
            rounds = sum(step.attributes is not None for step in steps) // 2
            rewards = [step for step in steps if step.reward is not None]
            assert 1 <= rounds <= 6
            assert len(steps) == 3 * rounds + 2 + len(rewards)
            assert 1 <= len(rewards) <= rounds + 1
            assert sum(step.task for step in steps) == 1
            assert [step.name for step in steps[-2:]] == [REWARD_NAME, "session"]
            assert all(step.parent is not None and step.parent > number for number, step in enumerate(steps[:-1]))

    def test_the_mean_of_what_is_slept(self) -> None:
        slept = [sum(step.sleep for step in steps_of(task, 6, 0.5)) for task in range(2000)]
        assert sum(slept) / len(slept) == pytest.approx(mean_sleep(6, 0.5), rel=0.05)

    def test_an_export_is_what_the_library_reads(self) -> None:
        trace = Trace("ro-1", "at-1", 3, "run 3")
        step = Step("act", 0.1, 5, task=True, reward=0.25, parent=2)
        body = trace.export([trace.span(1, step, 1000.5, 1001.25), trace.span(2, Step("session"), 1000.0, 1002.0)])
        request = ExportTraceServiceRequest.FromString(body)
        [resource_spans] = request.resource_spans
        resource = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
        assert resource["agentlightning.rollout_id"] == "ro-1"
        assert resource["agentlightning.attempt_id"] == "at-1"
        [scope_spans] = resource_spans.scope_spans
        span, session = scope_spans.spans
        assert (session.name, session.span_id, session.parent_span_id) == ("session", span_id(2), b"")
        assert (span.name, span.span_id, span.parent_span_id) == ("act", span_id(1), span_id(2))
        assert (len(span.trace_id), int.from_bytes(span.trace_id, "big")) == (16, 4)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000_500_000_000, 1_001_250_000_000)
        found = {pair.key: pair.value for pair in span.attributes}
        assert found["task"].string_value == "run 3"
        assert found["agentlightning.reward.0.value"].double_value == 0.25
        assert len(found) > 4
        # What is not known to the library would be kept beside, and so would be longer than what it writes itself.
        assert request.SerializeToString() == body

    def test_runners_are_numbered_once(self) -> None:
        common: dict[str, Any] = {"base_url": "", "run": "", "max_rounds": 1, "sleep_seconds": 0.0}
        common |= {"poll_seconds": 1.0, "exporter": "batch"}
        jobs = jobs_of(10, 3, **common)
        assert [number for job in jobs for number in range(job.first, job.first + job.runners)] == list(range(10))
        assert len(jobs_of(2, 8, **common)) == 2


def stored(steps: list[Step], task: str) -> list[StoredSpan]:
    def attributes(step: Step) -> msgspec.Raw:
        found: dict[str, Any] = {"task": task} if step.task else {}
        found |= {"agentlightning.reward.0.value": step.reward} if step.reward is not None else {}
        return msgspec.Raw(json.dumps(found).encode())

    return [
        StoredSpan(span_id(number).hex(), "at-1", number + 1, step.name, attributes(step))
        for number, step in enumerate(steps)
    ]


class TestChecks:
    STEPS = steps_of(1, 4, 0.1)

    def test_what_was_sent_is_complete(self) -> None:
        assert compare(self.STEPS, stored(self.STEPS, "run 1"), "run 1") == (0, None)

    def test_a_span_that_is_missing(self) -> None:
        found = compare(self.STEPS, stored(self.STEPS, "run 1")[1:], "run 1")
        assert found == (1, f"{len(self.STEPS) - 1} of {len(self.STEPS)} spans are there, and 0 others")

    def test_a_span_too_many(self) -> None:
        spans = stored(self.STEPS, "run 1")
        assert compare(self.STEPS, [*spans, spans[0]], "run 1")[0] == 1

    def test_spans_of_another_task(self) -> None:
        assert compare(self.STEPS, stored(self.STEPS, "run 2"), "run 1") == (0, "the span that names its task does not")

    def test_spans_of_two_attempts(self) -> None:
        spans = stored(self.STEPS, "run 1")
        spans[0].attempt_id = "at-2"
        assert compare(self.STEPS, spans, "run 1") == (0, "its spans are not all of one attempt")

    def test_a_sequence_id_twice(self) -> None:
        spans = stored(self.STEPS, "run 1")
        spans[0].sequence_id = 2
        assert compare(self.STEPS, spans, "run 1") == (0, "two of its spans have the same sequence id")

    def test_a_last_reward_that_is_none(self) -> None:
        spans = stored(self.STEPS, "run 1")
        spans[-2].attributes = msgspec.Raw(b'{"agentlightning.reward.0.value": 7.5}')
        assert compare(self.STEPS, spans, "run 1") == (0, "its last reward is 7.5")


@pytest.mark.slow
class TestRun:
    @pytest.mark.parametrize(
        "changes",
        [
            {"mode": "batch"},
            {"mode": "batch_partial", "remaining_tasks": 3, "exporter": "simple"},
            {"mode": "single", "concurrency": 6},
        ],
        ids=["batch", "batch_partial", "single"],
    )
    def test_every_task_gets_done(self, server: str, changes: dict[str, Any]) -> None:
        workload = Workload(**(SMALL.parameters() | changes))
        told: list[int] = []
        run = run_workload(server, workload, QUICK, told.append)
        assert run.complete
        assert (run.tally.succeeded, run.tally.failures, run.stale, run.wrong_spans) == (12, [], 0, 0)
        assert sum(told) == 12
        # What a runner sends for a rollout: see docs/benchmarks.md.
        counted = {kind: tally.succeeded for kind, tally in run.requests.tallies.items()}
        assert (counted["dequeue"], counted["resources"], counted["update"]) == (12, 12, 12)
        spans = sum(len(steps_of(task, 2, 0.01)) for task in range(12))
        if workload.exporter == "simple":
            assert counted["spans"] == spans
        else:
            # One at its end, unless this machine was so slow that a second went by before.
            assert 12 <= counted["spans"] < spans

    def test_a_run_from_the_command_line(self, server: str, tmp_path: Path) -> None:
        summaries = tmp_path / "summaries"
        given = ["--preset", "minimal", "--scale", "0.002", "--n-runners", "8", "--sleep-seconds", "0.01"]
        done = bench_store(*given, "--poll-seconds", "0.05", "--store-url", server, "--summary-file", str(summaries))
        assert done.returncode == 0, done.stdout + done.stderr
        [line] = summaries.read_text().splitlines()
        found = json.loads(line)
        assert (found["family"], found["name"], found["tasks"], found["succeeded"]) == ("store", "minimal", 8, 8)
        assert found["parameters"] == {
            "mode": "batch",
            "total_tasks": 8,
            "batch_size": 256,
            "n_runners": 8,
            "max_rounds": 6,
            "sleep_seconds": 0.01,
            "exporter": "batch",
        }
        assert (found["extra"]["stale"], found["extra"]["wrong spans"], found["extra"]["failed calls"]) == (0, 0, 0)

    def test_what_never_finishes_is_stale(self, own_server: str) -> None:
        slow = Workload(mode="batch", total_tasks=3, batch_size=3, n_runners=2, max_rounds=1, sleep_seconds=600.0)
        run = run_workload(own_server, slow, Settings(processes=1, poll_seconds=0.05, stale_seconds=0.5))
        assert not run.complete
        assert (run.tally.succeeded, run.tally.failed, run.stale) == (0, 3, 3)
        assert run.tally.failures[0] == "no rollout has finished for 0.5 s"
        assert run.tally.failures[1].startswith("stale: task 0 (ro-")

    def test_a_queue_that_is_not_empty_is_left_alone(self, own_server: str) -> None:
        left = json.dumps({"rollouts": [{"input": "left"}]})
        path = "/v1/agl/queues/rollouts/enqueue"
        status, _ = call(int(own_server.rpartition(":")[2]), path, left, {"content-type": "application/json"})
        assert status == 201
        with pytest.raises(BenchError, match=r"^\d+ rollouts are in the queue of http://127"):
            run_workload(own_server, SMALL, QUICK)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--scale", "0"], "Invalid value for '--scale': 0.0 is not in the range x>0.0."),
            (["--preset", "huge"], "Invalid value for '--preset': 'huge' is not one of 'minimal', 'medium'"),
            (["--n-runners", "0"], "Invalid value for '--n-runners': 0 is not in the range x>=1."),
            (["--preset", "minimal", "--mode", "single"], "--mode single needs --concurrency"),
            (["--scale", "0.1"], "nobody answers at http://127.0.0.1:9"),
            (["--summary-file", "/no/such/folder"], "the summary file /no/such/folder cannot be written"),
        ],
        ids=["scale", "preset", "runners", "mode", "server", "summary"],
    )
    def test_what_cannot_be_is_said_at_once(self, given: list[str], said: str) -> None:
        with pytest.raises((ClickException, BenchError)) as raised:
            store.main.main(["--store-url", "http://127.0.0.1:9", *given], standalone_mode=False)
        error = raised.value
        message = error.format_message() if isinstance(error, ClickException) else str(error)
        assert said in message
        assert "\n" not in message

    @pytest.mark.slow
    def test_it_is_one_line_and_a_status_of_its_own(self) -> None:
        done = bench_store("--mode", "batch_partial", "--preset", "minimal", "--store-url", "http://127.0.0.1:9")
        assert (done.returncode, done.stderr) == (2, "bench.store: --mode batch_partial needs --remaining-tasks\n")
