"""The reference backend: plain objects in process memory, with real transactions.

Every write keeps a journal of what undoes it, so that a failed call or an `atomic` whose body
raises leaves no trace. Nothing here suspends while it works: on one event loop each operation is
atomic by itself, and the label locks order whole transactions.
"""

from __future__ import annotations

from lightning_sql.collections.memory.collection import MemoryCollection
from lightning_sql.collections.memory.collections import MemoryCollections
from lightning_sql.collections.memory.key_value import MemoryKeyValue
from lightning_sql.collections.memory.queue import MemoryQueue

__all__ = ["MemoryCollection", "MemoryCollections", "MemoryKeyValue", "MemoryQueue"]
