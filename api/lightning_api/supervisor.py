"""Several server processes on the same sockets, kept alive by a parent that serves nothing itself."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Final

from lightning_api.logs import configure_logging
from lightning_api.metric_directory import MetricDirectory
from lightning_api.serve import GRACE_SECONDS, run_in_loop, serve
from lightning_api.settings import Settings
from lightning_sql.errors import ConfigurationError, LightningError

__all__ = ["Supervisor"]

logger: Final = logging.getLogger(__name__)

_STOP_SECONDS: Final = GRACE_SECONDS + 1.5
_RESTART_PAUSE_SECONDS: Final = 1.0
_REFUSED_TO_START: Final = 2
_FAILED: Final = 1

# A child that is spawned inherits no lock, thread or event loop of its parent.
_spawn: Final = multiprocessing.get_context("spawn")


def _work(
    settings: Settings,
    sockets: list[socket.socket],
    ready: Connection,
    metrics: MetricDirectory | None,
    samples_database: bool,
) -> None:
    """What a worker process does."""
    # The terminal sends Ctrl-C to every process of the group; the parent passes it on, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(settings.logging_level)
    parent = multiprocessing.parent_process()

    def started() -> None:
        ready.send(True)
        ready.close()

    try:
        run_in_loop(
            serve(
                settings,
                sockets,
                signals=(signal.SIGTERM,),
                started=started,
                stop_when_readable=None if parent is None else parent.sentinel,
                samples_database=samples_database,
            )
        )
    except LightningError as error:
        logger.error("%s", error)
        sys.exit(_REFUSED_TO_START)
    except Exception:
        # The interpreter would show more of it than may be shown.
        logger.exception("the worker failed")
        sys.exit(_FAILED)
    finally:
        if metrics is not None and parent is not None and not parent.is_alive():
            # Who made the directory was killed, and cannot.
            metrics.remove()


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    news: Connection
    """Becomes readable when the worker is ready."""
    ready: bool = False


class Supervisor:
    """Keeps `settings.workers` processes serving the same sockets.

    A worker that dies is replaced. If one cannot start in the first place, none are kept.

    Args:
        settings: how each worker is configured.
        sockets: listening ones.
        metrics: where the workers keep their metrics; None is nowhere.
        started: called once all workers accept connections.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: list[socket.socket],
        *,
        metrics: MetricDirectory | None = None,
        started: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._metrics = metrics
        self._started = started
        self._workers: list[_Worker] = []
        self._stops = 0
        self._alarm, self._alarm_writer = socket.socketpair()

    def run(self) -> None:
        """Supervise until SIGINT or SIGTERM.

        Raises:
            ConfigurationError: a worker could not start; it said why.
        """
        self._alarm_writer.setblocking(False)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for place in range(self._settings.workers):
                self._workers.append(self._spawn(place))
            self._supervise()
        finally:
            self._stop_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._alarm.close()
            self._alarm_writer.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stops += 1
        self._alarm_writer.send(b"!")

    def _spawn(self, place: int) -> _Worker:
        news, ready = _spawn.Pipe(duplex=False)
        # Looking at the queue is one worker's business, and that of whoever takes its place.
        arguments = self._settings, self._sockets, ready, self._metrics, place == 0
        process = _spawn.Process(target=_work, args=arguments, name="lightning-sql worker")
        process.start()
        ready.close()
        return _Worker(process, news)

    def _supervise(self) -> None:
        complete = False
        while not self._stops:
            self._await_news()
            if self._stops:
                return
            dead = [worker for worker in self._workers if not worker.process.is_alive()]
            if dead and not complete:
                raise ConfigurationError("a worker could not start")
            for worker in dead:
                self._replace(worker)
            if not complete and all(worker.ready for worker in self._workers):
                complete = True
                self._started()

    def _await_news(self) -> None:
        """Return when a worker is ready or dead, or a signal came."""
        pending = {worker.news: worker for worker in self._workers if not worker.ready}
        sentinels = [worker.process.sentinel for worker in self._workers]
        for source in wait([*pending, *sentinels, self._alarm]):
            if isinstance(source, Connection) and (worker := pending.get(source)) is not None:
                try:
                    worker.ready = source.recv()
                except EOFError:
                    worker.process.join(_STOP_SECONDS)

    def _replace(self, worker: _Worker) -> None:
        logger.warning("worker %s ended with status %s; starting another", worker.process.pid, worker.process.exitcode)
        worker.news.close()
        if self._metrics is not None:
            self._metrics.absorb([other.process.pid or 0 for other in self._workers if other.process.is_alive()])
        wait([self._alarm], _RESTART_PAUSE_SECONDS)
        if not self._stops:
            place = self._workers.index(worker)
            self._workers[place] = self._spawn(place)

    def _stop_all(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        asked_at = self._stops
        deadline = time.monotonic() + _STOP_SECONDS
        while any(self._alive()) and self._stops <= asked_at + 1 and time.monotonic() < deadline:
            wait([*self._alive()], 0.2)
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.news.close()

    def _alive(self) -> Iterable[int]:
        return [worker.process.sentinel for worker in self._workers if worker.process.is_alive()]
