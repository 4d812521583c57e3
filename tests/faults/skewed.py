"""A server whose clock is wrong: `python -m tests.faults.skewed SECONDS NOTEBOOK serve …`.

What its watchdog ends is written down in the notebook, a line for every sweep that ended something.
"""

import sys
import time
from pathlib import Path

from lightning_api.cli import main
from lightning_sql.store.sql_store import SqlStore
from tests.faults.ledger import Notebook


def skew(seconds: float) -> None:
    """Let this process's clock be wrong by so much; what measures durations is not."""
    right = time.time

    def wrong() -> float:
        return right() + seconds

    time.time = wrong


def note_sweeps(notebook: Notebook) -> None:
    """Write down how many attempts each sweep of this process ended."""
    sweep = SqlStore.sweep

    async def noted(self: SqlStore) -> int:
        ended = await sweep(self)
        if ended:
            notebook.note("ended", ended)
        return ended

    SqlStore.sweep = noted


if __name__ == "__main__":
    skew(float(sys.argv.pop(1)))
    note_sweeps(Notebook(Path(sys.argv.pop(1))))
    main()
