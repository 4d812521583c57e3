"""The contract of the storage protocols, as pytest classes that any backend can run.

Subclass each in a test file under a name that begins with `Test`, and provide the fixture it asks for:

- `CollectionContract`: `make_collection(item_type, primary_keys)`, awaitable, an empty `Collection`;
- `QueueContract`: `make_queue(item_type)`, awaitable, an empty `Queue`;
- `KeyValueContract`: `make_key_value()`, awaitable, an empty `KeyValue` from strings to JSON values;
- `TransactionContract`: `collections`, an empty `LightningCollections`.
"""

import pytest

from lightning_sql.testing.contract.collection_reads import CollectionReads, MakeCollection
from lightning_sql.testing.contract.collection_writes import CollectionWrites
from lightning_sql.testing.contract.key_value import KeyValueContract, MakeKeyValue
from lightning_sql.testing.contract.queue import MakeQueue, QueueContract
from lightning_sql.testing.contract.transactions import TransactionContract

__all__ = [
    "CollectionContract",
    "KeyValueContract",
    "MakeCollection",
    "MakeKeyValue",
    "MakeQueue",
    "QueueContract",
    "TransactionContract",
]


@pytest.mark.asyncio
class CollectionContract(CollectionReads, CollectionWrites):
    """What every `Collection` does."""
