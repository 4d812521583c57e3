"""A training loop of Agent Lightning's own on an SQL database: its trainer, its runners, its tracer, a scripted agent.

`python training.py URL STRATEGY REPORT [victim]`; with a victim, the runner of one rollout is killed at work.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig

from lightning_sql.integrations.agentlightning import SqlLightningStore

RUNNERS = 8
TASKS = 32
SECONDS = 240
VICTIM = 5
"""The task whose runner dies."""
CONFIG = RolloutConfig(unresponsive_seconds=6, max_attempts=3, retry_condition=["unresponsive", "timeout", "failed"])


@agl.rollout
def agent(task: dict[str, Any], prompt_template: PromptTemplate) -> float:
    """What is scripted: a message, some rewards, and once the death of its process."""
    agl.emit_message(prompt_template.format(number=task["number"]))
    mark = Path(task["mark"]) if task["mark"] else None
    if mark is not None and task["number"] == VICTIM and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task["number"] / TASKS


def algorithm_of(report: Path) -> Any:
    @agl.algo
    async def algorithm(*, store: agl.LightningStore, train_dataset: Any) -> None:
        tasks = [train_dataset[index] for index in range(len(train_dataset))]
        resources = await store.add_resources(
            {"prompt_template": PromptTemplate(template="Task {number}", engine="f-string")}
        )
        rollouts = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=task, mode="train", config=CONFIG) for task in tasks]
        )
        ids = [rollout.rollout_id for rollout in rollouts]
        finished: list[Any] = []
        for _ in range(SECONDS):
            finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=1)
            if len(finished) == len(ids):
                break
        told: dict[str, Any] = {"store": type(store).__name__, "rollouts": []}
        for rollout in finished:
            spans = await store.query_spans(rollout.rollout_id, "latest")
            attempts = await store.query_attempts(rollout.rollout_id)
            told["rollouts"].append(
                {
                    "number": rollout.input["number"],
                    "status": rollout.status,
                    "resources": rollout.resources_id == resources.resources_id,
                    "attempts": [attempt.status for attempt in attempts],
                    "workers": [attempt.worker_id for attempt in attempts],
                    "numbers": [span.sequence_id for span in spans],
                    "reward": agl.find_final_reward(list(spans)),
                }
            )
        await asyncio.to_thread(report.write_text, json.dumps(told))

    return algorithm


def strategy_of(name: str) -> agl.ExecutionStrategy:
    kind, _, own = name.partition("-")
    managed = own != "own"
    if kind == "shm":
        # Agent Lightning has one tracer for a process, so that two runners in it would be in each other's way.
        return agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm", managed_store=managed)
    port = int(os.environ["AGL_TEST_PORT"])
    return agl.ClientServerExecutionStrategy(
        role="both", server_port=port, n_runners=RUNNERS, managed_store=managed, allowed_exit_codes=(0, -15, -9)
    )


def main(url: str, strategy: str, report: str, victim: str = "") -> None:
    mark = f"{report}.mark" if victim else ""
    tasks: Any = [{"number": number, "mark": mark} for number in range(TASKS)]
    trainer = agl.Trainer(
        algorithm=algorithm_of(Path(report)),
        store=SqlLightningStore(url, scan_debounce_seconds=1.0),
        strategy=strategy_of(strategy),
        tracer=agl.OtelTracer(),
        n_runners=1 if strategy.startswith("shm") else RUNNERS,
    )
    trainer.fit(agent, tasks)


if __name__ == "__main__":
    main(*sys.argv[1:])
