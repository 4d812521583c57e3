"""What the checks of files find: a file, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["Finding", "image_problem", "load_yaml", "relative"]

_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fast one, where PyYAML was built with it."""

_HOST: Final = re.compile(r"^[^/]*[.:][^/]*/|^localhost/")


@dataclass(frozen=True, order=True)
class Finding:
    """Something that is wrong with a file."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def relative(path: Path, root: Path) -> str:
    """A path as it is shown."""
    return path.relative_to(root).as_posix()


def load_yaml(path: Path, root: Path, findings: list[Finding]) -> Any:
    """What is in a YAML file; None, and a finding, where that cannot be read."""
    try:
        return yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - one of the safe ones
    except (OSError, yaml.YAMLError) as error:
        findings.append(Finding(relative(path, root), f"cannot be read: {' '.join(str(error).split())}"))
        return None


def image_problem(image: str) -> str | None:
    """What is wrong with the name of an image, if anything: it needs a version, and no registry of anybody's."""
    name, _, tag = image.rpartition(":")
    if _HOST.match(image):
        return f"the image {image} names a registry"
    if not name or "/" in tag or tag == "latest":
        return f"the image {image} has no version"
    return None
