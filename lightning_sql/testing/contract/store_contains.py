"""What `…_contains` finds: the text as it was given, letter by letter."""

from __future__ import annotations

from typing import Any, Final

from lightning_sql.store.interface import LightningStore
from lightning_sql.testing.contract.store_base import StoreFixtures
from lightning_sql.testing.samples import make_span

__all__ = ["CONTAINS_NAMES", "CONTAINS_NEEDLES", "ContainsContract"]

CONTAINS_NAMES: Final = (
    "plain", "PLAIN", "Plain", "100%", "a_b", "aXb", "back\\slash", "back\\\\slash", "it's", 'a "quoted" one',
    "*.[a-z]?", "^a$", "a' OR '1'='1", "; DROP TABLE spans; --", "%00", "${x} {0} %s :name $1 ?", "\x1aNaN",
    "straße", "STRASSE", "é", "e\u0301", "Σίσυφος", "ΣΊΣΥΦΟΣ", "İi", "ıI", "中文", "😀😃", "a\u200bb", "a b\tc\nd",
)  # fmt: skip
"""Names in which whatever is not literal would find too much or too little: patterns, quotes, other cases, accents."""

CONTAINS_NEEDLES: Final = (
    "", "plain", "LAIN", "lai", "%", "_", "a%b", "a_b", "a__", "%%", "\\", "\\\\", "\\%", "'", "''", '"', "*", "?",
    "[a-z]", "^", ".", "' OR '", "--", "%00", "%s", ":name", "$1", "${x}", "{0}", "\x1a", "aN", "ss", "SS", "ß", "é",
    "e", "\u0301", "Σ", "σ", "ς", "İ", "i", "I", "ı", "文", "😀", "😃", "\u200b", " ", "\t", "\n", "nothing",
)  # fmt: skip


class ContainsContract(StoreFixtures):
    """Section 5 of the contract: a filter with `contains` is literal and minds upper and lower case."""

    async def test_contains_is_literal(self, store: LightningStore) -> None:
        started = await store.start_rollout(1)
        attempt = started.rollout_id, started.attempt.attempt_id
        spans = [
            make_span(*attempt, name, number, name=name, trace_id=name, parent_id=name)
            for number, name in enumerate(CONTAINS_NAMES, 1)
        ]
        await store.add_many_spans(spans)
        for name in CONTAINS_NAMES:
            await store.update_worker(name)
            await store.update_resources(name, {})
        for needle in CONTAINS_NEEDLES:
            expected = {name for name in CONTAINS_NAMES if needle in name}
            for field in ("span_id", "trace_id", "parent_id", "name"):
                options: dict[str, Any] = {f"{field}_contains": needle}
                assert {span.span_id for span in await store.query_spans(*attempt, **options)} == expected, options
            workers = await store.query_workers(worker_id_contains=needle)
            assert {worker.worker_id for worker in workers} == expected, needle
            resources = await store.query_resources(resources_id_contains=needle)
            assert {update.resources_id for update in resources} == expected, needle

    async def test_contains_is_literal_in_rollout_ids(self, store: LightningStore) -> None:
        rollouts = [await store.enqueue_rollout(number) for number in range(3)]
        ids = {rollout.rollout_id for rollout in rollouts}
        chosen = rollouts[1].rollout_id
        middle = chosen[4:-1]
        patterns = (f"%{middle}", f"{middle[:-2]}_{middle[-1]}", "_", "%")
        for needle in ("", "-", chosen, middle, middle[:-1], middle.upper(), *patterns):
            expected = {name for name in ids if needle in name}
            found = await store.query_rollouts(rollout_id_contains=needle)
            assert {rollout.rollout_id for rollout in found} == expected, needle
