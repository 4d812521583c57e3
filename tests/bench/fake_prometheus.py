"""A small stand-in for a Prometheus server: the answers to instant queries, by what is asked for."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

CALLS = {
    "agl_http": [
        ({"path": "/v1/agl/spans", "method": "POST"}, 1200.0, 0.0),
        ({"path": "/v1/agl/rollouts/{rollout_id}", "method": "GET"}, 300.0, 3.0),
        ({"path": "/v1/agl/never", "method": "GET"}, 0.0, 0.0),
    ],
    "agl_store": [({"store_pubmeth": "add_span"}, 1200.0, 12.0)],
    "agl_collections": [({"collection": "spans", "operation": "sql", "store_privmeth": "add_spans"}, 60.0, 0.0)],
}
"""Labels, calls and errors of what the store that it watched has done."""

_SUM = re.compile(r"sum by \(([\w, ]+)\) \((.+)\)")
_QUANTILE = re.compile(r"histogram_quantile\((0\.\d+), sum by \(([\w, ]+), le\) \((.+)\)\)")
_SERIES = r"(?P<series>(?P<subject>agl_\w+)_(total|latency_bucket)(?P<matcher>\{status![~=]\"[^\"]+\"\})?)"
_GROWN = re.compile(
    _SERIES + r" unless (?P=series) offset (?P<range>\d+ms)"
    r" and count_over_time\((?P=series)\[(?P=range)\]\) < on \(job, instance\) group_left \(\)"
    r" sum by \(job, instance\) \(count_over_time\(lightning_sql_build_info\[(?P=range)\]\)\)"
    r" or increase\((?P=series)\[(?P=range)\]\)"
)


class FakePrometheus:
    """What was asked, and answers to it.

    Attributes:
        queries: each expression, and the time that it was asked for.
        calls: as `CALLS`.
    """

    def __init__(self, calls: dict[str, list[Any]] | None = None) -> None:
        self.queries: list[tuple[str, float]] = []
        self.calls = CALLS if calls is None else calls

    async def query(self, request: web.Request) -> web.Response:
        """`POST /api/v1/query`."""
        form = await request.post()
        expression, time = str(form["query"]), float(str(form["time"]))
        self.queries.append((expression, time))
        value = self._value_of(expression)
        if value is None:
            problem = {"status": "error", "errorType": "bad_data", "error": f"parse error: {expression}"}
            return web.json_response(problem, status=400)
        wanted, of, subject = value
        result = [
            {"metric": {name: labels[name] for name in wanted}, "value": [time, of(calls, errors)]}
            for labels, calls, errors in self.calls.get(subject, [])
        ]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    def _value_of(self, expression: str) -> tuple[list[str], Callable[[float, float], str], str] | None:
        """The labels that an expression groups by, the value of a line, and what it is of."""
        if (found := _SUM.fullmatch(expression)) and (grown := _GROWN.fullmatch(found[2])):
            matcher = grown["matcher"]
            return found[1].split(", "), lambda calls, errors: str(errors if matcher else calls), grown["subject"]
        if (found := _QUANTILE.fullmatch(expression)) and (grown := _GROWN.fullmatch(found[3])):
            seconds = {"0.5": "0.002", "0.95": "0.02"}.get(found[1], "0.25")
            return found[2].split(", "), lambda calls, _: seconds if calls else "NaN", grown["subject"]
        return None


@contextlib.contextmanager
def fake_prometheus(fake: FakePrometheus | None = None, port: int = 0) -> Iterator[str]:
    """The address of a stand-in that runs in a thread of its own."""
    app = web.Application()
    app.router.add_post("/api/v1/query", (fake or FakePrometheus()).query)
    started, loop, runner = threading.Event(), asyncio.new_event_loop(), web.AppRunner(app)
    address: list[str] = []

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
