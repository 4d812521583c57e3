"""Checks of the dashboards and of how Grafana is given them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tools.deployment.compose import host_file
from tools.deployment.composition import compositions
from tools.deployment.findings import Finding, load_yaml, relative
from tools.deployment.promql import Known, QueryError, known_metrics, labels_of

__all__ = ["DASHBOARDS", "Query", "check_dashboards", "queries_of"]

DASHBOARDS: Final = "docker/grafana/dashboards/*.json"
DATASOURCES: Final = "docker/grafana/provisioning/datasources/*.yaml"
PROVIDERS: Final = "docker/grafana/provisioning/dashboards/*.yaml"

_COLUMNS: Final = 24
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)[^}]*\})")
_BUILT_IN: Final = {"__rate_interval": "1m", "__interval": "15s", "__range": "1h"}
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a dashboard.

    Attributes:
        panel: the title of its panel.
        expression: as it stands in the file.
        legend: how its series are called.
    """

    panel: str
    expression: str
    legend: str

    def with_variables(self, values: Mapping[str, str]) -> str:
        """The expression with values for the dashboard's variables and Grafana's own."""
        return _VARIABLE.sub(lambda match: {**_BUILT_IN, **values}[match[1] or match[2]], self.expression)


def queries_of(dashboard: Any) -> list[Query]:
    """Every expression of a dashboard."""
    return [
        Query(panel["title"], target["expr"], target.get("legendFormat", ""))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def check_dashboards(root: Path) -> Iterator[Finding]:
    """What is wrong with the dashboards of a checkout, and with what leads Grafana to them."""
    known = known_metrics(root)
    files = sorted(root.glob(DASHBOARDS))
    for path in files:
        name = relative(path, root)
        try:
            dashboard = json.loads(path.read_text())
        except ValueError as error:
            yield Finding(name, f"cannot be read: {error}")
            continue
        for message in (*_layout(dashboard), *_variables(dashboard, known), *_expressions(dashboard, known)):
            yield Finding(name, message)
    if not files:
        yield Finding(DASHBOARDS, "there are no dashboards")
    yield from _provisioning(root)


def _layout(dashboard: Any) -> Iterator[str]:
    panels = dashboard["panels"]
    for what in ("id", "title"):
        counted = Counter(panel[what] for panel in panels)
        yield from (f"two panels have the {what} {value}" for value, times in counted.items() if times > 1)
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] < 0 or place["x"] + place["w"] > _COLUMNS:
            yield f"{panel['title']}: it stands beside the page"
        if panel["type"] == "row":
            continue
        if panel.get("datasource") != _DATASOURCE:
            yield f"{panel['title']}: it does not ask the Prometheus that was chosen"
        if not panel.get("targets"):
            yield f"{panel['title']}: it shows nothing"
        references = Counter(target["refId"] for target in panel.get("targets", ()))
        yield from (f"{panel['title']}: two expressions are {name}" for name, times in references.items() if times > 1)
    for one, other in combinations(panels, 2):
        if _overlap(one["gridPos"], other["gridPos"]):
            yield f"{one['title']} and {other['title']} overlap"


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def _variables(dashboard: Any, known: Mapping[str, Known]) -> Iterator[str]:
    declared = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    used = {match[0] or match[1] for match in _VARIABLE.findall(json.dumps(dashboard["panels"]))}
    yield from (f"the variable {name} is not declared" for name in sorted(used - declared.keys() - _BUILT_IN.keys()))
    yield from (f"the variable {name} is not used" for name in sorted(declared.keys() - used))
    for name, variable in declared.items():
        if variable["type"] != "query":
            continue
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        if match is None:
            yield f"the variable {name} is not made of the values of a label"
            continue
        try:
            if match[2] not in labels_of(f"absent({match[1]})", known):
                yield f"the variable {name} asks for the label {match[2]}, which {match[1]} does not have"
        except QueryError as error:
            yield f"the variable {name}: {error}"


def _expressions(dashboard: Any, known: Mapping[str, Known]) -> Iterator[str]:
    values = {variable["name"]: "x" for variable in dashboard["templating"]["list"]}
    for query in queries_of(dashboard):
        try:
            labels = labels_of(query.with_variables(values), known)
        except KeyError:
            continue  # a variable that is not declared, which is said already
        except QueryError as error:
            yield f"{query.panel}: {error}"
            continue
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            if label not in labels:
                yield f"{query.panel}: the legend shows {label}, which the result does not have"


def _provisioning(root: Path) -> Iterator[Finding]:
    findings: list[Finding] = []
    files = [file for file in compositions(root, []) if "grafana" in file.services]
    for path in sorted(root.glob(DATASOURCES)):
        for source in (load_yaml(path, root, findings) or {}).get("datasources", ()):
            address = urlsplit(source["url"])
            for file in files:
                service = file.services.get(address.hostname or "")
                if service is None or address.port not in service.ports:
                    message = f"{source['url']} is no service of {file.path}"
                    findings.append(Finding(relative(path, root), message))
    for path in sorted(root.glob(PROVIDERS)):
        for provider in (load_yaml(path, root, findings) or {}).get("providers", ()):
            folder = provider["options"]["path"]
            for file in files:
                found = host_file(file, file.services["grafana"], folder)
                if found is None or not list(found.glob("*.json")):
                    findings.append(Finding(relative(path, root), f"no dashboard is at {folder} in {file.path}"))
    if not files:
        findings.append(Finding("docker", "no Compose file has a service grafana"))
    yield from findings
