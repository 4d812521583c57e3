"""What every request passes first: origins, the token, slashes, methods, the size of its body."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightning_api import edge

V1 = "/v1/agl"
TOKEN = "a-long-token"
ORIGIN = "https://dashboard.example"
CORS_HEADERS = ("access-control-allow-origin", "access-control-allow-credentials", "access-control-expose-headers")


@pytest.mark.parametrize("path", [f"{V1}/workers", f"{V1}/workers/w", f"{V1}/health", "/healthz", "/schema"])
async def test_a_trailing_slash_redirects(client: Any, path: str) -> None:
    answer = await client.get(f"{path}/?a=1&b=%20%C3%BC", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, f"{path}?a=1&b=%20%C3%BC")
    assert (await client.post(f"{V1}/rollouts/", json={"input": 1}, follow_redirects=True)).status_code == 201


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nope",
        "/nope/",
        f"{V1}/",
        f"{V1}/nope",
        f"{V1}/workers/a/b",
        f"{V1}/workers/a%2Fb",
        f"{V1}/workers/%2F",
        f"{V1}/workers%2f",
        f"{V1}/workers%2Fw",
        f"{V1}/rollouts/r%2Fattempts",
        f"{V1}/rollouts/r%2fattempts%2Flatest",
        f"{V1}/workers//",
        f"{V1}//workers",
        f"{V1}/rollouts//attempts",
        f"{V1}/rollouts/r/attempts//",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_unknown_paths(client: Any, method: str, path: str) -> None:
    answer = await client.request(method, path, follow_redirects=False)
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (f"{V1}/health", "GET"),
        (f"{V1}/rollouts", "GET, POST"),
        (f"{V1}/rollouts/search", "GET, POST"),
        (f"{V1}/queues/rollouts/enqueue", "POST"),
        (f"{V1}/rollouts/r/attempts/a", "POST"),
        (f"{V1}/rollouts/r/attempts/latest", "GET, POST"),
        ("/v1/traces", "POST"),
        ("/schema", "GET"),
    ],
)
async def test_wrong_methods(client: Any, path: str, allowed: str) -> None:
    wrong = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - set(allowed.split(", "))
    for method in sorted(wrong):
        answer = await client.request(method, path)
        assert (method, answer.status_code, answer.headers["allow"]) == (method, 405, allowed)
        assert answer.json() == {"detail": "Method Not Allowed"}
    head = await client.request("HEAD", path)
    assert (head.status_code, head.headers["allow"]) == (405, allowed)


async def test_ids_in_paths(client: Any) -> None:
    for raw, worker_id in (
        ("%C3%BC", "ü"),
        ("a%20b", "a b"),
        ("%F0%9F%98%80", "😀"),
        ("%25", "%"),
        ("%EF%BF%BD", "\ufffd"),
    ):
        assert (await client.post(f"{V1}/workers/{raw}")).json()["worker_id"] == worker_id
    for raw in ("%FF", "%ED%A0%80", "a%C3"):
        assert (await client.post(f"{V1}/workers/{raw}")).status_code == 400


async def test_without_origins_there_are_no_cors_headers(client: Any) -> None:
    answer = await client.get(f"{V1}/health", headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert (await client.options(f"{V1}/rollouts", headers=preflight)).status_code == 405


@pytest.mark.parametrize(
    ("origins", "named"),
    [(("https://other", ORIGIN), True), (("*", ORIGIN), True), (("*",), False), (("https://other", "*"), False)],
)
async def test_allowed_origins(serve: Any, origins: tuple[str, ...], named: bool) -> None:
    """A wildcard is never combined with credentials, and none comes from it."""
    client = await serve(cors_origins=origins, token=TOKEN)
    for path, status in ((f"{V1}/health", 200), (f"{V1}/workers", 401), ("/nope", 401), (f"{V1}/health/", 401)):
        answer = await client.get(path, headers={"origin": ORIGIN}, follow_redirects=False)
        assert (path, answer.status_code) == (path, status)
        assert answer.headers["access-control-allow-origin"] == (ORIGIN if named else "*")
        assert answer.headers.get("access-control-allow-credentials") == ("true" if named else None)
        assert answer.headers["access-control-expose-headers"].startswith("*")
        assert answer.headers["vary"] == "Origin"
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-anything",
    }
    answer = await client.options(f"{V1}/rollouts", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == (ORIGIN if named else "*")
    assert answer.headers["access-control-allow-headers"] == "authorization, x-anything"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers.get("access-control-allow-credentials") == ("true" if named else None)
    same_site = await client.get(f"{V1}/health")
    assert not [name for name in same_site.headers if name.startswith("access-control")]


async def test_other_origins(serve: Any) -> None:
    client = await serve(cors_origins=("https://other",))
    answer = await client.get(f"{V1}/health", headers={"origin": ORIGIN})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.headers["vary"] == "Origin"
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    answer = await client.options(f"{V1}/rollouts", headers=preflight)
    assert answer.status_code == 400
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_the_token_guards_everything_but_health(serve: Any) -> None:
    client = await serve(token=TOKEN)
    for path in (f"{V1}/health", "/healthz", "/readyz"):
        assert (await client.get(path)).status_code == 200
    guarded = [("GET", f"{V1}/statistics"), ("GET", "/schema"), ("GET", "/schema/openapi.json"), ("GET", "/nope")]
    guarded += [("POST", f"{V1}/rollouts"), ("POST", "/v1/traces"), ("DELETE", f"{V1}/rollouts")]
    wrong = [None, "", TOKEN, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ü"]
    for method, path in guarded:
        for credentials in wrong:
            headers = {} if credentials is None else {"authorization": credentials.encode()}
            answer = await client.request(method, path, headers=headers)
            assert (path, credentials, answer.status_code) == (path, credentials, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json().keys() == {"detail"}
            assert TOKEN not in answer.text
    for scheme in ("Bearer", "bearer", "BEARER "):
        answer = await client.get(f"{V1}/statistics", headers={"authorization": f"{scheme} {TOKEN}"})
        assert answer.status_code == 200


async def test_a_token_comes_once(serve: Any) -> None:
    client = await serve(token=TOKEN)
    right, wrong = f"Bearer {TOKEN}", "Bearer nonsense"
    for several in ((right, right), (right, wrong), (wrong, right), (right, ""), ("", right)):
        headers = [("authorization", value) for value in several]
        assert (await client.get(f"{V1}/statistics", headers=headers)).status_code == 401
    for joined in (f"{right}, {right}", f"{right}, {wrong}", f"{right} x", f"x {right}", f"{right}\xe9"):
        headers = {"authorization": joined.encode("latin-1")}
        assert (await client.get(f"{V1}/statistics", headers=headers)).status_code == 401
    # What is not ASCII is compared like anything else.
    for odd in (b"Bearer \xff\xfe", b"Bearer " + "tökén".encode(), b"B\xe9arer " + TOKEN.encode(), b"\xff" * 5000):
        assert (await client.get(f"{V1}/statistics", headers={"authorization": odd})).status_code == 401


async def test_the_token_is_compared_in_constant_time(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(given: Any, wanted: Any) -> bool:
        compared.append((given, wanted))
        return False

    monkeypatch.setattr(edge.hmac, "compare_digest", compare)
    client = await serve(token=TOKEN)
    # Nothing else may decide: a comparison that says no is the end of it.
    given = [f"Bearer {TOKEN}".encode(), b"Bearer x", b"Bearer \xff", b"Basic x"]
    for credentials in given:
        assert (await client.get(f"{V1}/statistics", headers={"authorization": credentials})).status_code == 401
    assert compared == [(credentials.partition(b" ")[2], TOKEN.encode()) for credentials in given]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_pages_of_other_origins_change_nothing(serve: Any, store: Any, method: str) -> None:
    """A browser sends a POST without a body for any page, and to this machine too."""
    await store.enqueue_rollout(1)
    open_to_one = await serve(cors_origins=(ORIGIN,))
    for origin in ("https://evil.example", "null", "http://service.evil.example", "http://evil.example/service"):
        answer = await open_to_one.request(method, f"{V1}/queues/rollouts/dequeue", headers={"origin": origin})
        assert (answer.status_code, answer.json().keys()) == (403, {"detail"})
        answer = await open_to_one.request(method, "/v1/lightning/spans", headers={"origin": origin})
        assert (answer.status_code, answer.headers["content-type"]) == (403, "application/problem+json")
    assert [rollout.status for rollout in (await store.query_rollouts()).items] == ["queuing"]


async def test_which_pages_may_change_something(serve: Any) -> None:
    ours = {"origin": "http://Service"}
    for settings, headers in (
        ({}, {}),
        ({}, ours),
        ({"cors_origins": (ORIGIN,)}, {"origin": ORIGIN}),
        ({"cors_origins": (ORIGIN,)}, ours),
        ({"cors_origins": ("*",)}, {"origin": "https://any.example"}),
        # Who knows the token is no stranger.
        ({"token": TOKEN}, {"origin": "https://any.example", "authorization": f"Bearer {TOKEN}"}),
    ):
        client = await serve(**settings)
        answer = await client.post(f"{V1}/rollouts", json={"input": 1}, headers=headers)
        assert (settings, answer.status_code) == (settings, 201)


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_failures_of_our_own_routes_are_problem_details(serve: Any, token: str | None) -> None:
    client = await serve(token=token)
    known = {} if token is None else {"authorization": f"Bearer {token}"}
    asked: list[tuple[str, str, int, dict[str, str]]] = [
        ("GET", "/v1/lightning", 404, {}),
        ("GET", "/v1/lightning/", 404, {}),
        ("GET", "/v1/lightning/nope", 404, {}),
        ("POST", "/v1/lightning/nope/", 404, {}),
        ("GET", "/v1/lightning//spans", 404, {}),
        ("GET", "/v1/lightning/%FF", 400, {}),
        ("DELETE", "/v1/lightning/spans", 405, {"allow": "GET, POST"}),
        ("OPTIONS", "/v1/lightning/spans", 405, {"allow": "GET, POST"}),
        ("POST", "/v1/lightning/rollouts", 405, {"allow": "GET"}),
        ("PUT", "/v1/lightning/rollouts", 405, {"allow": "GET"}),
    ]
    for method, path, status, headers in asked:
        answer = await client.request(method, path, headers=known, follow_redirects=False)
        is_problem(answer, status)
        assert headers.items() <= dict(answer.headers).items()
        if token is not None:
            refused = await client.request(method, path)
            is_problem(refused, 401)
            assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/lightningx", "/v1", "/v1/agl/lightning/", "/lightning/"):
        assert (await client.get(path, headers=known)).json() == {"detail": "Not Found"}


def is_problem(answer: Any, status: int) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json().keys() == {"type", "title", "status", "detail"}
    assert answer.json()["status"] == status


async def test_bodies_are_limited(serve: Any) -> None:
    client = await serve(body_limit=100)
    fits = b'{"input": "' + b"x" * 87 + b'"}'
    json_type = {"content-type": "application/json"}
    assert len(fits) == 100

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    for content in (fits, chunks(fits)):
        assert (await client.post(f"{V1}/rollouts", content=content, headers=json_type)).status_code == 201
    for content in (fits + b" ", chunks(fits + b" ")):
        answer = await client.post(f"{V1}/rollouts", content=content, headers=json_type)
        assert (answer.status_code, answer.json()) == (413, {"detail": "The body is too large"})
    assert (await client.get(f"{V1}/rollouts")).json()["total"] == 2
