"""Everything that can go wrong, over and over, for as long as one likes: `python -m tests.faults.soak --minutes 10`.

Half of the time on SQLite, half on PostgreSQL. The last line of its output is the verdict, and its exit code is 1
when anything is wrong.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from lightning_sql.testing.postgres import postgres_cluster
from tests.faults.ledger import Report
from tests.faults.stage import faults_on, stage_on

SERVERS = 2
RUNNERS = 12
CALM_SECONDS = 1.0
"""Between two faults."""
WEIGHTS = {"kill_a_server": 4, "kill_the_database": 3}
"""How often a fault falls, where that is not once in its turn."""


async def soak(dialect: str, seconds: float) -> tuple[Report, Counter[str]]:
    """Work on one dialect for so long; what was wrong in the end, and what happened meanwhile."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-sql-soak-")))
        cluster = None
        url = f"sqlite:///{folder / 'soak.db'}"
        if dialect == "postgres":
            cluster = stack.enter_context(postgres_cluster(settings={"fsync": "on"}))
            url = cluster.create_database()
        stage = await stack.enter_async_context(stage_on(url, folder, cluster=cluster, servers=SERVERS))
        for kind in ("own", "upstream"):
            await stage.hire(kind, RUNNERS)
        faults = faults_on(cluster)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for fault in random.sample(faults, len(faults)):
                for _ in range(WEIGHTS.get(fault, 1)):
                    await asyncio.sleep(CALM_SECONDS)
                    await stage.suffer(fault)
            sys.stdout.write(f"{dialect}: {dict(stage.happened)}\n")
            sys.stdout.flush()
        await stage.dismiss()
        for server in stage.servers:
            await server.end(signal.SIGTERM)
        return await stage.verdict(), stage.happened


def main() -> int:
    """Soak, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dialect", choices=["sqlite", "postgres"], action="append")
    options = parser.parse_args()
    dialects: list[str] = options.dialect or ["sqlite", "postgres"]
    counts: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    wrong: list[str] = []
    totals = Counter[str]()
    for dialect in dialects:
        report, faults = asyncio.run(soak(dialect, options.minutes * 60 / len(dialects)))
        counts += report.counts
        happened += faults
        wrong += [f"{dialect}: {what}" for what in report.wrong]
        totals.update(lost=len(report.lost), double=len(report.double), gaps=len(report.gaps))
        sys.stdout.write(f"{dialect}: {dict(report.counts)} {dict(faults)}\n")
    for what in wrong:
        sys.stdout.write(f"{what}\n")
    sys.stdout.write(
        f"soak: rollouts={counts['rollouts']} server_kills={happened['kill_a_server']}"
        f" database_kills={happened['kill_the_database']}"
        f" lost={totals['lost']} double={totals['double']} gaps={totals['gaps']}\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
