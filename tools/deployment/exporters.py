"""What Prometheus itself and the exporters of others say, as far as a dashboard or a rule asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["EXPORTED"]

_GROWS: Final = True
_MOVES: Final = False

EXPORTED: Final[Mapping[str, tuple[bool, tuple[str, ...]]]] = {
    "up": (_MOVES, ()),
    # prometheus-postgres-exporter 0.11
    "pg_up": (_MOVES, ()),
    "pg_database_size_bytes": (_MOVES, ("server", "datname")),
    "pg_locks_count": (_MOVES, ("server", "datname", "mode")),
    "pg_settings_max_connections": (_MOVES, ("server",)),
    "pg_stat_activity_count": (_MOVES, ("server", "datname", "state")),
    "pg_stat_activity_max_tx_duration": (_MOVES, ("server", "datname", "state")),
    "pg_stat_database_blks_hit": (_GROWS, ("server", "datname", "datid")),
    "pg_stat_database_blks_read": (_GROWS, ("server", "datname", "datid")),
    "pg_stat_database_conflicts": (_GROWS, ("server", "datname", "datid")),
    "pg_stat_database_deadlocks": (_GROWS, ("server", "datname", "datid")),
    "pg_stat_database_numbackends": (_MOVES, ("server", "datname", "datid")),
    "pg_stat_database_xact_commit": (_GROWS, ("server", "datname", "datid")),
    "pg_stat_database_xact_rollback": (_GROWS, ("server", "datname", "datid")),
    # prometheus-node-exporter 1.5
    "node_cpu_seconds_total": (_GROWS, ("cpu", "mode")),
    "node_disk_io_time_seconds_total": (_GROWS, ("device",)),
    "node_filesystem_avail_bytes": (_MOVES, ("device", "fstype", "mountpoint")),
    "node_filesystem_size_bytes": (_MOVES, ("device", "fstype", "mountpoint")),
    "node_memory_MemAvailable_bytes": (_MOVES, ()),
    "node_memory_MemTotal_bytes": (_MOVES, ()),
}
"""Whether a series only ever grows, and its own labels. `make test-monitoring` holds this against the real ones."""
