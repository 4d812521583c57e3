"""Where a server's processes keep their metrics, and that no other server does so at the same time."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from lightning_api.metric_files import MetricFiles, take_lock
from lightning_api.metrics import DIRECTORY_VARIABLE, metrics_directory
from lightning_api.settings import Settings
from lightning_sql.errors import ConfigurationError

__all__ = ["MetricDirectory", "kept_metrics"]

logger: Final = logging.getLogger(__name__)

_SERVER: Final = ".server"
_SERVER_SECONDS: Final = 12.0
"""How long the processes of a server that was killed may go on, so that another one waits for them."""


class _Hold:
    """A lock that is held until the last process has ended that has it; a process that is spawned with it has it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @override
    def __reduce__(self) -> Any:
        return _received, (DupFd(self._descriptor),)

    def release(self) -> None:
        """Hold it no longer, in this process."""
        os.close(self._descriptor)


def _received(duplicate: Any) -> _Hold:
    return _Hold(duplicate.detach())


@dataclass(frozen=True, slots=True)
class MetricDirectory:
    """The directory of a server, which can be handed to the processes that it spawns."""

    path: Path
    temporary: bool
    hold: _Hold

    def absorb(self, living: Collection[int] = ()) -> None:
        """Add up what all processes have left but those with these ids; what cannot be done now is done later."""
        try:
            if not MetricFiles(self.path).absorb(living):
                logger.warning(
                    "the metrics of a process that ended are added up later: somebody reads them all the time"
                )
        except OSError as error:
            logger.warning("the metrics of a process that ended could not be added up: %s", error.strerror)

    def remove(self) -> None:
        """Remove it, if it was made for this server only."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def kept_metrics(settings: Settings) -> Generator[MetricDirectory | None]:
    """Have a directory for metrics, named by `PROMETHEUS_MULTIPROC_DIR`, while the body runs; None if none is needed.

    It is the server's alone: what is found there is of processes that have ended, and is added to the totals rather
    than thrown away, because it may tell of what nobody has scraped yet, such as why they ended.

    Raises:
        ConfigurationError: the directory cannot be used, or another server uses it.
    """
    path = metrics_directory()
    # Where the variable is empty, prometheus-client would write files to wherever the server was started.
    if settings.tracker != "prometheus" or (settings.workers == 1 and DIRECTORY_VARIABLE not in os.environ):
        yield None
        return
    temporary = path is None
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="lightning-sql-metrics-"))
        # The processes that are spawned must find it before they import prometheus-client.
        os.environ[DIRECTORY_VARIABLE] = str(path)
    try:
        directory = MetricDirectory(path, temporary, _hold(path))
        try:
            directory.absorb()
            yield directory
        finally:
            if not temporary:
                directory.absorb()
            directory.remove()
            directory.hold.release()
    finally:
        if temporary:
            del os.environ[DIRECTORY_VARIABLE]


def _hold(path: Path) -> _Hold:
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(path / _SERVER, fcntl.LOCK_EX, 0.0)
        if descriptor is None:
            logger.warning("waiting for the server to end that keeps its metrics in %s", path)
            descriptor = take_lock(path / _SERVER, fcntl.LOCK_EX, _SERVER_SECONDS)
    except OSError as error:
        raise ConfigurationError(f"{path} ({DIRECTORY_VARIABLE}) cannot be written: {error.strerror}") from None
    if descriptor is None:
        raise ConfigurationError(f"another server keeps its metrics in {path} ({DIRECTORY_VARIABLE})")
    return _Hold(descriptor)
