"""The contract of the store, over memory, SQLite and PostgreSQL, in process and over HTTP."""

from typing import Any

import pytest

from lightning_sql.store.interface import LightningStore
from lightning_sql.testing import store_contract as contract
from tests.backends import POSTGRES, SQLITE, Clock

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


# Whatever a store does is shown in process on each backend, and whatever crosses the wire on one of them.
# What depends on both, many callers at once above all, is shown on all of them.
each = over("memory", SQLITE, POSTGRES, HTTP_MEMORY)
each_and_all_over_http = over("memory", "sqlite", POSTGRES, HTTP_MEMORY, HTTP_SQLITE, HTTP_POSTGRES)


@each
class TestRollouts(FakeTime, contract.RolloutContract):
    pass


@each
class TestAttempts(FakeTime, contract.AttemptContract):
    pass


@each_and_all_over_http
class TestSpans(FakeTime, contract.SpanContract):
    pass


@each
class TestResources(FakeTime, contract.ResourcesContract):
    pass


@each
class TestWorkers(FakeTime, contract.WorkerContract):
    pass


@each
class TestWatchdog(FakeTime, contract.WatchdogContract):
    pass


@each_and_all_over_http
class TestWaits(FakeTime, contract.WaitContract):
    pass


@each_and_all_over_http
class TestQueueLaw(FakeTime, contract.QueueLawContract):
    pass


@each_and_all_over_http
class TestConcurrency(FakeTime, contract.ConcurrencyContract):
    pass


@each
class TestPayloads(FakeTime, contract.PayloadContract):
    pass


@each_and_all_over_http
class TestService(FakeTime, contract.ServiceContract):
    pass


@over("memory", "sqlite", POSTGRES)
class TestBatches(FakeTime, contract.BatchContract):
    pass
