"""Upstream's server over its store in memory, as its own command line runs it; for its environment's Python.

`python -m bench.peer_server --rollouts N …` has N finished rollouts in the store before it serves; every
other argument is the command line's own.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench.payloads import rollout_input
from bench.seeds import seed_of
from bench.upstream_package import prepare_upstream_package


async def _fill(store: Any, rollouts: int) -> None:
    """Put finished rollouts with an attempt each into the store's collections, the same that `bench.seed` writes."""
    from agentlightning.types import Attempt, Rollout

    for first in range(1, rollouts + 1, 10_000):
        seeds = [seed_of(number) for number in range(first, min(first + 10_000, rollouts + 1))]
        await store.collections.rollouts.insert(
            [
                Rollout(
                    rollout_id=seed.rollout_id,
                    input=rollout_input(),
                    start_time=seed.start_time,
                    end_time=seed.end_time,
                    status=seed.status,
                    mode="train",
                    metadata={},
                )
                for seed in seeds
            ]
        )
        await store.collections.attempts.insert(
            [
                Attempt(
                    rollout_id=seed.rollout_id,
                    attempt_id=seed.attempt_id,
                    sequence_id=1,
                    start_time=seed.start_time,
                    end_time=seed.end_time,
                    status=seed.status,
                )
                for seed in seeds
            ]
        )


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rollouts", type=int, default=0)
    own, rest = parser.parse_known_args()
    package: Any = prepare_upstream_package()
    from agentlightning.logging import setup

    # The one name that its command line takes from the package's own `__init__`.
    package.setup_logging = setup
    from agentlightning.cli import store as command
    from agentlightning.store.client_server import LightningStoreServer

    if own.rollouts:

        class FilledServer(LightningStoreServer):
            async def run_forever(self) -> None:
                await _fill(self.store, own.rollouts)
                await super().run_forever()

        command.LightningStoreServer = FilledServer
    return command.main(rest)


if __name__ == "__main__":
    sys.exit(main())
