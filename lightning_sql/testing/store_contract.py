"""The contract of a whole `LightningStore`, as pytest classes that any store can run.

Subclass each in a test file under a name that begins with `Test`, next to a fixture `store`: an
empty store that looks for overdue attempts before each call (debounce 0). If its clock can be set,
override the fixture `advance` as well; otherwise the suite sleeps, some seconds in all. Where
CONTRACT.md section 12 names something better than what the protocol's first server does, that is
what is demanded here. `ClaimTimeoutContract` is for a store whose claims end after `CLAIM_TIMEOUT` seconds.
"""

from lightning_sql.testing.contract.store_attempts import AttemptContract
from lightning_sql.testing.contract.store_base import Advance
from lightning_sql.testing.contract.store_claim_waits import ClaimWaitContract
from lightning_sql.testing.contract.store_contains import ContainsContract
from lightning_sql.testing.contract.store_keys import IdempotencyContract
from lightning_sql.testing.contract.store_laws import (
    BatchContract,
    ConcurrencyContract,
    PayloadContract,
    QueueLawContract,
    ServiceContract,
)
from lightning_sql.testing.contract.store_resources import ResourcesContract, WorkerContract
from lightning_sql.testing.contract.store_rollouts import RolloutContract
from lightning_sql.testing.contract.store_spans import SpanContract
from lightning_sql.testing.contract.store_time import (
    CLAIM_TIMEOUT,
    ClaimTimeoutContract,
    WaitContract,
    WatchdogContract,
)

__all__ = [
    "CLAIM_TIMEOUT",
    "Advance",
    "AttemptContract",
    "BatchContract",
    "ClaimTimeoutContract",
    "ClaimWaitContract",
    "ConcurrencyContract",
    "ContainsContract",
    "IdempotencyContract",
    "PayloadContract",
    "QueueLawContract",
    "ResourcesContract",
    "RolloutContract",
    "ServiceContract",
    "SpanContract",
    "WaitContract",
    "WatchdogContract",
    "WorkerContract",
]
