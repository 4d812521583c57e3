"""`lightning-sql prometheus`: the metrics of a server, served by a process of their own that needs no database."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import uvicorn
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from lightning_api.calls import Service
from lightning_api.connections import IDLE_SECONDS
from lightning_api.edge import is_authorized
from lightning_api.errors import failure, failure_of
from lightning_api.logs import configure_logging
from lightning_api.metrics import DIRECTORY_VARIABLE, METRICS_PATH, exposition_of, metrics_directory
from lightning_api.replies import Reply
from lightning_api.serve import GRACE_SECONDS, LightningServer, bind_sockets, run_in_loop
from lightning_api.settings import ENVIRONMENT_PREFIX, Settings
from lightning_sql.errors import ConfigurationError, LightningError

__all__ = ["HEALTH_PATH", "Exporter", "ExporterOptions", "run_exporter"]

logger: Final = logging.getLogger(__name__)

HEALTH_PATH: Final = "/health"

_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)*/?")
_SHARED: Final = frozenset({f"{ENVIRONMENT_PREFIX}{name}" for name in ("TOKEN", "LOG_LEVEL")})
"""The variables of a server that count for its exporter, too; it has another address."""
_ALLOWED: Final = ((b"allow", b"GET, HEAD"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterOptions:
    """How the exporter is started; None leaves it to a variable, or to what is usual."""

    host: str = "0.0.0.0"  # noqa: S104 - Prometheus is on another machine more often than not; docs/security.md
    port: int = 4748
    metrics_path: str = METRICS_PATH
    token: str | None = None
    log_level: str | None = None
    access_log: bool = False


class Exporter:
    """An ASGI application that answers with the metrics of a directory.

    Args:
        directory: where the processes of a server keep them.
        path: where they are served, with or without a slash at the end.
        token: the bearer token to ask for, or None; health needs none.

    Raises:
        ConfigurationError: this path cannot be served.
    """

    def __init__(self, directory: Path, path: str, token: str | None) -> None:
        if not path.startswith("/") or _PATH.fullmatch(path) is None:
            raise ConfigurationError(
                "the metrics path must begin with / and have only letters, digits and -._~ between"
            )
        self._path = path.rstrip("/")
        if self._path == HEALTH_PATH:
            raise ConfigurationError(f"the metrics path must be another than {HEALTH_PATH}, where health is answered")
        self._directory = directory
        self._token = None if token is None else token.encode()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = cast(HTTPScope, scope)
        path = request["path"].removesuffix("/")
        if path == HEALTH_PATH:
            reply = Reply.json(200, {"status": "ok"})
        elif self._token is not None and not is_authorized(request, self._token):
            reply = failure(path, 401, "A valid bearer token is required", ((b"www-authenticate", b"Bearer"),))
        elif path != self._path:
            reply = failure(path, 404, "Not Found")
        elif request["method"] not in ("GET", "HEAD"):
            reply = failure(path, 405, "Method Not Allowed", _ALLOWED)
        else:
            reply = await self._metrics(request)
        await reply.send(send)

    async def _metrics(self, request: HTTPScope) -> Reply:
        accept = next((value for name, value in request["headers"] if name == b"accept"), b"")
        try:
            # One after the other: together they would take as long, and leave no moment to add up files.
            async with self._turn:
                body, content_type = await asyncio.to_thread(exposition_of, self._directory, accept.decode("latin-1"))
        except ConfigurationError as error:
            logger.warning("answered 503: %s", error)
            return failure("", 503, "There are no metrics", ((b"retry-after", b"1"),))
        except (LightningError, OSError) as error:
            return failure_of("", error)
        return Reply(200, body, ((b"content-type", content_type.encode()),))


def run_exporter(options: ExporterOptions, environment: Mapping[str, str]) -> None:
    """Serve the metrics until a signal says to stop.

    Raises:
        ConfigurationError: an option makes no sense, the address cannot be had, or there is no directory.
    """
    shared = {name: value for name, value in environment.items() if name in _SHARED}
    settings = Settings.load(
        shared, host=options.host, port=options.port, token=options.token, log_level=options.log_level
    )
    directory = metrics_directory()
    if directory is None:
        raise ConfigurationError(f"{DIRECTORY_VARIABLE} must name the directory in which the server keeps its metrics")
    if not directory.is_dir():
        raise ConfigurationError(f"{DIRECTORY_VARIABLE}: {directory} is not a directory")
    exporter = Exporter(directory, options.metrics_path, settings.token)
    sockets = bind_sockets(settings)
    configure_logging(settings.logging_level)
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    host, port = f"[{settings.host}]" if ":" in settings.host else settings.host, sockets[0].getsockname()[1]
    config = uvicorn.Config(
        cast(ASGIApp, exporter),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = LightningServer(
        config,
        Service(settings),
        signals=(signal.SIGINT, signal.SIGTERM),
        started=lambda: logger.info(
            "serving the metrics of %s at http://%s:%d%s", directory, host, port, options.metrics_path
        ),
    )
    try:
        run_in_loop(server.serve(sockets))
    finally:
        for bound in sockets:
            bound.close()
    logger.info("stopped")
