"""The files in which the processes of one server keep their metrics: read together, and never many.

prometheus-client gives each process files of its own in `PROMETHEUS_MULTIPROC_DIR`. Those of a process that has ended
must still count, so that there would be more of them with each restart; here they are added up in archives. A kill at
any moment, and whoever reads meanwhile, must neither miss a file nor count it twice:

- What belongs into an archive is written to a file of another name, with a list of the files that it replaces beside
  it. Giving it its next name is the one step that counts: from then on it stands for the archive and for all on the
  list, for readers as for whoever goes on where a killed process stopped.
- Whoever reads holds a lock with other readers, and whoever changes files holds it alone.
- Whatever is added up is a multiple of one small number (`lightning_api.metrics`), so that no order of adding makes a
  sum smaller than it was.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import struct
import time
from collections.abc import Collection, Generator, Iterable
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from lightning_sql.errors import OverloadedError

__all__ = ["MetricFiles", "take_lock"]

logger: Final = logging.getLogger(__name__)

_LOCK: Final = ".lock"
_LOCK_SECONDS: Final = 2.0
_READ_LOCK_SECONDS: Final = 10.0
_TRY_SECONDS: Final = 0.005

# Their types are not known to the checker.
_Collector: Final[Any] = MultiProcessCollector
_File: Final[Any] = MmapedDict

_ADDED_UP: Final = ("counter", "histogram")
"""The kinds of files that outlive their process; the gauges of a process that has ended say nothing any more."""
_ARCHIVE: Final = "archive"
_KEY_PARTS: Final = 4
"""What prometheus-client makes a key of: the metric, the sample, the labels and the help."""


class MetricFiles:
    """The metrics in a directory; a collector, as prometheus-client calls what a registry asks.

    Args:
        directory: it belongs to one server, and to nobody else.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def collect(self) -> Iterable[Metric]:
        """The metrics of all processes, together.

        Raises:
            OverloadedError: somebody has been changing the files for seconds.
            OSError: a file cannot be read.
        """
        lock = self.directory / _LOCK
        if not lock.exists():
            # Nobody has changed anything yet, and a reader may not be allowed to make the lock.
            with suppress(FileNotFoundError):
                found = self._read()
                if not lock.exists():
                    return found
        with self._locked(fcntl.LOCK_SH, _READ_LOCK_SECONDS) as locked:
            if not locked:
                raise OverloadedError("the metrics are being added up; try again")
            return self._read()

    def absorb(self, living: Collection[int] = ()) -> bool:
        """Add up what all processes have left but those with these ids, and remove their files.

        Returns False, with nothing done, while somebody does not stop to read.

        Raises:
            OSError: a file cannot be read, written or removed; calling this again goes on from there.
        """
        with self._locked(fcntl.LOCK_EX, _LOCK_SECONDS) as locked:
            if not locked:
                return False
            for kind in _ADDED_UP:
                self._finish(kind)
            spared = {_ARCHIVE, *map(str, living)}
            ended = [path for path in self.directory.glob("*_*.db") if path.stem.rpartition("_")[2] not in spared]
            for kind in _ADDED_UP:
                if added := [path for path in ended if path.name.startswith(f"{kind}_")]:
                    self._begin(kind, added)
                    self._finish(kind)
            for path in ended:
                if path.name.startswith("gauge_"):
                    path.unlink(missing_ok=True)
        return True

    def _read(self) -> list[Metric]:
        return list(_Collector.merge([str(path) for path in self._current()]))

    def _archive(self, kind: str) -> Path:
        return self.directory / f"{kind}_{_ARCHIVE}.db"

    def _sum(self, kind: str) -> Path:
        """What stands for an archive and others; prometheus-client knows the kind of a file by how its name begins."""
        return self.directory / f"{kind}_sum"

    def _list(self, kind: str) -> Path:
        return self.directory / f"{kind}_absorbed.json"

    def _draft(self, kind: str) -> Path:
        return self.directory / f"{kind}_draft"

    def _begin(self, kind: str, added: Collection[Path]) -> None:
        """Write down the sum of an archive and some files; its last step makes it stand for them."""
        totals: dict[str, float] = {}
        for path in (self._archive(kind), *added):
            for key, value in _values(path).items():
                totals[key] = totals.get(key, 0.0) + value
        self._list(kind).write_text(json.dumps([path.name for path in added]))
        _sync(self._list(kind))
        draft = self._draft(kind)
        draft.unlink(missing_ok=True)
        with closing(_File(str(draft))) as written:
            for key, total in totals.items():
                written.write_value(key, total, 0.0)
        _sync(draft)
        draft.rename(self._sum(kind))

    def _finish(self, kind: str) -> None:
        """Remove what a sum stands for, and make it the archive; also where a process was killed meanwhile."""
        replacing = self._sum(kind)
        if replacing.exists():
            for name in self._absorbed(kind):
                (self.directory / name).unlink(missing_ok=True)
            replacing.rename(self._archive(kind))
        for path in (self._list(kind), self._draft(kind)):
            path.unlink(missing_ok=True)

    def _absorbed(self, kind: str) -> list[str]:
        return json.loads(self._list(kind).read_text())

    def _current(self) -> Iterable[Path]:
        """The files that count now. One that a process has just made is empty, and cannot be read yet."""
        found = {path.name: path for path in self.directory.glob("*.db") if path.stat().st_size}
        for kind in _ADDED_UP:
            replacing = self._sum(kind)
            if replacing.exists():
                for name in self._absorbed(kind):
                    found.pop(name, None)
                found[self._archive(kind).name] = replacing
        return found.values()

    @contextmanager
    def _locked(self, operation: int, seconds: float) -> Generator[bool]:
        """Hold the lock, if it can be had in time."""
        descriptor = take_lock(self.directory / _LOCK, operation, seconds)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def take_lock(path: Path, operation: int, seconds: float) -> int | None:
    """A file descriptor that holds a lock on a file until it is closed; None where that takes longer.

    Raises:
        OSError: the file cannot be opened.
    """
    flags = os.O_RDONLY if operation == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + seconds
    while True:
        # A call that waits by itself could not be ended: somebody may have been stopped with the lock in his hands.
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            return descriptor
        if time.monotonic() >= deadline:
            os.close(descriptor)
            return None
        time.sleep(_TRY_SECONDS)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _values(path: Path) -> dict[str, float]:
    """What a file holds, by the keys of prometheus-client.

    Of one that is damaged, nothing: that costs what it counted, and keeping it would cost every scrape. A kill damages
    none, but the machine may fail before its disk has everything.
    """
    values: dict[str, float] = {}
    if not path.exists() or not path.stat().st_size:
        return values
    try:
        for key, value, _timestamp, _position in _File.read_all_values_from_file(str(path)):
            if len(json.loads(key)) != _KEY_PARTS or not math.isfinite(value):
                raise ValueError(key)
            values[key] = value
    except (ValueError, TypeError, RuntimeError, struct.error):
        logger.warning("the metrics in %s are damaged and left out", path.name)
        return {}
    return values
