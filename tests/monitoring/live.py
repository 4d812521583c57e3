"""Our dashboard and alerts on the real Prometheus and exporters: `python -m tests.monitoring.live --seconds 40`.

What docker/compose.postgres.yaml starts is started without containers, with the same commands and the same
configuration, and put under load. Then every expression of the dashboard must return data, every variable have its
value, every rule have been evaluated, every metric that the checks of the files know be there with just these labels,
and the server and its exporter say the same; what Prometheus saved is then looked at as docker/compose.grafana.yaml
does. The last line of the output says how it went; the exit code is 1 when
anything is wrong, and 2 when it cannot be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_api.metrics import METRICS_PATH
from tests.monitoring.load import load
from tests.monitoring.stack import ROOT, TOKEN, Binaries, MonitoringError, Stack, find_binaries, running, saved
from tools.deployment.dashboard import DASHBOARDS, queries_of
from tools.deployment.prometheus import ALERT_TESTS, CONFIGURATION, RULES, SAVED
from tools.deployment.promql import known_metrics

JOB = "lightning-sql"
WINDOW = "20s"
"""Over which rates are taken; scrapes are a second apart."""
AGREEMENT_TRIES = 30


class Prometheus:
    """Asks a Prometheus."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def get(self, path: str, **parameters: str) -> Any:
        """What is below `/api/v1/`.

        Raises:
            MonitoringError: it says that there is an error.
        """
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as answer:
            body = await answer.json()
        if body["status"] != "success":
            raise MonitoringError(f"{parameters}: {body['error']}")
        return body["data"]

    async def points(self, expression: str, begun: float, ended: float) -> tuple[int, int]:
        """How many series an expression has between two times, and how many points that are numbers."""
        result = await self.get("query_range", query=expression, start=str(begun), end=str(ended), step="2")
        values = [float(value) for series in result["result"] for _, value in series["values"]]
        return len(result["result"]), sum(map(math.isfinite, values))


async def examine(stack: Stack, seconds: float, binaries: Binaries, folder: Path, console: Console) -> list[str]:
    """Put the stack of a folder under load and look at it; what is wrong."""
    wrong: list[str] = []
    async with aiohttp.ClientSession() as session:
        prometheus = Prometheus(session, stack.prometheus)
        begun = time.time()
        with console.status(f"load for {seconds:.0f} s"):
            finished = await load(stack.server, TOKEN, seconds)
        ended = time.time()
        if not finished:
            wrong.append("no rollout finished")
        console.print(f"{finished} rollouts finished under load", highlight=False)
        values = {"job": JOB, "database": stack.database, "__rate_interval": WINDOW}
        for path in sorted(ROOT.glob(DASHBOARDS)):
            dashboard = json.loads(path.read_text())
            wrong += await _panels(prometheus, dashboard, values, begun, ended, console)
            wrong += await _variables(prometheus, dashboard, values)
        wrong += await _rules(prometheus)
        wrong += await _metrics(prometheus)
        # A scrape is a request too, and counted.
        stack.processes["prometheus"].send_signal(signal.SIGTERM)
        await asyncio.to_thread(stack.processes["prometheus"].wait, 30)
        wrong += await _agreement(session, stack)
        with saved(binaries, folder) as url:
            depth = f'lightning_sql_queue_depth{{job="{JOB}"}}'
            if not (await Prometheus(session, url).points(depth, begun, ended))[1]:
                wrong.append("what was saved is not there any more")
    return wrong


async def _panels(
    prometheus: Prometheus, dashboard: Any, values: Mapping[str, str], begun: float, ended: float, console: Console
) -> list[str]:
    wrong: list[str] = []
    table = Table("panel", "expression", "series", "points", title=dashboard["title"], title_justify="left")
    for query in queries_of(dashboard):
        expression = query.with_variables(values)
        series, points = await prometheus.points(expression, begun, ended)
        style = None if points else "red"
        table.add_row(escape(query.panel), escape(query.expression), str(series), str(points), style=style)
        if not points:
            wrong.append(f"{query.panel}: no data of {expression}")
    console.print(table)
    return wrong


async def _variables(prometheus: Prometheus, dashboard: Any, values: Mapping[str, str]) -> list[str]:
    wrong: list[str] = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            series = await prometheus.get("series", **{"match[]": match[1]})
            found = sorted({labels[match[2]] for labels in series})
            if found != [values[variable["name"]]]:
                wrong.append(f"the variable {variable['name']} has the values {found}")
    return wrong


async def _rules(prometheus: Prometheus) -> list[str]:
    wrong: list[str] = []
    for group in (await prometheus.get("rules"))["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                wrong.append(f"{rule['name']} is {rule['health']}: {rule.get('lastError')}")
            if rule["state"] == "firing":
                wrong.append(f"{rule['name']} fires, and nothing is the matter: {rule['alerts']}")
    targets = (await prometheus.get("targets"))["activeTargets"]
    down = [target for target in targets if target["health"] != "up"]
    return [*wrong, *(f"{target['scrapeUrl']} is {target['health']}: {target['lastError']}" for target in down)]


async def _metrics(prometheus: Prometheus) -> list[str]:
    """What the checks of the files believe of metrics, against those that there are."""
    wrong: list[str] = []
    types = await prometheus.get("metadata")
    for name, known in known_metrics(ROOT).items():
        series = await prometheus.get("series", **{"match[]": name})
        labels = {label for one in series for label in one} - {"__name__"}
        if not series:
            wrong.append(f"nobody exports {name}")
        elif name != "up" and labels != known.labels:
            wrong.append(f"{name} has the labels {sorted(labels)}, not {sorted(known.labels)}")
        family = re.sub("_(bucket|sum|count|total)$", "", name)
        kinds = {described["type"] for described in (*types.get(name, ()), *types.get(family, ()))}
        if kinds and bool(kinds & {"counter", "histogram"}) != known.grows:
            wrong.append(f"{name} is a {', '.join(kinds)}")
    return wrong


async def _agreement(session: aiohttp.ClientSession, stack: Stack) -> list[str]:
    """The server and the exporter, asked one right after the other until nothing happens in between."""
    addresses = f"{stack.exporter}{METRICS_PATH}", f"{stack.server}{METRICS_PATH}/"
    apart: set[str] = set()
    for _ in range(AGREEMENT_TRIES):
        exporter, server = [await _exposition(session, address) for address in addresses]
        if exporter == server:
            return []
        apart = {str(sample) for sample in exporter ^ server}
        await asyncio.sleep(0.3)
    return [f"the server and its exporter do not agree on {', '.join(sorted(apart)[:6])}"]


async def _exposition(session: aiohttp.ClientSession, address: str) -> set[tuple[Any, ...]]:
    async with session.get(address, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise MonitoringError(f"{address} was answered {answer.status}: {text[:300]}")
    families = text_string_to_metric_families(text)
    return {(sample.name, *sorted(sample.labels.items()), sample.value) for one in families for sample in one.samples}


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.monitoring.live", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the load goes on (40)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        binaries = find_binaries()
        for name in (CONFIGURATION, SAVED):
            binaries.promtool("check", "config", "--syntax-only", name)
        binaries.promtool("check", "rules", RULES)
        binaries.promtool("test", "rules", ALERT_TESTS)
        with tempfile.TemporaryDirectory(prefix="lightning-monitoring-") as name:
            folder = Path(name)
            with running(binaries, folder) as stack:
                wrong = asyncio.run(examine(stack, options.seconds, binaries, folder, console))
    except MonitoringError as error:
        sys.stderr.write(f"test-monitoring: {error}\n")
        return 2
    for line in wrong:
        console.print(line, style="red", highlight=False, markup=False)
    sys.stdout.write(f"monitoring: {len(wrong) or 'nothing'} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
