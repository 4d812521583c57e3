"""Running the service: sockets, signals, one process or several."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar, cast

import uvicorn
import uvloop

from lightning_api.accepting import Acceptor, most_connections
from lightning_api.app import UNLIMITED, create_app, recorder_of, service_of
from lightning_api.calls import Service
from lightning_api.connections import IDLE_SECONDS, SWEEP_SECONDS, end_silent
from lightning_api.logs import configure_logging, log_lost_error
from lightning_api.metric_directory import kept_metrics
from lightning_api.protocol import LightningProtocol
from lightning_api.settings import Settings
from lightning_sql.errors import ConfigurationError
from lightning_sql.store.factory import check_database_url, displayed_url, is_memory, open_store, prepare_database

__all__ = ["GRACE_SECONDS", "LightningServer", "bind_sockets", "run", "run_in_loop", "serve"]

logger: Final = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_SECONDS: Final = 8
"""How long requests in flight may take once the server was told to stop; container engines kill after 10."""

_CLOSE_SECONDS: Final = 2
"""How long closing the store may take after that: what was not acknowledged by then never is."""

_BACKLOG: Final = 2048

_SILENT_SECONDS: Final = 60
"""How long a client may not acknowledge, or not take, what was sent: then its connection is cut."""


class LightningServer(uvicorn.Server):
    """A uvicorn server that answers waiting callers before it waits for their connections.

    Args:
        config: uvicorn's own.
        service: what the application's endpoints share.
        signals: those that stop the server.
        started: called once the server accepts connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        *,
        signals: Sequence[signal.Signals],
        started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._signals = signals
        self._call_when_started = started
        self._swept = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup([])
        if self.started:
            most = most_connections()
            for listening in sockets or ():
                acceptor = Acceptor(listening, self._protocol, self.server_state.connections, most)
                self.servers.append(cast(asyncio.Server, acceptor))
            # What is there now stays: to look through it again would hold up requests by tens of milliseconds.
            gc.collect()
            gc.freeze()
            self._call_when_started()

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second."""
        now = asyncio.get_running_loop().time()
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            end_silent(self.server_state.connections, now)
        return await super().on_tick(counter)

    def _protocol(self) -> asyncio.Protocol:
        return LightningProtocol(
            self.config, self.server_state, self.lifespan.state, load=self._service.load, unlimited=UNLIMITED
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer who waits, then finish what is in flight."""
        await self._service.drain()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Stop gracefully; told twice, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take signals as a request to stop, and not raise them again: a server that was told to stop did not fail."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.stop()

        previous = {number: signal.signal(number, handle) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


async def serve(
    settings: Settings,
    sockets: list[socket.socket],
    *,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    started: Callable[[], None] = lambda: None,
    stop_when_readable: int | None = None,
    samples_database: bool = True,
) -> None:
    """Serve until a signal, or until a file descriptor becomes readable.

    With `samples_database`, this process looks at the queue for the metrics.

    Raises:
        LightningError: the store cannot be opened.
    """
    store = await open_store(
        settings.database_url,
        partition=settings.partition,
        scan_debounce_seconds=settings.scan_debounce_seconds,
        claim_timeout_seconds=settings.claim_timeout_seconds,
        database_wait_seconds=settings.database_wait_seconds,
        recorder=recorder_of(settings),
    )
    try:
        app = create_app(settings, store)
        service_of(app).samples_database = samples_database
        config = uvicorn.Config(
            app,
            http="httptools",
            workers=1,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=settings.log_level == "debug",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            backlog=_BACKLOG,
        )
        server = LightningServer(config, service_of(app), signals=signals, started=started)
        if stop_when_readable is not None:
            loop = asyncio.get_running_loop()

            def orphaned() -> None:
                loop.remove_reader(stop_when_readable)
                server.stop()

            loop.add_reader(stop_when_readable, orphaned)
        await server.serve(sockets)
    finally:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await store.close()
        except TimeoutError:
            logger.warning("stopped without waiting for a database that does not answer")


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of the fast kind."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(log_lost_error)
        return runner.run(main)


def run(settings: Settings) -> None:
    """Serve until a signal says to stop.

    Raises:
        LightningError: the address, the database or its schema do not allow it.
    """
    settings.checked_exposure()
    check_database_url(settings.database_url)
    if settings.workers > 1 and is_memory(settings.database_url):
        raise ConfigurationError("a store in memory lives in one process: use one worker")
    configure_logging(settings.logging_level)
    sockets = bind_sockets(settings)
    try:
        run_in_loop(prepare_database(settings.database_url))
        settings = settings.with_port(sockets[0].getsockname()[1])
        with kept_metrics(settings) as metrics:
            if settings.workers == 1:
                run_in_loop(serve(settings, sockets, started=lambda: _announce(settings)))
            else:
                from lightning_api.supervisor import Supervisor

                Supervisor(settings, sockets, metrics=metrics, started=lambda: _announce(settings)).run()
    finally:
        for bound in sockets:
            bound.close()
    logger.info("stopped")


def _announce(settings: Settings) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("serving %s at http://%s:%d", displayed_url(settings.database_url), host, settings.port)


def bind_sockets(settings: Settings) -> list[socket.socket]:
    """Listen at every address of the host, all on one port.

    Raises:
        ConfigurationError: there is no such address, or the port is taken or not ours to take.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigurationError(f"{settings.host!r} is no address of this machine") from None
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, _kind, _protocol, _name, address in dict.fromkeys(found):
            bound = _bind(family, (address[0], port, *address[2:]))
            if bound is not None:
                sockets.append(bound)
                port = bound.getsockname()[1]
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise ConfigurationError(_bind_problem(settings, error)) from None
    if not sockets:
        raise ConfigurationError(f"{settings.host!r} is no address of this machine")
    return sockets


def _bind(family: int, address: tuple[Any, ...]) -> socket.socket | None:
    """A listening socket, or None where this machine does not have the address family."""
    try:
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_the_dead(bound)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return bound


def _notice_the_dead(listening: socket.socket) -> None:
    """Let connections end whose clients are gone without a word, or take no more; they have it from the listener."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)


def _bind_problem(settings: Settings, error: OSError) -> str:
    where = f"port {settings.port} of {settings.host}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{where} is in use"
        case errno.EACCES:
            return f"{where} may not be used by this user"
        case errno.EADDRNOTAVAIL:
            return f"{settings.host!r} is no address of this machine"
        case number:
            return f"{where} cannot be used: {os.strerror(number or 0)}"
