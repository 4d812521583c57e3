"""The unmodified upstream package, without its own `__init__`, which would import its whole training stack.

A bare module with the installed folder as its `__path__` takes the place of the package; the parts that
the tests use then import by themselves.
"""

import importlib.util
import sys
import types


def _prepare() -> None:
    if "agentlightning" in sys.modules:
        return
    spec = importlib.util.find_spec("agentlightning")
    assert spec is not None, "agentlightning is not installed: pip install --no-deps -r requirements-upstream.txt"
    assert spec.submodule_search_locations is not None
    bare = types.ModuleType("agentlightning")
    bare.__path__ = list(spec.submodule_search_locations)
    bare.__spec__ = spec
    sys.modules["agentlightning"] = bare


_prepare()

from agentlightning.store.client_server import LightningStoreClient  # noqa: E402
from agentlightning.store.collection.base import DuplicatedPrimaryKeyError  # noqa: E402
from agentlightning.store.collection_based import CollectionBasedLightningStore  # noqa: E402
from agentlightning.types import (  # noqa: E402
    LLM,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    OtelResource,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    TraceStatus,
    Worker,
)
from agentlightning.utils.otlp import LightningStoreOTLPExporter  # noqa: E402

__all__ = [
    "LLM",
    "Attempt",
    "AttemptedRollout",
    "CollectionBasedLightningStore",
    "DuplicatedPrimaryKeyError",
    "EnqueueRolloutRequest",
    "LightningStoreClient",
    "LightningStoreOTLPExporter",
    "OtelResource",
    "PromptTemplate",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "Span",
    "TraceStatus",
    "Worker",
    "make_span",
]


def make_span(rollout: AttemptedRollout, span_id: str, sequence_id: int, **fields: object) -> Span:
    """A span of upstream's own type for the attempt that a rollout came with."""
    values: dict[str, object] = {
        "trace_id": "0" * 31 + "1",
        "parent_id": None,
        "name": f"span {span_id}",
        "status": TraceStatus(status_code="OK"),
        "attributes": {"number": sequence_id},
        "events": [],
        "links": [],
        "start_time": 1.0,
        "end_time": 2.0,
        "context": None,
        "parent": None,
        "resource": OtelResource(attributes={"service.name": "test"}, schema_url=""),
    }
    return Span.model_validate(
        {
            "rollout_id": rollout.rollout_id,
            "attempt_id": rollout.attempt.attempt_id,
            "span_id": span_id,
            "sequence_id": sequence_id,
        }
        | values
        | fields
    )
