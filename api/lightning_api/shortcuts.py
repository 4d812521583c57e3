"""The busiest routes, found without asking Litestar's router, which costs as much as the rest of a request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, cast

from litestar.types import ASGIApp, HTTPScope

from lightning_api.operations import Operation

__all__ = ["Shortcuts"]

_PLAIN_HOST: Final = re.compile(rb"[\w.:\[\]-]*")
"""What Litestar takes for a valid `Host`, and a little less."""


class _Template:
    """A path with parameters."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        segments = path.split("/")
        literals = [index for index, segment in enumerate(segments) if not segment.startswith("{")]
        self._literals = itemgetter(*literals)
        self._expected = self._literals(segments)
        self._parameters = [
            (index, segment.strip("{}")) for index, segment in enumerate(segments) if index not in literals
        ]
        self.app = app

    def match(self, segments: list[str], reserved: frozenset[str]) -> dict[str, str] | None:
        """The parameters, or None where the path is another one, or might be."""
        if self._literals(segments) != self._expected:
            return None
        found = {name: segments[index] for index, name in self._parameters}
        return None if not reserved.isdisjoint(found.values()) else found


class Shortcuts:
    """From a request straight to the endpoint that the router would find; None sends it to the router.

    Args:
        operations: all of them.
        apps: the endpoints of those that are to be found here.
    """

    def __init__(self, operations: Iterable[Operation], apps: Mapping[str, ASGIApp]) -> None:
        self._plain: dict[tuple[str, str], ASGIApp] = {}
        self._templates: dict[tuple[str, int], list[_Template]] = {}
        literals: set[str] = set()
        for declared in operations:
            segments = declared.path.split("/")
            literals.update(segment for segment in segments if not segment.startswith("{"))
            app = apps.get(declared.name)
            if app is None:
                continue
            if "{" in declared.path:
                self._templates.setdefault((declared.method, len(segments)), []).append(_Template(declared.path, app))
            else:
                self._plain[declared.method, declared.path] = app
        # Where an id is a word that some path has as a literal, another route may be meant.
        self._reserved = frozenset(literals)

    def find(self, scope: HTTPScope) -> ASGIApp | None:
        """The endpoint of a request, with its parameters put into the scope."""
        if cast(Mapping[str, Any], scope).get("root_path") or not _has_plain_host(scope):
            return None
        method, path = scope["method"], scope["path"]
        app = self._plain.get((method, path))
        if app is not None:
            scope["path_params"] = {}
            return app
        segments = path.split("/")
        for template in self._templates.get((method, len(segments)), ()):
            parameters = template.match(segments, self._reserved)
            if parameters is not None:
                scope["path_params"] = parameters
                return template.app
        return None


def _has_plain_host(scope: Any) -> bool:
    for name, value in scope["headers"]:
        if name == b"host":
            return _PLAIN_HOST.fullmatch(value) is not None
    return True
