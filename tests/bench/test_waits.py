"""The benchmarks of our client: claims that wait, and what calls cost."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bench import clients, waits
from bench.drivers import client_cpu
from bench.processes import BenchError, free_port
from lightning_api.client import LightningClient
from tests.commands import environment, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that keeps its store in memory."""
    folder, port = tmp_path_factory.mktemp("waits"), free_port()
    command = ["lightning-sql", "serve", "--database-url", "memory://", "--port", str(port)]
    with serving(command, port, folder, environment(folder)):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_every_rollout_is_handed_over(server: str, tmp_path: Path) -> None:
    file = tmp_path / "summary.jsonl"
    arguments = ["--store-url", server, "--waiters", "20", "--total-tasks", "40", "--summary-file", str(file)]
    assert waits.main.main(arguments, standalone_mode=False) == 0
    summary = json.loads(file.read_text())
    assert (summary["family"], summary["name"], summary["backend"]) == ("waits", "the same server", "server")
    assert (summary["tasks"], summary["succeeded"], summary["failed"]) == (40, 40, 0)
    assert 0 < summary["p50"] <= summary["p99"]


@pytest.mark.slow
async def test_nobody_elses_rollouts_are_taken(server: str) -> None:
    async with LightningClient(server) as client:
        await client.enqueue_rollout("somebody's")
        with pytest.raises(BenchError, match="the queue is not empty"):
            await waits.measured(server, server, 1, 1, lambda _: None)
        assert await client.dequeue_rollout() is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "upstream"])
@pytest.mark.parametrize("at_once", [1, 3])
async def test_what_calls_cost(server: str, kind: str, at_once: int) -> None:
    spent = await client_cpu.measure(kind, server, 6, at_once)
    assert len(spent) == 8
    assert all(cost > 0 for cost in spent.values())


def test_the_middle_of_rounds_is_shown() -> None:
    ours = clients.medians([{"add_span": 100.0}, {"add_span": 900.0}, {"add_span": 110.0}])
    console = Console(width=100, record=True)
    clients.show(console, 1, ours, {"add_span": 440.0})
    assert "0.25" in console.export_text()
