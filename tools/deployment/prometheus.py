"""Checks of what Prometheus scrapes, and of what it raises alarm for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lightning_api.metrics import METRICS_PATH
from lightning_sql.errors import ConfigurationError
from tools.deployment.command_line import CommandError, parse
from tools.deployment.compose import DOCUMENT
from tools.deployment.composition import Composition, Service, compositions
from tools.deployment.findings import Finding, load_yaml
from tools.deployment.promql import Known, QueryError, known_metrics, labels_of

__all__ = ["ALERT_TESTS", "CONFIGURATION", "RULES", "check_prometheus"]

FOLDER: Final = "docker/prometheus"
CONFIGURATION: Final = f"{FOLDER}/prometheus.yml"
SAVED: Final = f"{FOLDER}/saved.yml"
RULES: Final = f"{FOLDER}/rules.yml"
ALERT_TESTS: Final = "tests/monitoring/alerts.yml"

_SECRETS: Final = "/run/secrets/"


def check_prometheus(root: Path) -> Iterator[Finding]:
    """What is wrong with Prometheus' configuration and the rules."""
    findings: list[Finding] = []
    for name in (CONFIGURATION, SAVED):
        configuration = load_yaml(root / name, root, findings)
        missing = [
            rules for rules in (configuration or {}).get("rule_files", ()) if not (root / FOLDER / rules).is_file()
        ]
        findings += (Finding(name, f"there is no {rules}") for rules in missing)
    configuration = load_yaml(root / CONFIGURATION, root, findings)
    files = [file for file in compositions(root, findings) if "exporter" in file.services]
    if configuration and files:
        findings += (Finding(CONFIGURATION, message) for message in _jobs(configuration, files[0]))
    rules = load_yaml(root / RULES, root, findings)
    if rules:
        findings += (Finding(RULES, message) for message in _rules(rules, root))
    yield from findings


def _jobs(configuration: Any, file: Composition) -> Iterator[str]:
    names = [job["job_name"] for job in configuration["scrape_configs"]]
    yield from (f"there are two jobs {name}" for name in sorted({name for name in names if names.count(name) > 1}))
    asked: set[str] = set()
    for job in configuration["scrape_configs"]:
        for target in (target for group in job["static_configs"] for target in group["targets"]):
            host, _, port = target.partition(":")
            asked.add(host)
            service = file.services.get(host)
            if service is None:
                yield f"{job['job_name']}: {file.path} has no service {host}"
            elif int(port) not in service.ports:
                yield f"{job['job_name']}: {host} does not listen on {port}"
            elif service.ours:
                yield from _our_job(job, service)
        credentials = job.get("authorization", {}).get("credentials_file")
        if credentials and credentials.removeprefix(_SECRETS) not in file.services["prometheus"].secrets:
            yield f"{job['job_name']}: {credentials} is no secret of the service prometheus"
    for name in file.services:
        if name not in asked and ("exporter" in name or name == "server"):
            yield f"nothing asks {name}"


def _our_job(job: Any, service: Service) -> Iterator[str]:
    try:
        command, parameters = parse(service.command)
    except (CommandError, ConfigurationError):
        return  # which the checks of the Compose file say
    wanted = f"{METRICS_PATH}/" if command == "serve" else parameters.get("metrics_path")
    if job.get("metrics_path") != wanted:
        yield f"{job['job_name']}: {service.name} serves its metrics at {wanted}"
    if service.environment.get("LIGHTNING_SQL_TOKEN") and "credentials_file" not in job.get("authorization", {}):
        yield f"{job['job_name']}: {service.name} asks for a token"
    if command == "serve" and service.environment.get("LIGHTNING_SQL_TRACKER") != "prometheus":
        yield f"{job['job_name']}: {service.name} has no metrics"


def _rules(rules: Any, root: Path) -> Iterator[str]:
    known = known_metrics(root)
    document, tests = (_text(root / name) for name in (DOCUMENT, ALERT_TESTS))
    seen: set[str] = set()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        name = rule["alert"]
        if name in seen:
            yield f"there are two alerts {name}"
        seen.add(name)
        if f"`{name}`" not in document:
            yield f"{name} is not explained in {DOCUMENT}"
        if not re.search(rf"alertname: {name}\b", tests, re.MULTILINE):
            yield f"{name} is not tried in {ALERT_TESTS}"
        if rule.get("labels", {}).get("severity") not in ("critical", "warning"):
            yield f"{name} is neither critical nor a warning"
        yield from (f"{name}: {problem}" for problem in _rule(rule, known))


def _rule(rule: Any, known: dict[str, Known]) -> Iterator[str]:
    try:
        labels = labels_of(rule["expr"], known)
    except QueryError as error:
        yield str(error)
        return
    summary = rule.get("annotations", {}).get("summary", "")
    if not summary:
        yield "it does not say what is the matter"
    for label in re.findall(r"\$labels\.(\w+)", summary):
        if label not in labels:
            yield f"the summary shows {label}, which the result does not have"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
