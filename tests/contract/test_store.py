"""The contract of the store, over memory, SQLite and PostgreSQL, in process and over HTTP."""

import pytest

from lightning_sql.store.interface import LightningStore
from lightning_sql.testing import store_contract as contract
from tests.backends import POSTGRES, Clock

IN_PROCESS = ["memory", "sqlite", POSTGRES]
OVER_HTTP = [pytest.param(f"http-{kind}", marks=pytest.mark.slow) for kind in ("memory", "sqlite", "postgres")]


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


everywhere = pytest.mark.parametrize("store_of", [*IN_PROCESS, *OVER_HTTP], indirect=True)
in_process = pytest.mark.parametrize("store_of", IN_PROCESS, indirect=True)


@everywhere
class TestRollouts(FakeTime, contract.RolloutContract):
    pass


@everywhere
class TestAttempts(FakeTime, contract.AttemptContract):
    pass


@everywhere
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


@everywhere
class TestWaits(FakeTime, contract.WaitContract):
    pass


@everywhere
class TestQueueLaw(FakeTime, contract.QueueLawContract):
    pass


@everywhere
class TestConcurrency(FakeTime, contract.ConcurrencyContract):
    pass


@everywhere
class TestPayloads(FakeTime, contract.PayloadContract):
    pass


@everywhere
class TestService(FakeTime, contract.ServiceContract):
    pass


@in_process
class TestBatches(FakeTime, contract.BatchContract):
    pass
