"""One SQLite file under many processes, some of which die inside of a transaction; the long form is a command."""

from pathlib import Path

import pytest

from lightning_sql.database.engine import Database
from lightning_sql.store.sql_store import SqlStore
from tests.faults.ledger import check
from tests.faults.sqlite_processes import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SECONDS = 6.0


async def test_nothing_is_lost_and_nobody_is_locked_out(tmp_path: Path) -> None:
    outcome = await play(tmp_path, SECONDS)
    assert outcome.wrong == []
    assert outcome.kills >= 1
    assert outcome.writes > 0
    assert outcome.reads > 0
    assert any(outcome.unseen)

    # Had what was in those transactions been acknowledged, it would be missing.
    rollouts, attempts, spans = outcome.unseen
    outcome.ledger.enqueued.update(rollout_id for (rollout_id,) in rollouts)
    outcome.ledger.claims += [(*key, 1) for key in attempts]
    outcome.ledger.spans.update(map(tuple, spans))
    async with SqlStore(Database(f"sqlite:///{tmp_path / 'shared.db'}")) as store:
        report = await check(outcome.ledger, store)
    assert len(report.lost) == sum(map(len, outcome.unseen))
