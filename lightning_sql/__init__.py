"""lightning-sql: a durable LightningStore for Agent Lightning, in SQL.

The names below are imported on first use, so that `import lightning_sql` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sql.store.collection_store import CollectionStore
    from lightning_sql.store.factory import open_store
    from lightning_sql.store.interface import LightningStore

__version__ = "0.1.0"

__all__ = ["CollectionStore", "LightningStore", "__version__", "open_store"]

_HOMES = {
    "CollectionStore": "lightning_sql.store.collection_store",
    "LightningStore": "lightning_sql.store.interface",
    "open_store": "lightning_sql.store.factory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
