"""A route that is found by a shortcut is the one that the router would have found."""

import re
from typing import Any, cast

import httpx
import pytest

from lightning_api import app as app_module
from lightning_api.app import create_app
from lightning_api.routes import OPERATIONS
from lightning_api.settings import Settings
from lightning_api.shortcuts import Shortcuts
from lightning_sql.store.interface import LightningStore

V1 = "/v1/agl"
SEGMENTS = [
    "search",
    "latest",
    "attempts",
    "rollouts",
    "enqueue",
    "id",
    "%2F",
    "%61",
    "a b",
    "{worker_id}",
    "..",
    "%00",
    "é",
]
PATHS = [
    *(declared.path for declared in OPERATIONS),
    *(f"{V1}/{kind}/{segment}" for kind in ("rollouts", "workers", "resources", "spans") for segment in SEGMENTS),
    *(f"{V1}/rollouts/{segment}/attempts" for segment in SEGMENTS),
    *(f"{V1}/rollouts/r/attempts/{segment}" for segment in SEGMENTS),
    *(f"{V1}/rollouts/{segment}/attempts/latest" for segment in SEGMENTS),
    *(f"{V1}/spans{end}" for end in ("/", "//", "/next/", "/next/x", "?limit=0", "%2Fnext", ";x")),
    *("/", "", "/v1", "/v1/agl/", "/V1/AGL/spans", "/v1/agl//spans", "/v1//agl/spans", "/x/v1/agl/spans"),
]


class Nothing(Shortcuts):
    """No shortcuts at all."""

    def find(self, scope: Any) -> None:
        return None


def client_of(store: LightningStore, root_path: str = "") -> httpx.AsyncClient:
    app = create_app(Settings(database_url="memory://"), store)
    transport = httpx.ASGITransport(cast(Any, app), root_path=root_path, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service")


@pytest.fixture
def clients(store: LightningStore, monkeypatch: pytest.MonkeyPatch) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
    """Of a service with shortcuts and of one without, on one store."""
    short = client_of(store)
    monkeypatch.setattr(app_module, "Shortcuts", Nothing)
    return short, client_of(store)


def comparable(answer: httpx.Response) -> Any:
    """An answer without what is different every time."""
    content = re.sub(rb'"(?:uptime|version|\w+_time)":[\d.]+|rs-[0-9a-f]{12}', b"", answer.content)
    return answer.status_code, {**answer.headers, "content-length": None}, content


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
async def test_every_path_leads_to_the_same_answer(clients: Any, method: str) -> None:
    for path in PATHS:
        answers = []
        for client in clients:
            request = client.build_request(method, "http://service/", json={})
            request.url = request.url.copy_with(raw_path=httpx.URL("http://service" + path).raw_path)
            answers.append(comparable(await client.send(request)))
        assert answers[0] == answers[1], (method, path)


@pytest.mark.parametrize("host", ["service", "service:80", "[::1]:80", "a b", "a/b", "", "ü", "a%20b", "a@b"])
async def test_hosts(clients: Any, host: str) -> None:
    answers = [
        comparable(await client.post(f"{V1}/queues/rollouts/dequeue", headers={"host": host.encode()}))
        for client in clients
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("root_path", ["/v1", "/elsewhere"])
async def test_a_mounted_application(store: LightningStore, monkeypatch: pytest.MonkeyPatch, root_path: str) -> None:
    answers = [comparable(await client_of(store, root_path).post(f"{V1}/queues/rollouts/dequeue"))]
    monkeypatch.setattr(app_module, "Shortcuts", Nothing)
    answers.append(comparable(await client_of(store, root_path).post(f"{V1}/queues/rollouts/dequeue")))
    assert answers[0] == answers[1]


def scope_of(method: str, path: str, **more: Any) -> Any:
    return {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""} | more


def test_the_busiest_routes_have_one() -> None:
    async def app(*_arguments: Any) -> None:
        """Stands for an endpoint."""

    hot = {declared.name: cast(Any, app) for declared in OPERATIONS if declared.hot}
    shortcuts = Shortcuts(OPERATIONS, hot)
    for method, path, parameters in (
        ("POST", f"{V1}/queues/rollouts/enqueue", {}),
        ("POST", f"{V1}/queues/rollouts/dequeue", {}),
        ("POST", f"{V1}/spans", {}),
        ("POST", f"{V1}/spans/next", {}),
        ("POST", f"{V1}/rollouts/r/attempts/a", {"rollout_id": "r", "attempt_id": "a"}),
        ("POST", f"{V1}/workers/w w", {"worker_id": "w w"}),
        ("GET", f"{V1}/rollouts/r", {"rollout_id": "r"}),
        ("POST", f"{V1}/waits/rollouts", {}),
        ("POST", "/v1/lightning/spans", {}),
    ):
        scope = scope_of(method, path)
        assert shortcuts.find(scope) is app, path
        assert scope["path_params"] == parameters
    for method, path in (
        ("GET", f"{V1}/spans/next"),
        ("POST", f"{V1}/workers/search"),
        ("POST", f"{V1}/rollouts/r/attempts/latest"),
        ("POST", f"{V1}/rollouts/r/attempts/a/b"),
        ("GET", f"{V1}/health"),
        ("POST", "/v1/other/spans"),
    ):
        assert shortcuts.find(scope_of(method, path)) is None, path
    assert shortcuts.find(scope_of("POST", f"{V1}/spans", root_path="/v1")) is None
    assert shortcuts.find(scope_of("POST", f"{V1}/spans", headers=[(b"host", b"a b")])) is None
