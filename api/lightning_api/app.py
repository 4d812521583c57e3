"""The application: every operation bound to one store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final, cast

from litestar import HttpMethod, Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from lightning_api.calls import Service
from lightning_api.console import ConsoleRecorder
from lightning_api.counting import Counting
from lightning_api.documentation import documentation_of
from lightning_api.edge import Edge
from lightning_api.errors import failure, failure_of
from lightning_api.metrics import PrometheusRecorder
from lightning_api.operations import Endpoint, Operation
from lightning_api.routes import OPERATIONS, metrics
from lightning_api.sampling import sample_regularly
from lightning_api.settings import Settings
from lightning_api.shortcuts import Shortcuts
from lightning_sql.errors import LightningError
from lightning_sql.metrics import Recorder
from lightning_sql.store.factory import open_store
from lightning_sql.store.interface import LightningStore

__all__ = ["UNLIMITED", "create_app", "create_app_from_environment", "recorder_of", "service_of"]

logger: Final = logging.getLogger(__name__)

UNLIMITED: Final = frozenset(
    declared.path for declared in (*OPERATIONS, *metrics.OPERATIONS) if declared.places != "calls"
)
"""The paths that are served however many calls are worked on."""

_ANY_FAILURE: Final = (422, 499, 500, 503)
_LEAST_SWEEP_SECONDS: Final = 1.0
_MAINTENANCE_SECONDS: Final = 5.0


def create_app(settings: Settings, store: LightningStore | None = None) -> Litestar:
    """The ASGI application.

    Args:
        settings: how it is configured.
        store: an open store, which stays the caller's to close; without one the application opens and
            closes its own.
    """
    service = Service(settings, store)
    service.recorder = recorder_of(settings) if store is None else store.recorder
    served = (*OPERATIONS, *metrics.OPERATIONS) if settings.tracker == "prometheus" else OPERATIONS
    operations = (*served, *documentation_of(served, settings))
    app = Litestar(
        route_handlers=list(_bound(operations, service)),
        lifespan=[_lifespan(service)],
        exception_handlers={HTTPException: _on_error, Exception: _on_error},
        openapi_config=None,
        logging_config=None,
    )
    app.state["service"] = service
    hot = {declared.name: Endpoint(declared, service) for declared in served if declared.hot}
    app.asgi_handler = Edge(
        app.asgi_handler,
        Shortcuts(served, hot),
        cors_origins=settings.cors_origins,
        token=settings.token,
        load=service.load,
        unlimited=UNLIMITED,
        slashed=frozenset(declared.path for declared in metrics.OPERATIONS),
    )
    if service.recorder is not None:
        app.asgi_handler = Counting(app.asgi_handler, service.recorder)
        if isinstance(service.recorder, PrometheusRecorder):
            for declared in served:
                failures = (*declared.errors, *_ANY_FAILURE)
                service.recorder.expect_route(declared.path, declared.method, declared.status, failures)
    service.app = app.asgi_handler
    return app


def create_app_from_environment() -> Litestar:
    """The application as `LIGHTNING_SQL_*` variables configure it, for any ASGI server that takes a factory."""
    return create_app(Settings.load(os.environ))


def recorder_of(settings: Settings) -> Recorder | None:
    """Who takes down what the service does, as it is configured."""
    match settings.tracker:
        case "prometheus":
            return PrometheusRecorder()
        case "console":
            return ConsoleRecorder()
        case _:
            return None


def service_of(app: Litestar) -> Service:
    """What the endpoints of an application share."""
    return cast(Service, app.state["service"])


def _lifespan(service: Service) -> Callable[[Litestar], Any]:
    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncGenerator[None]:
        settings = service.settings
        given = service.current_store
        store = given
        if store is None:
            store = await open_store(
                settings.database_url,
                partition=settings.partition,
                scan_debounce_seconds=settings.scan_debounce_seconds,
                claim_timeout_seconds=settings.claim_timeout_seconds,
                database_wait_seconds=settings.database_wait_seconds,
                recorder=service.recorder,
            )
            service.current_store = store
        pause = max(settings.scan_debounce_seconds, _LEAST_SWEEP_SECONDS)
        background = [
            asyncio.create_task(_sweep_regularly(store, pause), name="lightning-sql watchdog"),
            asyncio.create_task(_maintain_regularly(store), name="lightning-sql maintenance"),
            asyncio.create_task(service.hangups.look(), name="lightning-sql hangups"),
        ]
        if service.recorder is not None:
            sampling = sample_regularly(service, service.recorder, database=service.samples_database)
            background.append(asyncio.create_task(sampling, name="lightning-sql sampling"))
        try:
            with _displayed(service.recorder):
                yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await service.drain()
            if given is None:
                service.current_store = None
                await store.close()

    return lifespan


def _displayed(recorder: Recorder | None) -> AbstractContextManager[None]:
    if not isinstance(recorder, ConsoleRecorder):
        return nullcontext()
    from lightning_api.display import displayed

    return displayed(recorder)


async def _sweep_regularly(store: LightningStore, pause: float) -> None:
    """Run the watchdog every `pause` seconds, so that limits hold when nobody calls."""
    while True:
        await asyncio.sleep(pause)
        with _logged("watchdog"):
            await store.sweep()


async def _maintain_regularly(store: LightningStore) -> None:
    while True:
        await asyncio.sleep(_MAINTENANCE_SECONDS)
        with _logged("maintenance"):
            await store.maintain()


@contextmanager
def _logged(name: str) -> Generator[None]:
    """Log what goes wrong in the background: it will be tried again."""
    try:
        yield
    except LightningError as error:
        logger.warning("the %s could not do its work and will try again: %s", name, error)
    except Exception:
        logger.exception("the %s failed and will try again", name)


def _bound(operations: Iterable[Operation], service: Service) -> Iterable[HTTPRouteHandler]:
    """One route handler for each path."""
    table: dict[str, dict[str, ASGIApp]] = defaultdict(dict)
    for declared in operations:
        table[declared.path][declared.method] = Endpoint(declared, service)
    for path, method, declared, fixed in _literal_ids(operations):
        table[path].setdefault(method, Endpoint(declared, service, fixed))
    for path, endpoints in table.items():
        yield _handler(path, endpoints)


def _literal_ids(operations: Iterable[Operation]) -> Iterable[tuple[str, str, Operation, dict[str, str]]]:
    """Where a literal segment of one route must count as an id of another one.

    `search` in `POST /workers/search` is a literal, in `GET /workers/search` it is a worker. Litestar
    finds the literal path first, whatever the method, so the second is registered there as well.
    """
    declared_operations = list(operations)
    for literal in declared_operations:
        for other in declared_operations:
            fixed = _match(other.path, literal.path)
            if fixed and other.method != literal.method:
                yield literal.path, other.method, other, fixed


def _match(template: str, path: str) -> dict[str, str] | None:
    """The parameters of a template that are literals in a path of the same shape, or None."""
    ours, theirs = template.split("/"), path.split("/")
    if len(ours) != len(theirs):
        return None
    fixed: dict[str, str] = {}
    for our, their in zip(ours, theirs, strict=True):
        if our == their:
            continue
        if not our.startswith("{") or their.startswith("{"):
            return None
        fixed[our.strip("{}")] = their
    return fixed


def _handler(path: str, endpoints: Mapping[str, ASGIApp]) -> HTTPRouteHandler:
    allowed = ", ".join(sorted(endpoints))

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoints.get(cast(HTTPScope, scope)["method"], refuse)(scope, receive, send)

    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await failure(path, 405, "Method Not Allowed", ((b"allow", allowed.encode()),)).send(send)

    def middleware(app: ASGIApp) -> ASGIApp:  # noqa: ARG001 - Litestar's signature
        return dispatch

    async def answered_by_middleware() -> None:
        """Never called: the endpoints stand before it."""

    # Litestar would answer OPTIONS by itself, which the protocol does not have.
    methods = [HttpMethod(method) for method in (*endpoints, "OPTIONS")]
    handler = HTTPRouteHandler(
        path.replace("}", ":str}"), http_method=methods, middleware=[middleware], status_code=200
    )
    return handler(answered_by_middleware)


def _on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer what goes wrong before an endpoint is found."""
    reply = failure_of(request.scope["path"], error)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers}
    return Response(reply.body, status_code=reply.status, media_type=headers.pop("content-type"), headers=headers)
