"""The process that makes the calls: `python -m bench.drivers.run KIND`.

It reads a job a line from its standard input, as JSON, and answers each with a line on its standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TextIO

from bench.drivers.calls import Calls, NotAvailableError
from bench.drivers.meter import FAILURES, GaveUpError, Meter


async def _lean(job: dict[str, Any], meter: Meter) -> None:
    from bench.drivers.lean import LeanCalls

    await _with_client(LeanCalls, job, meter)


async def _upstream(job: dict[str, Any], meter: Meter) -> None:
    from bench.drivers.upstream import UpstreamCalls

    await _with_client(UpstreamCalls, job, meter)


async def _with_client(client: Callable[[str], Calls], job: dict[str, Any], meter: Meter) -> None:
    from bench.drivers.jobs import JOBS

    calls = client(job["base_url"])
    try:
        await JOBS[job["job"]](calls, meter, **job["params"])
    finally:
        await calls.close()


async def _store(job: dict[str, Any], meter: Meter) -> None:
    from bench.drivers.store import JOBS

    await JOBS[job["job"]](job["database_url"], meter, **job["params"])


async def _queue(job: dict[str, Any], meter: Meter) -> None:
    from bench.drivers.queue_peer import drain

    await drain(job["database_url"], meter, **job["params"])


KINDS = {"lean": _lean, "upstream": _upstream, "store": _store, "queue": _queue}


def _leaves(error: BaseException) -> Iterable[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def answer(work: Callable[[dict[str, Any], Meter], Awaitable[None]], job: dict[str, Any]) -> dict[str, Any]:
    """Do a job and say what came of it; what goes wrong is counted, not raised."""
    meter = Meter(job.get("watched") or {})
    unavailable: str | None = None
    try:
        await work(job, meter)
    except (NotAvailableError, GaveUpError, ExceptionGroup, *FAILURES) as error:
        for leaf in _leaves(error):
            if isinstance(leaf, NotAvailableError):
                unavailable = str(leaf)
            elif not isinstance(leaf, GaveUpError):
                meter.failed += 1
                meter.failures.append(f"{type(leaf).__name__}: {leaf}"[:500])
    return {
        "values": meter.values,
        "calls": meter.calls,
        "failed": meter.failed,
        "failures": meter.failures[:5],
        "unavailable": unavailable,
    }


def _own_output() -> TextIO:
    """Standard output for the answers alone: what anything else prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(kind: str) -> None:
    """Answer jobs until standard input ends."""
    answers = _own_output()
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if kind != "upstream":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        for line in sys.stdin:
            answers.write(json.dumps(runner.run(answer(KINDS[kind], json.loads(line)))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
