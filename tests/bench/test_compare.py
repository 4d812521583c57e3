"""The comparison: its sums, what it checks, what it writes, and one small run of it."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from bench import compare, document, peer
from bench.cpu import tree_seconds
from bench.databases import data_folder
from bench.drivers.calls import CallFailedError, Calls, Claim, NotAvailableError
from bench.drivers.jobs import cycle, many_spans, page, read_spans, singles
from bench.drivers.lean import span_body
from bench.drivers.meter import TOO_MANY, GaveUpError, Meter, quantile
from bench.drivers.run import answer
from bench.machine import Machine
from bench.payloads import span, span_name
from bench.plan import Metric, Plan, Source, Work, rotated
from bench.processes import ROOT, BenchError, Outcome, python_path
from bench.results import Figure, Samples, figure_of
from bench.scale import FULL, QUICK
from bench.scenarios import Choice, chosen_kinds, whole_plan
from bench.seed import fill
from bench.seeds import seed_of, succeeded_among
from bench.servers import OURS, Target

OURS_AT = Target("postgres")
PEER_AT = Target("upstream")
WORK = Work("work", "small", "lean", "cycle", {})
METRIC = Metric(
    name="work.postgres",
    unit="calls/s",
    better="more",
    ours=Source("work", OURS_AT, "rate"),
    peer=Source("work", PEER_AT, "rate"),
    floor=4.0,
    target=5.0,
)


def sampled(ours: Sequence[float], theirs: Sequence[float]) -> Samples:
    samples = Samples()
    for target, values in ((OURS_AT, ours), (PEER_AT, theirs)):
        for value in values:
            samples.add(WORK, target, Outcome({"rate": value}, calls=10))
    return samples


class TestFigures:
    def test_a_ratio_is_that_of_the_medians(self) -> None:
        figure = figure_of(METRIC, sampled([100, 400, 500], [10, 100, 1000]))
        assert (figure.ours, figure.peer, figure.ratio) == (400, 100, 4.0)

    @pytest.mark.parametrize(
        ("better", "ours", "reached"),
        [
            ("more", 399, "below"),
            ("more", 400, "floor"),
            ("more", 499, "floor"),
            ("more", 500, "target"),
            ("less", 500, "below"),
            ("less", 400, "floor"),
            ("less", 300, "target"),
        ],
    )
    def test_the_verdict(self, better: Any, ours: float, reached: str) -> None:
        floor, target = (4.0, 5.0) if better == "more" else (4.0, 3.0)
        metric = replace(METRIC, better=better, floor=floor, target=target)
        assert figure_of(metric, sampled([ours], [100])).verdict == reached

    def test_what_every_store_must_pay_is_taken_off_first(self) -> None:
        metric = replace(METRIC, less=Source("work", OURS_AT, "commit"))
        samples = sampled([], [4])
        samples.add(WORK, OURS_AT, Outcome({"rate": 5.0, "commit": 3.0}))
        figure = figure_of(metric, samples)
        assert (figure.ours, figure.less, figure.ratio) == (5.0, 3.0, 0.5)

    def test_without_the_peer_there_is_no_ratio(self) -> None:
        figure = figure_of(replace(METRIC, peer=None), sampled([7], []))
        assert (figure.ours, figure.peer, figure.ratio, figure.verdict) == (7, None, None, None)

    def test_what_is_not_there_says_why(self) -> None:
        samples = sampled([], [100])
        samples.add(WORK, OURS_AT, Outcome({}, unavailable="answered 404"))
        assert figure_of(METRIC, samples).note == "not available: answered 404"
        assert figure_of(METRIC, sampled([], [100])).note == "not measured"

    def test_what_is_written_of_it(self) -> None:
        metric = replace(METRIC, extra={"p50": Source("work", OURS_AT, "rate")})
        written = figure_of(metric, sampled([400, 600], [100])).as_json()
        assert json.loads(json.dumps(written)) == {
            "ours": 500,
            "peer": 100,
            "ratio": 5,
            "unit": "calls/s",
            "better": "more",
            "against": "upstream, memory",
            "floor": 4,
            "target": 5,
            "reached": "target",
            "p50": 500,
            "rounds": {"ours": [400, 600], "peer": [100]},
        }

    def test_failures_add_up(self) -> None:
        samples = sampled([1], [1])
        samples.add(WORK, OURS_AT, Outcome({"rate": 1.0}, calls=3, failed=2, failures=["a", "b"]))
        assert (samples.calls, samples.failed) == (23, 2)
        assert samples.failures == ["work on postgres: 2 failed: a; b"]

    def test_quantiles_lie_between_values(self) -> None:
        assert quantile([1.0], 0.99) == 1.0
        assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
        assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)


class TestPlan:
    @pytest.mark.parametrize("scale", [FULL, QUICK])
    @pytest.mark.parametrize("peers", [True, False])
    @pytest.mark.parametrize("drivers", [("lean",), ("upstream",), ("lean", "upstream")])
    def test_every_metric_has_its_works(self, scale: Any, peers: bool, drivers: tuple[str, ...]) -> None:
        plan = whole_plan(Choice(OURS, drivers, peers, scale))
        works = [work.name for work in plan.works]
        names = [metric.name for metric in plan.metrics]
        assert len(set(works)) == len(works)
        assert len(set(names)) == len(names)
        assert {source.work for metric in plan.metrics for source in metric.sources} <= set(works)
        measured = {source.target.kind for metric in plan.metrics for source in metric.sources}
        assert measured == {*OURS, "upstream"} if peers else set(OURS)

    def test_the_whole_run_has_every_goal_that_was_set(self) -> None:
        plan = whole_plan(Choice(OURS, ("lean", "upstream"), True, FULL))
        goals = {metric.name: (metric.floor, metric.target) for metric in plan.metrics if metric.floor}
        assert goals["cycle.upstream.postgres"] == goals["cycle.upstream.sqlite"] == (4, 5)
        assert goals["cycle.lean.postgres"] == goals["cycle.lean.sqlite"] == (5, 8)
        assert goals["cycle.lean.sqlite-normal"] == (6, 10)
        assert goals["cycle_cpu.lean.postgres"] == (1 / 5, 1 / 8)
        assert goals["overhead.enqueue.lean.sqlite"] == goals["overhead.dequeue.lean.postgres"] == (0.6, 0.4)
        assert goals["dequeue.c32.lean.postgres"] == (2, 3)
        assert goals["bulk.json.c1.postgres"] == goals["bulk.lines.c4.sqlite"] == (20, 40)
        assert goals["bulk_raw.json.c4.postgres"] == (0.5, 0.7)
        assert goals["page.total.lean.100k.postgres"] == (5, 8)
        assert goals["page.plain.1m.sqlite"] == goals["growth.wait.1m.postgres"] == (1.3, 1.3)
        assert goals["read_spans.lean.postgres"] == (1.5, 2)
        assert goals["in_process.claim.alone.postgres"] == (0.55, 0.65)
        assert goals["in_process.claim.joined.postgres"] == (2.5, 4)
        assert goals["in_process.claim_many.postgres"] == (1.5, 2)
        assert goals["in_process.update.joined.sqlite"] == (4, 5)

    def test_a_part_of_it_does_no_other_work(self) -> None:
        plan = whole_plan(Choice(OURS, ("lean", "upstream"), True, QUICK)).only(["cycle*.lean.postgres"])
        assert [metric.name for metric in plan.metrics] == ["cycle.lean.postgres", "cycle_cpu.lean.postgres"]
        assert [work.name for work in plan.works] == ["cycle.lean"]
        assert plan.targets_of(plan.works[0]) == [OURS_AT, PEER_AT]

    def test_each_round_begins_with_another_target_and_leaves_none_out(self) -> None:
        targets = [Target(kind) for kind in OURS]
        rounds = [rotated(targets, number) for number in range(4)]
        assert [order[0] for order in rounds] == targets
        assert all(set(order) == set(targets) for order in rounds)
        assert rotated([], 3) == []

    def test_targets_by_name(self) -> None:
        assert chosen_kinds("postgres, memory") == ["memory", "postgres"]
        with pytest.raises(ValueError, match="oracle"):
            chosen_kinds("postgres,oracle")


class StubCalls(Calls):
    """A store in a dictionary that can be told to go wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.queue: list[str] = []
        self.made = 0
        self.stored: dict[str, set[int]] = {}
        self.numbers: dict[str, int] = {}
        self.status: dict[str, str] = {}

    async def enqueue(self, count: int = 1) -> list[str]:
        ids = [f"ro-{number}" for number in range(self.made, self.made + count)]
        self.made += count
        self.queue += ids
        return ids

    async def dequeue(self, worker_id: str, limit: int = 1) -> list[Claim]:
        await asyncio.sleep(0)
        if self.fault == "nothing to claim":
            return []
        taken = self.queue[:limit]
        if self.fault != "claimed twice":
            del self.queue[:limit]
        return [Claim(rollout_id, "at-1") for rollout_id in taken]

    async def next_id(self, claim: Claim) -> int:
        self.numbers[claim.rollout_id] = self.numbers.get(claim.rollout_id, 0) + 1
        return self.numbers[claim.rollout_id]

    async def add_span(self, claim: Claim, number: int) -> None:
        await asyncio.sleep(0)
        if self.fault == "refused":
            raise CallFailedError("answered 500")
        if not (self.fault == "lost span" and number == 2):
            self.stored.setdefault(claim.rollout_id, set()).add(number)

    async def add_many_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        for number in numbers:
            await self.add_span(claim, number)

    async def prepare_spans(self, claim: Claim, numbers: Sequence[int], size: int) -> None:
        await self.add_many_spans(claim, numbers, size)

    async def bulk(self, claim: Claim, numbers: Sequence[int], size: int, *, lines: bool) -> None:
        raise NotAvailableError("bulk spans: answered 404")

    async def finish(self, claim: Claim) -> None:
        self.status[claim.rollout_id] = "running" if self.fault == "not finished" else "succeeded"

    async def wait(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        return {rollout_id: self.status[rollout_id] for rollout_id in rollout_ids if rollout_id in self.status}

    async def page(self, status: str, limit: int) -> tuple[int, int]:
        return limit, 1000

    async def spans(self, rollout_id: str) -> int:
        return len(self.stored.get(rollout_id, ()))

    async def close(self) -> None:
        return


class TestChecks:
    async def test_a_sound_store_passes(self) -> None:
        meter = Meter({})
        calls = StubCalls()
        await cycle(calls, meter, runners=4, seconds=0.05)
        await singles(calls, meter, clients=3, count=20, waits=2)
        await many_spans(calls, meter, clients=2, requests=2, spans=10)
        await page(calls, meter, requests=2, at_least=1000)
        await read_spans(calls, meter, requests=2, spans=30)
        assert (meter.failed, meter.failures) == (0, [])
        assert meter.values["cycle.rate"] > 0
        assert {"enqueue.p50", "dequeue.rate", "next.p50", "span.rate", "update.p99", "wait.p50"} <= meter.values.keys()

    @pytest.mark.parametrize("fault", ["claimed twice", "lost span", "not finished", "nothing to claim", "refused"])
    async def test_a_cycle_that_goes_wrong_is_counted(self, fault: str) -> None:
        meter = Meter({})
        try:
            await cycle(StubCalls(fault), meter, runners=2, seconds=0.02)
        except* GaveUpError:
            assert meter.failed >= TOO_MANY
        assert meter.failed

    @pytest.mark.parametrize("fault", ["claimed twice", "not finished", "refused"])
    async def test_single_calls_that_go_wrong_are_counted(self, fault: str) -> None:
        meter = Meter({})
        await singles(StubCalls(fault), meter, clients=2, count=10)
        assert meter.failed

    async def test_lost_spans_are_counted(self) -> None:
        meter = Meter({})
        await many_spans(StubCalls("lost span"), meter, clients=1, requests=2, spans=10)
        assert meter.failures == ["Claim(rollout_id='ro-0', attempt_id='at-1') has 19 of 20 spans"]

    async def test_a_page_of_too_few_is_counted(self) -> None:
        meter = Meter({})
        await page(StubCalls(), meter, requests=1, at_least=1001)
        assert meter.failed == 1

    async def test_a_driver_says_what_a_server_does_not_have(self) -> None:
        job: dict[str, Any] = {"params": {"clients": 2, "requests": 1, "form": "json"}}

        async def work(job: dict[str, Any], meter: Meter) -> None:
            await many_spans(StubCalls(), meter, **job["params"])

        answered = await answer(work, job)
        assert answered["unavailable"] == "bulk spans: answered 404"
        assert answered["failed"] == 0

    async def test_a_driver_counts_what_ends_a_job(self) -> None:
        async def work(job: dict[str, Any], meter: Meter) -> None:
            raise ConnectionRefusedError("nobody listens")

        answered = await answer(work, {})
        assert (answered["failed"], answered["failures"]) == (1, ["ConnectionRefusedError: nobody listens"])

    def test_cpu_time_counts_children_that_ended(self) -> None:
        before = tree_seconds(psutil.Process().pid)
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
        assert tree_seconds(psutil.Process().pid) > before


class TestPayloads:
    def test_prepared_bytes_are_the_span_that_the_client_sends(self) -> None:
        body = span_body(Claim("ro-0123456789ab", "at-01234567"), 7, 1200)
        assert json.loads(body) == span("ro-0123456789ab", "at-01234567", 7, 1200)
        assert len(body) == 1200

    def test_seeds_are_spread_and_distinct(self) -> None:
        seeds = [seed_of(number) for number in range(1, 2001)]
        assert len({seed.rollout_id for seed in seeds}) == 2000
        assert len({seed.rollout_id[:5] for seed in seeds}) > 200
        assert sum(seed.status == "succeeded" for seed in seeds) == succeeded_among(2000) == 1400

    async def test_a_filled_database_has_the_rollouts_that_the_peer_gets(self, tmp_path: Path) -> None:
        await fill(f"sqlite:///{tmp_path / 'filled.db'}", 30)
        connection = sqlite3.connect(tmp_path / "filled.db")
        try:
            rows = connection.execute(
                "SELECT r.rollout_id, a.attempt_id, r.status, r.start_time, r.end_time, s.span_id "
                "FROM rollouts r JOIN attempts a USING (partition_id, rollout_id) "
                "JOIN spans s USING (partition_id, rollout_id) ORDER BY r.seq"
            ).fetchall()
        finally:
            connection.close()
        seeds = [seed_of(number) for number in range(1, 31)]
        fields = [(s.rollout_id, s.attempt_id, s.status, s.start_time, s.end_time, span_name(1)) for s in seeds]
        assert rows == fields


MACHINE = Machine(
    cpu="some processor",
    cores=2,
    memory_gib=24,
    system="Linux 6",
    python="3.11",
    sqlite="3.40",
    postgres="15",
    shared_buffers="1GB",
    folder="ext4",
    fsyncs_per_second=(400.0, 500.0),
)


def figures(*names: str) -> list[Figure]:
    return [figure_of(replace(METRIC, name=name), sampled([500], [100])) for name in names]


class TestDocument:
    def test_what_was_written_by_hand_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "performance.md"
        document.write(path, MACHINE, figures("cycle.lean.postgres"), Samples(), 3)
        first = path.read_text()
        assert "| `cycle.lean.postgres` | calls/s | 500 | 100 | 5× | upstream, memory |" in first
        text = first.replace("## Where the time goes\n", "## Where the time goes\nMostly *here*:\n\n| a | b |\n")
        path.write_text(f"{text}\n<!-- by hand: afterthought -->\nOne more thing.\n<!-- end -->\n")
        document.write(path, MACHINE, figures("dequeue.c32.lean.postgres"), Samples(), 3)
        again = path.read_text()
        assert "## Where the time goes\nMostly *here*:\n\n| a | b |\n<!-- end -->" in again
        assert "<!-- by hand: afterthought -->\nOne more thing.\n<!-- end -->" in again
        assert "cycle.lean.postgres" not in again
        assert again.count("<!-- by hand: ") == again.count("<!-- end -->") == 3

    def test_growth_is_a_table_of_sizes(self, tmp_path: Path) -> None:
        path = tmp_path / "performance.md"
        names = [f"growth.{operation}.{size}.sqlite" for operation in ("span", "wait") for size in ("10k", "1m")]
        grown = [replace(figure, against="at 1k rollouts") for figure in figures(*names)]
        document.write(path, MACHINE, grown, Samples(), 3)
        assert "| median, ms | 1k | 10k | 1m | 1m to 1k |" in path.read_text()
        assert "| span, sqlite | 100 | 500 | 500 | 5× |" in path.read_text()


def arguments(*more: str) -> list[str]:
    return ["--quick", "--targets", "memory", "--no-peer", "--driver", "lean", *more]


class TestCommandLine:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--targets", "oracle"], "oracle is none of memory, sqlite, sqlite-normal, postgres"),
            (["--only", "nothing.*"], "no metric matches nothing.*"),
            (["--data-dir", "/dev/shm"], "is in memory or no folder"),
        ],
    )
    def test_what_cannot_be_is_said_at_once(self, given: list[str], said: str) -> None:
        result = CliRunner().invoke(compare.main, arguments(*given))
        assert result.exit_code == compare.EXIT_CANNOT_RUN
        assert said in " ".join(result.output.split())

    def test_only_a_whole_run_writes_the_document(self) -> None:
        def written(**changes: Any) -> Path | None:
            whole: dict[str, Any] = {
                "drivers": ("lean", "upstream"),
                "targets": ",".join(OURS),
                "rounds": None,
                "quick": False,
                "only": (),
                "postgres_url": None,
                "data_dir": None,
                "peer": True,
                "peer_venv": Path("peer"),
                "json_file": None,
                "docs": None,
            }
            return compare.Options(**whole | changes).document()

        assert written() == compare.DOCUMENT
        for part in (
            {"quick": True},
            {"only": ("cycle.*",)},
            {"targets": "memory"},
            {"drivers": ("lean",)},
            {"peer": False},
        ):
            assert written(**part) is None
        assert written(quick=True, docs=Path("elsewhere.md")) == Path("elsewhere.md")

    def test_data_goes_where_it_is_told(self, tmp_path: Path) -> None:
        assert data_folder(tmp_path) == tmp_path.resolve()

    @pytest.mark.slow
    def test_no_index_is_one_clear_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lock = tmp_path / "lock.txt"
        lock.write_text(f"no-such-distribution==1.0 --hash=sha256:{'0' * 64}\n")
        monkeypatch.setattr(peer, "LOCKS", ((lock, ("--no-index",)),))
        with pytest.raises(
            BenchError, match=r"^pip cannot install lock\.txt .*: ERROR: .*no-such-distribution"
        ) as raised:
            peer.peer_python(tmp_path / "venv")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "venv" / "bench-lock").exists()

    def test_a_folder_that_is_no_environment_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("mine")
        with pytest.raises(BenchError, match="no virtual environment"):
            peer.peer_python(tmp_path)
        assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.slow
class TestRun:
    def test_a_small_run(self, tmp_path: Path) -> None:
        written = tmp_path / "figures.json"
        only = ["--only", "cycle*", "--only", "dequeue.*"]
        done = subprocess.run(
            [sys.executable, "-m", "bench.compare", *arguments(*only), "--json", str(written)],
            cwd=ROOT,
            env=python_path(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 failed" in done.stdout
        found = json.loads(written.read_text())
        assert list(found) == [
            "cycle.lean.memory",
            "cycle_cpu.lean.memory",
            "dequeue.c8.lean.memory",
            "dequeue.c32.lean.memory",
        ]
        for figure in found.values():
            assert figure["ours"] > 0
            assert figure["peer"] is None
            assert figure["ratio"] is None
            assert figure["rounds"]["ours"] == [figure["ours"]]

    def test_an_interrupted_run_leaves_no_process(self, tmp_path: Path) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "bench.compare", *arguments("--rounds", "50"), "--data-dir", str(tmp_path)],
            cwd=ROOT,
            env=python_path(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as run:
            parent = psutil.Process(run.pid)
            deadline = time.monotonic() + 60
            while len(children := parent.children(recursive=True)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(children) >= 2
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_out_of_a_plan() -> None:
    plan = Plan([WORK], [METRIC])
    assert plan.only([]) == plan
    assert plan.fleets == ["small"]
    assert plan.works_of("small") == [WORK]
