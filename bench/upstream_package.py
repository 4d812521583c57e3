"""The unmodified upstream package, without its own `__init__`, which would import its whole training stack."""

from __future__ import annotations

import importlib.util
import sys
import types


def prepare_upstream_package() -> types.ModuleType:
    """Put a bare module with the installed folder as its path where the package would be; its parts then import.

    Raises:
        RuntimeError: the package is not installed.
    """
    spec = importlib.util.find_spec("agentlightning")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("agentlightning is not installed here")
    bare = types.ModuleType("agentlightning")
    bare.__path__ = list(spec.submodule_search_locations)
    bare.__spec__ = spec
    sys.modules["agentlightning"] = bare
    return bare
