"""Files against the specifications that others have written for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.deployment.findings import Finding, relative

__all__ = ["COMPOSE_FILES", "WORKFLOWS", "check_schemas"]

COMPOSE_FILES: Final = "docker/compose*.yaml"
WORKFLOWS: Final = ".github/workflows/*.yml"
_SCHEMAS: Final = {COMPOSE_FILES: "vendor.compose-spec", WORKFLOWS: "vendor.github-workflows"}


def check_schemas(root: Path) -> Iterator[Finding]:
    """Where Compose files and workflows do not follow their specifications, and YAML and JSON cannot be read at all."""
    for pattern, schema in _SCHEMAS.items():
        files = [str(path) for path in sorted(root.glob(pattern))]
        if not files:
            yield Finding(pattern, "there are no such files")
            continue
        # The schema lies in the package: nothing is downloaded.
        command = [sys.executable, "-m", "check_jsonschema", "-o", "json", "--builtin-schema", schema, *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            yield Finding(pattern, f"check-jsonschema failed: {done.stderr.strip() or done.stdout.strip()}")
            continue
        for error in (*answer.get("errors", ()), *answer.get("parse_errors", ())):
            where = f"{error['path']}: " if "path" in error else ""
            yield Finding(relative(Path(error["filename"]), root), f"{where}{error['message']}")
