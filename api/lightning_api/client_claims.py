"""Claims of a client whose answers never came."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final, TypeAlias

__all__ = ["OpenClaims"]

_MOST: Final = 100
"""How many claims of one kind are remembered."""

_Kind: TypeAlias = tuple[int, str | None]
"""The limit, and the worker."""


class OpenClaims:
    """The keys of claims of which it is not known what came of them; each is asked for again by one claim.

    They belong to one object of one process: of two that asked for the same claim, both would get it.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._keys: dict[_Kind, deque[str]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[OpenClaims], tuple[()]]:
        return OpenClaims, ()

    def take(self, limit: int, worker_id: str | None) -> str | None:
        """The oldest key of such a claim, which is then nobody else's."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            keys = self._keys.get((limit, worker_id))
            if keys is None:
                return None
            key = keys.popleft()
            if not keys:
                del self._keys[limit, worker_id]
            return key

    def put(self, limit: int, worker_id: str | None, key: str) -> None:
        """Remember a key; of very many the oldest are forgotten."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._keys.setdefault((limit, worker_id), deque(maxlen=_MOST)).append(key)
