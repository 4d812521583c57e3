"""The benchmarks of single operations, against a small server and against one that answers wrongly."""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import micro
from bench.drivers.micro import MicroCalls
from bench.families import EXIT_FAILED_TASKS, Bench, Result
from bench.micro import BENCHMARKS, Options
from bench.processes import BenchError, free_port
from tests.commands import environment, serving


async def measured(address: str, benchmark: str, total: int = 40, concurrency: int = 4) -> Result:
    options = Options(
        benchmark=benchmark, store_url=address, total_tasks=total, concurrency=concurrency, backend="memory"
    )
    return await micro.run(options, address, Bench("micro", None))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that keeps its store in memory and shows metrics."""
    folder, port = tmp_path_factory.mktemp("micro"), free_port()
    command = ["lightning-sql", "serve", "--database-url", "memory://", "--tracker", "prometheus", "--port", str(port)]
    with serving(command, port, folder, environment(folder)):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
class TestOnAServer:
    @pytest.mark.parametrize("benchmark", list(BENCHMARKS))
    async def test_every_task_succeeds(self, server: str, benchmark: str) -> None:
        # Twice, since a run must leave the server as the next one wants to find it.
        total = 5 if benchmark == "metrics" else 40
        for _ in range(2):
            result = await measured(server, benchmark, total)
            assert (result.tally.succeeded, result.tally.failed, result.tally.failures) == (total, 0, [])
            assert len(result.tally.latencies) == total
            assert result.seconds > 0
        if benchmark == "metrics":
            assert result.extra["series"] > 100
            assert result.extra["bytes"] > 10_000

    def test_the_command(self, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "summary.jsonl"
        arguments = ["dequeue-only", "--store-url", f"{server}/", "--total-tasks", "7", "--summary-file", str(file)]
        assert micro.main.main(arguments, standalone_mode=False) == 0
        summary = json.loads(file.read_text())
        assert (summary["family"], summary["name"], summary["backend"]) == ("micro", "dequeue-only", "server")
        assert summary["parameters"] == {"total_tasks": 7, "concurrency": 7}
        assert (summary["tasks"], summary["succeeded"], summary["failed"]) == (7, 7, 0)
        assert "dequeue-only" in capsys.readouterr().out

    @pytest.mark.parametrize("benchmark", ["dequeue-empty", "dequeue-only", "dequeue-update-attempt"])
    async def test_nobody_elses_rollouts_are_claimed(self, server: str, benchmark: str) -> None:
        calls = MicroCalls(server)
        try:
            await calls.enqueue(3)
            with pytest.raises(BenchError, match=r"^3 rollouts wait in the queue of this server: they would be"):
                await measured(server, benchmark)
            assert await calls.queued() == 3
            for claim in await calls.dequeue("somebody", 3):
                await calls.finish(claim)
        finally:
            await calls.close()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answering(*answers: Any, status: int = 200) -> Handler:
    """Answer each request with the next of these, the last one for ever."""
    remaining = list(answers)

    async def handle(_: web.Request) -> web.Response:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return web.json_response(answer, status=status)

    return handle


def claim(number: int) -> list[dict[str, Any]]:
    attempt = {"rollout_id": f"ro-{number}", "attempt_id": f"at-{number}", "status": "preparing"}
    return [{"rollout_id": f"ro-{number}", "status": "preparing", "attempt": attempt}]


@pytest.fixture
async def wrong() -> Any:
    """Starts servers that answer with given handlers; the others answer as a server with an empty store."""
    servers: list[TestServer] = []

    async def start(**handlers: Handler) -> str:
        routes: dict[str, tuple[str, str, Handler]] = {
            "statistics": ("GET", "/v1/agl/statistics", answering({})),
            "listing": ("GET", "/v1/agl/rollouts", answering({"total": 0})),
            "start": ("POST", "/v1/agl/rollouts", answering({}, status=201)),
            "enqueue": ("POST", "/v1/agl/queues/rollouts/enqueue", answering([], status=201)),
            "dequeue": ("POST", "/v1/agl/queues/rollouts/dequeue", answering([])),
            "finish": ("POST", "/v1/agl/rollouts/{rollout}/attempts/{attempt}", answering({}, status=500)),
            "wait": ("POST", "/v1/agl/waits/rollouts", answering([])),
            "beat": ("POST", "/v1/agl/workers/{worker}", answering({"worker_id": "x", "heartbeat_stats": {}})),
        }
        app = web.Application()
        for name, (method, path, handler) in routes.items():
            app.router.add_route(method, path, handlers.get(name, handler))
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


class TestOnAServerThatIsWrong:
    async def test_a_heartbeat_of_another_worker(self, wrong: Any) -> None:
        result = await measured(await wrong(), "worker", total=3, concurrency=1)
        assert result.tally.succeeded == 0
        assert result.tally.failures[0].startswith("CallFailedError: heartbeat 0 of bench-micro-0 answered")

    async def test_a_rollout_out_of_an_empty_queue(self, wrong: Any) -> None:
        result = await measured(await wrong(dequeue=answering([], claim(1), [])), "dequeue-empty", total=3)
        assert (result.tally.succeeded, result.tally.failed) == (2, 1)
        assert not result.complete

    async def test_a_rollout_that_is_claimed_twice(self, wrong: Any) -> None:
        queued = [{"rollout_id": f"ro-{number}", "status": "queuing"} for number in range(2)]
        address = await wrong(
            enqueue=answering(queued, status=201),
            dequeue=answering(claim(0), claim(0), []),
            finish=answering({"rollout_id": "ro-0", "attempt_id": "at-0", "status": "succeeded"}),
            wait=answering([{"rollout_id": "ro-0", "status": "succeeded"}]),
        )
        result = await measured(address, "dequeue-only", total=2, concurrency=1)
        assert (result.tally.succeeded, result.tally.failed) == (1, 1)

    async def test_a_rollout_that_does_not_end(self, wrong: Any) -> None:
        address = await wrong(
            enqueue=answering([{"rollout_id": "ro-0", "status": "queuing"}], status=201),
            dequeue=answering(claim(0)),
            finish=answering({"rollout_id": "ro-0", "attempt_id": "at-0", "status": "succeeded"}),
            wait=answering([{"rollout_id": "ro-0", "status": "running"}]),
        )
        result = await measured(address, "dequeue-update-attempt", total=1)
        assert (result.tally.succeeded, result.tally.failed) == (0, 1)
        assert result.tally.failures == ["1 rollouts did not end as succeeded, ['ro-0'] among them"]

    async def test_a_server_without_metrics(self, wrong: Any) -> None:
        with pytest.raises(BenchError, match=r"shows no metrics: start it with --tracker prometheus$"):
            await measured(await wrong(), "metrics")

    async def test_a_server_that_asks_for_a_token(self, wrong: Any) -> None:
        address = await wrong(statistics=answering({}, status=401))
        with pytest.raises(BenchError, match=rf"^the store at {address} asks for a token, and this"):
            await measured(address, "worker")

    async def test_no_server(self) -> None:
        with pytest.raises(BenchError, match=r"^no store answers at http://127\.0\.0\.1:\d+: Cannot connect") as raised:
            await measured(f"http://user:secret@127.0.0.1:{free_port()}", "worker")
        assert "secret" not in str(raised.value)

    async def test_failed_tasks_fail_the_run(self, wrong: Any, capsys: pytest.CaptureFixture[str]) -> None:
        result = await measured(await wrong(), "rollout", total=2)
        assert (result.tally.succeeded, result.tally.failed) == (0, 2)
        assert Bench("micro", None).finish([result]) == EXIT_FAILED_TASKS
        assert "ValidationError" in capsys.readouterr().out
