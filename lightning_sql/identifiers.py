"""Fresh ids, in the protocol's form (CONTRACT.md section 1)."""

from __future__ import annotations

import itertools
import os
import random
from hashlib import blake2b
from typing import Final

__all__ = ["new_attempt_id", "new_resources_id", "new_rollout_id"]

_RUN: Final = 4096


class _Neighbours:
    """Ids of twelve hexadecimal digits that come in runs of neighbours.

    Rows are found by their rollout's id, in six indexes. Were each id altogether random, each rollout
    would lie on pages of its own of a large database: to be read from the disk, and to be written whole
    into the log. So six digits are drawn anew for every 4096 ids, three count them, and three are random.
    Two ids of different runs, or processes, are equal as seldom as if all digits were random (once in
    2**48), those of a run never.
    """

    def __init__(self) -> None:
        self._key = os.urandom(16)
        self._numbers = itertools.count()
        self._latest = (-1, "")

    def __call__(self) -> str:
        # Safe from any number of threads: the count is one step, and a run's digits follow from its number.
        run, place = divmod(next(self._numbers), _RUN)
        latest, digits = self._latest
        if latest != run:
            digits = blake2b(run.to_bytes(8, "big"), key=self._key, digest_size=3).hexdigest()
            self._latest = (run, digits)
        return f"{digits}{place << 12 | _random.getrandbits(12):06x}"


_random = random.Random(os.urandom(32))
_next_rollout = _Neighbours()


def _begin_anew() -> None:
    # A forked process would give out the ids of its parent.
    global _random, _next_rollout
    _random = random.Random(os.urandom(32))
    _next_rollout = _Neighbours()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def new_rollout_id() -> str:
    """A fresh rollout id: `ro-` and 12 hexadecimal digits."""
    return f"ro-{_next_rollout()}"


def new_attempt_id() -> str:
    """A fresh attempt id, unique within its rollout: `at-` and 8 hexadecimal digits."""
    return f"at-{_random.getrandbits(32):08x}"


def new_resources_id() -> str:
    """A fresh resources id: `rs-` and 12 hexadecimal digits."""
    return f"rs-{_random.getrandbits(48):012x}"
