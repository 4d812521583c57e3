"""The contract of the stores, over memory, SQLite and PostgreSQL, in process and over HTTP."""

from typing import Any

import pytest

from lightning_sql.store.interface import LightningStore
from lightning_sql.testing import store_contract as contract
from tests.backends import COLLECTIONS, POSTGRES, SQLITE, Clock

HTTP_MEMORY, HTTP_SQLITE, HTTP_POSTGRES = (
    pytest.param(f"http-{kind}", marks=pytest.mark.slow) for kind in ("memory", "sqlite", "postgres")
)


@pytest.fixture
def store(store_of: LightningStore) -> LightningStore:
    return store_of


class FakeTime:
    """Time passes by the test's clock, also behind a server, which runs in this process."""

    @pytest.fixture
    def advance(self, clock: Clock) -> contract.Advance:
        async def advance(seconds: float) -> None:
            clock.now += seconds

        return advance


def over(*kinds: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("store_of", kinds, indirect=True)


# In the fast tests SQLite shows what depends on many callers at once; all the rest is left to memory there.
everywhere = over("memory", SQLITE, POSTGRES, *COLLECTIONS, HTTP_MEMORY, HTTP_SQLITE, HTTP_POSTGRES)
everywhere_soon = over("memory", "sqlite", POSTGRES, *COLLECTIONS, HTTP_MEMORY, HTTP_SQLITE, HTTP_POSTGRES)


@everywhere
class TestRollouts(FakeTime, contract.RolloutContract):
    pass


@everywhere
class TestAttempts(FakeTime, contract.AttemptContract):
    pass


@everywhere_soon
class TestSpans(FakeTime, contract.SpanContract):
    pass


@everywhere
class TestResources(FakeTime, contract.ResourcesContract):
    pass


@everywhere
class TestWorkers(FakeTime, contract.WorkerContract):
    pass


@everywhere
class TestWatchdog(FakeTime, contract.WatchdogContract):
    pass


@over(
    *("memory-claims-end", "sqlite-claims-end"),
    pytest.param("postgres-claims-end", marks=pytest.mark.slow),
    pytest.param("collections-sqlite-claims-end", marks=pytest.mark.slow),
    pytest.param("http-postgres-claims-end", marks=pytest.mark.slow),
)
class TestClaimTimeouts(FakeTime, contract.ClaimTimeoutContract):
    pass


@everywhere_soon
class TestClaimWaits(FakeTime, contract.ClaimWaitContract):
    pass


@everywhere_soon
class TestWaits(FakeTime, contract.WaitContract):
    pass


@everywhere_soon
class TestQueueLaw(FakeTime, contract.QueueLawContract):
    pass


@everywhere_soon
class TestConcurrency(FakeTime, contract.ConcurrencyContract):
    pass


@everywhere
class TestPayloads(FakeTime, contract.PayloadContract):
    pass


@everywhere_soon
class TestContains(FakeTime, contract.ContainsContract):
    pass


@everywhere_soon
class TestService(FakeTime, contract.ServiceContract):
    pass


@everywhere_soon
class TestIdempotency(FakeTime, contract.IdempotencyContract):
    pass


@over("memory", "sqlite", POSTGRES, *COLLECTIONS)
class TestBatches(FakeTime, contract.BatchContract):
    pass
