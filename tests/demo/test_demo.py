"""The demo tells the truth about the store that it ran on."""

import asyncio
import io
import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_api.demo import MAX_ATTEMPTS, Demo, DemoOptions, Report, report_table, run_demo, script_of, show
from lightning_sql.errors import ConfigurationError, LightningError
from lightning_sql.records import EnqueueRolloutRequest, Span
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.commands import call, environment, run, serving

TOKEN = "a-long-secret"


def small(rollouts: int = 3, runners: int = 2) -> DemoOptions:
    """A run whose hung attempts are given up soon."""
    return DemoOptions(rollouts=rollouts, runners=runners, step_seconds=0.002, timeout_seconds=0.5)


def expected(options: DemoOptions) -> dict[str, int]:
    """What the closing table must say, counted by hand from what the scripts are to do."""
    counts = Counter[str]()
    for number in range(options.rollouts):
        ending = ""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            script = script_of(options, number, attempt)
            ending = script.ending
            counts["attempts"] += 1
            counts["of these retries"] += attempt > 1
            counts["of these taken from a hung runner"] += ending == "hangs"
            counts["spans"] += len(script.pauses) + (ending == "succeeded")
            if ending == "succeeded":
                break
        counts["rollouts succeeded" if ending == "succeeded" else "rollouts failed"] += 1
    return dict(counts)


def told(text: str) -> tuple[dict[str, int], list[str]]:
    """The numbers and the verdicts of a closing table."""
    rows = re.findall(r"^│ (.+?) +│ +(\S+) │$", text, re.MULTILINE)
    numbers = {name: int(value) for name, value in rows if value.isdigit()}
    return numbers, [value for _, value in rows if value in ("yes", "NO")]


def printed(report: Report) -> str:
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(report_table(report))
    return console.export_text()


def as_expected(text: str, options: DemoOptions) -> bool:
    numbers, verdicts = told(text)
    # A status that no rollout has is not a row.
    return Counter(numbers) == Counter(expected(options)) and verdicts == ["yes"] * 5


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with await open_store("memory://", scan_debounce_seconds=0) as opened:
        yield opened


@pytest.mark.slow
async def test_a_run_in_process_is_reported_as_it_was(store: LightningStore) -> None:
    options = DemoOptions(rollouts=60, runners=5, seed=3, step_seconds=0.002)
    report = await show(Demo(store, options), Console(quiet=True))
    assert as_expected(printed(report), options)
    statistics = await store.statistics()
    assert statistics["total_rollouts"] == 60
    assert statistics["total_attempts"] == report.attempts
    assert statistics["total_spans"] == report.spans
    assert statistics["total_workers"] == 5


def test_what_is_simulated_follows_from_the_seed() -> None:
    options = [DemoOptions(seed=seed) for seed in (0, 0, 1)]
    first, same, other = ([script_of(each, number, 1) for number in range(200)] for each in options)
    assert first == same
    assert first != other


@pytest.mark.parametrize("rollouts", [1, 7, 200])
def test_something_always_hangs(rollouts: int) -> None:
    options = DemoOptions(rollouts=rollouts, seed=5)
    assert expected(options)["of these taken from a hung runner"] >= 1
    assert all(script_of(options, number, 2).ending != "hangs" for number in range(rollouts))


def test_the_default_run_has_something_of_everything() -> None:
    assert all(expected(DemoOptions()).values())


async def failed_checks(demo: Demo) -> list[str]:
    report = await demo.run()
    assert not report.sound
    assert "NO" in told(printed(report))[1]
    return [check for check, passed in report.checks.items() if not passed]


@pytest.mark.slow
async def test_claims_that_the_store_does_not_know_are_reported(store: LightningStore) -> None:
    demo = Demo(store, small())
    demo.seen.claims.append(("ro-of-nobody", 1))
    assert await failed_checks(demo) == ["every claim is in the store, and nothing else"]


@pytest.mark.slow
async def test_a_rollout_that_two_runners_got_is_reported(store: LightningStore) -> None:
    demo = Demo(store, small())
    claim = store.dequeue_rollout
    twice: list[Any] = []

    async def claim_one_twice(**arguments: Any) -> Any:
        if len(twice) == 1:
            twice.append(None)
            return twice[0]
        claimed = await claim(**arguments)
        if claimed is not None and not twice:
            twice.append(claimed)
        return claimed

    store.dequeue_rollout = claim_one_twice  # pyright: ignore[reportAttributeAccessIssue]
    assert "no rollout was claimed twice for one attempt" in await failed_checks(demo)


@pytest.mark.slow
async def test_a_span_that_is_lost_after_its_acknowledgement_is_reported(store: LightningStore) -> None:
    demo = Demo(store, small())
    add, lost = store.add_span, list[Span]()

    async def lose_the_first(span: Span) -> Span | None:
        if lost:
            return await add(span)
        lost.append(span)
        return span

    store.add_span = lose_the_first
    assert await failed_checks(demo) == ["every acknowledged span is stored, and once"]


@pytest.mark.slow
async def test_a_span_whose_acknowledgement_is_lost_is_none_too_many(store: LightningStore) -> None:
    demo = Demo(store, small())
    add, unheard = store.add_span, list[Span]()

    async def answer_nothing_once(span: Span) -> Span | None:
        stored = await add(span)
        if unheard:
            return stored
        unheard.append(span)
        return None

    store.add_span = answer_nothing_once
    assert (await demo.run()).sound


async def test_rollouts_of_others_are_not_touched(store: LightningStore) -> None:
    theirs = await store.enqueue_rollout("not the demo's")
    with pytest.raises(ConfigurationError, match="holds 1 rollouts"):
        await Demo(store, DemoOptions(rollouts=3)).run()
    assert (await store.query_rollouts()).items == [theirs]
    assert (await store.query_attempts(theirs.rollout_id)).total == 0


async def test_rollouts_that_others_enqueue_meanwhile_are_given_back(store: LightningStore) -> None:
    demo = Demo(store, DemoOptions(rollouts=3, runners=1))
    enqueue = store.enqueue_many_rollouts

    async def enqueue_after_others(requests: Any) -> Any:
        await enqueue([EnqueueRolloutRequest(input="not the demo's")])
        return await enqueue(requests)

    store.enqueue_many_rollouts = enqueue_after_others  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ExceptionGroup) as caught:
        await demo.run()
    assert [type(error) for error in caught.value.exceptions] == [ConfigurationError]
    await demo.withdraw()
    theirs, *own = (await store.query_rollouts()).items
    assert (theirs.input, theirs.status) == ("not the demo's", "requeuing")
    assert [rollout.status for rollout in own] == ["cancelled"] * 3


async def test_a_store_that_fails_on_the_way_ends_the_run(store: LightningStore) -> None:
    async def fail(**_: object) -> None:
        raise LightningError("gone")

    store.dequeue_rollout = fail  # pyright: ignore[reportAttributeAccessIssue]
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await show(Demo(store, DemoOptions(rollouts=5, runners=2)), Console(quiet=True))


@pytest.mark.slow
async def test_a_terminal_gets_a_live_display(store: LightningStore) -> None:
    options = small(10, 3)
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    report = await show(Demo(store, options), console)
    assert report.sound
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in ("/10", "busy", "idle", "retries", "rollouts/s", "succeeded"):
        assert part in shown, part


# As a command


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


@pytest.fixture
def server(tmp_path: Path, variables: dict[str, str], unused_tcp_port: int) -> Iterator[int]:
    """The port of a server with a token."""
    command = ["lightning-sql", "serve", "--port", str(unused_tcp_port), "--scan-debounce-seconds", "0.2"]
    with serving([*command, "--token", TOKEN], unused_tcp_port, tmp_path, variables):
        yield unused_tcp_port


def counted(port: int, query: str = "") -> int:
    status, body = call(port, f"/v1/agl/rollouts?limit=1{query}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert status == 200
    return json.loads(body)["total"]


@pytest.mark.slow
def test_without_a_terminal_it_prints_plain_lines(tmp_path: Path, variables: dict[str, str]) -> None:
    command = ["lightning-sql", "demo", "--rollouts", "20", "--runners", "4", "--seed", "2"]
    done = run(command, tmp_path, variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("20/20 finished") == 1
    assert as_expected(done.stdout, DemoOptions(rollouts=20, runners=4, seed=2))
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_a_server_that_is_running(tmp_path: Path, variables: dict[str, str], server: int) -> None:
    command = ["lightning-sql", "demo", "--url", f"http://127.0.0.1:{server}", "--rollouts", "20", "--seed", "2"]
    done = run(command, tmp_path, variables | {"LIGHTNING_SQL_TOKEN": TOKEN})
    assert (done.returncode, done.stderr) == (0, "")
    assert as_expected(done.stdout, DemoOptions(rollouts=20, seed=2))
    assert counted(server) == 20
    again = run([*command, "--token", TOKEN], tmp_path, variables)
    assert told(again.stdout) == told(done.stdout)
    refused = run([*command, "--token", "another"], tmp_path, variables)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert counted(server) == 40


@pytest.mark.slow
@pytest.mark.parametrize("aimed", [False, True])
def test_an_interrupt_leaves_nothing_behind(
    aimed: bool, tmp_path: Path, variables: dict[str, str], server: int
) -> None:
    address = ["--url", f"http://127.0.0.1:{server}", "--token", TOKEN] if aimed else []
    with subprocess.Popen(
        ["lightning-sql", "demo", "--rollouts", "400", *address],
        cwd=tmp_path,
        env=variables | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while " finished  " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert counted(server) == (400 if aimed else 0)
    assert counted(server, "&status_in=queuing&status_in=requeuing&status_in=preparing&status_in=running") == 0


@pytest.mark.slow
@pytest.mark.parametrize("address", ["here", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://[::1"])
def test_a_malformed_address_is_one_line(address: str, tmp_path: Path, variables: dict[str, str]) -> None:
    done = run(["lightning-sql", "demo", "--url", address], tmp_path, variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--url" in done.stderr


def test_a_server_that_does_not_answer_is_one_error(unused_tcp_port: int) -> None:
    with pytest.raises(LightningError) as caught:
        run_demo(DemoOptions(url=f"http://127.0.0.1:{unused_tcp_port}"), Console(quiet=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", ["404 Not Found", "200 OK"])
async def test_a_server_of_another_kind_is_one_error(answer: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = DemoOptions(url=f"http://127.0.0.1:{port}")
        with pytest.raises(ConfigurationError, match="is no lightning-sql server"):
            await asyncio.to_thread(run_demo, options, Console(quiet=True))
