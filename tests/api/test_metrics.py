"""Metrics of the service: what is counted of requests, and what a scrape is answered."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lightning_api.app import service_of
from lightning_api.metrics import PrometheusRecorder
from lightning_api.routes import OPERATIONS
from lightning_api.sampling import sample_process, sample_store
from lightning_sql import __version__
from lightning_sql.metrics import METRICS
from lightning_sql.records import RolloutConfig
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore
from tests.api.conftest import Serve

METRICS_PATH = "/v1/prometheus/"
V1 = "/v1/agl"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """The value of each series."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


@pytest.fixture
async def recorded(sqlite_url: str) -> AsyncIterator[LightningStore]:
    """A store that is recorded for Prometheus."""
    async with await open_store(sqlite_url, recorder=PrometheusRecorder(), scan_debounce_seconds=1000.0) as opened:
        yield opened


@pytest.fixture
async def client(serve: Serve, recorded: LightningStore) -> httpx.AsyncClient:
    return await serve(recorded, tracker="prometheus")


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get(METRICS_PATH)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return parsed(answer.text)


def calls_of(samples: Samples) -> dict[tuple[str, str, str], float]:
    """The requests that were counted, by path, method and status."""
    found: dict[tuple[str, str, str], float] = {}
    for (name, labels), count in samples.items():
        if name == "agl_http_total" and count:
            named = dict(labels)
            found[named["path"], named["method"], named["status"]] = count
    return found


async def test_there_are_none_unless_asked_for(serve: Serve) -> None:
    client = await serve()
    assert (await client.get(METRICS_PATH)).status_code == 404
    assert service_of(cast(Any, client)._transport.app).recorder is None


async def test_requests_are_counted_by_route(client: httpx.AsyncClient) -> None:
    rollout = (await client.post(f"{V1}/rollouts", json={"input": 1, "worker_id": "w"})).json()
    path = f"{V1}/rollouts/{rollout['rollout_id']}"
    await client.get(path)
    await client.get(f"{path}/attempts/latest")
    await client.post(f"{path}/attempts/latest", json={"status": "running"})
    await client.post(f"{path}/attempts/{rollout['attempt']['attempt_id']}", json={"status": "succeeded"})
    await client.post(f"{path}/attempts/search", json={})
    await client.post(f"{V1}/queues/rollouts/dequeue", json={"limit": 1})
    await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": "x"})
    await client.get(f"{V1}/resources/none")
    await client.post(f"{V1}/workers/w", json={})
    await client.get(f"{V1}/nothing/here")
    await client.request("BREW", f"{V1}/rollouts")
    samples = await scrape(client)
    of_rollout = f"{V1}/rollouts/{{rollout_id}}"
    assert calls_of(samples) == {
        (f"{V1}/rollouts", "POST", "201"): 1,
        (of_rollout, "GET", "200"): 1,
        (f"{of_rollout}/attempts/latest", "GET", "200"): 1,
        (f"{of_rollout}/attempts/latest", "POST", "200"): 1,
        (f"{of_rollout}/attempts/{{attempt_id}}", "POST", "200"): 1,
        (f"{of_rollout}/attempts/search", "POST", "200"): 1,
        (f"{V1}/queues/rollouts/dequeue", "POST", "200"): 1,
        (f"{V1}/queues/rollouts/enqueue", "POST", "422"): 1,
        (f"{V1}/resources/{{resources_id}}", "GET", "200"): 1,
        (f"{V1}/workers/{{worker_id}}", "POST", "200"): 1,
        ("other", "GET", "404"): 1,
        ("other", "other", "405"): 1,
    }
    labels = {"path": of_rollout, "method": "GET", "status": "200"}
    assert value(samples, "agl_http_latency_count", **labels) == 1
    assert value(samples, "agl_http_latency_bucket", **labels, le="300.0") == 1
    assert value(samples, "agl_http_latency_bucket", **labels, le="1e-06") == 0


async def test_everything_that_may_fail_is_known_from_the_start(client: httpx.AsyncClient) -> None:
    """A counter that appears with 1 has not grown, so the first failure would not show."""
    samples = await scrape(client)
    for declared in OPERATIONS:
        for status in (declared.status, 500, 503):
            labels = {"path": declared.path, "method": declared.method, "status": str(status)}
            assert value(samples, "agl_http_total", **labels) == 0, labels
        labels["status"] = str(declared.status)
        assert value(samples, "agl_http_latency_count", **labels) == 0, labels
    for status in ("OK", "DatabaseUnavailableError", "499"):
        method = "dequeue_many_rollouts"
        assert value(samples, "agl_store_total", method=method, store_pubmeth=method, status=status) == 0
    for status in ("succeeded", "failed", "cancelled"):
        for mode in ("train", "val", "test", "unknown"):
            assert value(samples, "agl_rollouts_total", status=status, mode=mode) == 0
    labels = {"store_pubmeth": "dequeue_many_rollouts", "store_privmeth": "claim", "operation": "sql", "status": "OK"}
    assert value(samples, "agl_collections_total", collection="attempts", **labels) == 0
    assert value(samples, "agl_collections_latency_count", collection="attempts", **labels) == 0
    assert value(samples, "lightning_sql_spans_total") == 0
    assert value(samples, "lightning_sql_build_info", version=__version__) == 1


async def test_ten_thousand_ids_make_no_more_series(client: httpx.AsyncClient, recorded: LightningStore) -> None:
    await client.get(f"{V1}/rollouts/0")
    await client.post(f"{V1}/workers/0", json={})
    await client.get("/0")
    await recorded.sweep()
    before = await scrape(client)
    for number in range(3333):
        await client.get(f"{V1}/rollouts/ro-{number}")
        await client.post(f"{V1}/workers/worker-{number}", json={})
        await client.get(f"/nothing-{number}")
    after = await scrape(client)
    # The first scrape was counted after it was answered.
    new = {key for key in after.keys() - before.keys() if ("path", METRICS_PATH) not in key[1]}
    assert new == set()
    assert len(after) < 5000
    assert calls_of(after)["other", "GET", "404"] == 3334


async def test_whoever_goes_is_499(serve: Serve, recorded: LightningStore) -> None:
    client = await serve(recorded, tracker="prometheus")
    rollout = await recorded.enqueue_rollout(1)
    body = {"rollout_ids": [rollout.rollout_id], "timeout": 30}
    waiting = asyncio.create_task(client.post(f"{V1}/waits/rollouts", json=body))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    samples = await scrape(client)
    assert calls_of(samples) == {(f"{V1}/waits/rollouts", "POST", "499"): 1}


async def test_what_is_refused_counts(serve: Serve, recorded: LightningStore) -> None:
    client = await serve(recorded, tracker="prometheus", token="secret")
    assert (await client.get(METRICS_PATH)).status_code == 401
    answer = await client.get(METRICS_PATH, headers={"authorization": "Bearer secret"})
    assert calls_of(parsed(answer.text)) == {("other", "GET", "401"): 1}
    service = service_of(cast(Any, client)._transport.app)
    service.load.refused += 3  # as `LightningProtocol` does
    assert service.recorder is not None
    sample_process(service, service.recorder)
    sample_process(service, service.recorder)
    answer = await client.get(METRICS_PATH, headers={"authorization": "Bearer secret"})
    assert calls_of(parsed(answer.text))["other", "other", "503"] == 3


async def test_the_queue_is_not_looked_at_by_a_scrape(
    client: httpx.AsyncClient, recorded: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorded.recorder
    assert recorder is not None
    await recorded.start_rollout(1, config=RolloutConfig(timeout_seconds=-1.0))
    await recorded.enqueue_rollout(2)
    await sample_store(recorded, recorder)

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a scrape asked the store")

    for name in ("queue_state", "ping", "statistics", "usage"):
        monkeypatch.setattr(recorded, name, fail)
    samples = await scrape(client)
    assert value(samples, "lightning_sql_queue_depth") == 1
    assert value(samples, "lightning_sql_attempts_running") == 1
    assert value(samples, "lightning_sql_deadlines_due") == 1
    assert (value(samples, "lightning_sql_queue_oldest_seconds") or 0) > 0
    assert (value(samples, "lightning_sql_database_latency_seconds") or 0) > 0
    assert (value(samples, "lightning_sql_sampled_time_seconds") or 0) > 1.7e9


async def test_the_process_is_sampled(client: httpx.AsyncClient, recorded: LightningStore) -> None:
    await client.post(f"{V1}/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]})
    service = service_of(cast(Any, client)._transport.app)
    assert service.recorder is not None
    sample_process(service, service.recorder)
    samples = await scrape(client)
    connections = [value(samples, "lightning_sql_pool_connections", state=state) for state in ("in_use", "idle")]
    assert sum(count or 0 for count in connections) > 0
    assert value(samples, "lightning_sql_calls_waiting", statement="claim") == 0
    assert value(samples, "lightning_sql_calls_in_flight") == 0
    assert value(samples, "lightning_sql_enqueued_total") == 1


async def test_every_metric_is_there_after_some_work(client: httpx.AsyncClient, recorded: LightningStore) -> None:
    recorder = recorded.recorder
    assert recorder is not None
    rollout = (await client.post(f"{V1}/rollouts", json={"input": 1, "mode": "val"})).json()
    path = f"{V1}/rollouts/{rollout['rollout_id']}"
    waiting = asyncio.create_task(
        client.post(f"{V1}/waits/rollouts", json={"rollout_ids": [rollout["rollout_id"]], "timeout": 30})
    )
    await asyncio.sleep(0.1)
    await client.post(f"{path}/attempts/latest", json={"status": "failed"})
    await waiting
    samples = await scrape(client)
    names = {name for name, _ in samples}
    for metric in METRICS:
        name = metric.name.replace(".", "_")
        shown = {"counter": name.removesuffix("_total") + "_total", "histogram": f"{name}_count", "gauge": name}
        assert shown[metric.kind] in names, metric.name


async def test_with_and_without_a_slash(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/prometheus")).status_code == 200
    assert (await client.get("/v1/prometheus/", headers={"accept": "application/openmetrics-text"})).status_code == 200
    assert (await client.post(METRICS_PATH)).status_code == 405
