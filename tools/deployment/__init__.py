"""Checks of what is deployed, which need no Docker engine: `python -m tools.deployment`, a part of `make lint`.

1. Compose files and workflows follow their specifications (the schemas come with `check-jsonschema`).
2. What the Dockerfile copies is there and not ignored, the image does not run as root, its commands parse.
3. Compose files: every file, volume, secret, service and variable that is named exists; ports agree with what listens
   there, and with the health checks; every `lightning-sql …` is one that the command takes, with settings that it
   takes; no secret is written down.
4. Prometheus and Grafana: what is scraped is a service that listens there; every expression parses, asks for metrics
   that there are by labels that they have, and every label that is shown is one of the result's.
5. Workflows do nothing that the Makefile does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.deployment.compose import check_compose
from tools.deployment.dashboard import check_dashboards
from tools.deployment.dockerfile import check_dockerfile
from tools.deployment.findings import Finding
from tools.deployment.prometheus import check_prometheus
from tools.deployment.schemas import check_schemas
from tools.deployment.workflows import check_workflows

__all__ = ["Finding", "check"]


def check(root: Path) -> list[Finding]:
    """Everything that is wrong with what a checkout deploys."""
    findings = list(check_schemas(root))
    # What does not follow its specification cannot be read by the others.
    return sorted(set(findings or _others(root)))


def _others(root: Path) -> Iterator[Finding]:
    yield from check_dockerfile(root)
    yield from check_compose(root)
    yield from check_prometheus(root)
    yield from check_dashboards(root)
    yield from check_workflows(root)
