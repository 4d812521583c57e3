"""Whatever fits the OpenAPI document, or nearly fits it, is answered as the document says, and never with a 500."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lightning_api.client import LightningClient
from lightning_api.documentation import openapi_document
from lightning_api.otlp import CONTENT_TYPE
from lightning_api.routes import OPERATIONS
from lightning_api.routes.bulk import NDJSON
from lightning_api.settings import Settings
from lightning_sql.store.interface import LightningStore
from tests.backends import POSTGRES, SQLITE, NewStore, ServerThread
from tests.properties.effort import effort

KINDS = pytest.mark.parametrize("kind", [SQLITE, POSTGRES])
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@schemathesis.serializer(CONTENT_TYPE, NDJSON)
def as_bytes(_context: Any, value: Any) -> bytes:
    """What stands for an export, or for lines: the document only says that they are binary, or text."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


SCHEMA = schemathesis.openapi.from_dict(openapi_document(OPERATIONS, Settings()))
IN_THE_LONG_PROFILE = 150
"""For each operation, so that each database answers more than 5,000 requests."""
DECLARED = {declared.name: declared for declared in OPERATIONS}
NAMES = sorted(DECLARED)


@contextmanager
def served(store: LightningStore, server: ServerThread) -> Iterator[str]:
    server.service.current_store = store
    try:
        yield server.address
    finally:
        asyncio.run(server.close(store))


class Known:
    """The ids of a few records that there are, to be asked for by name."""

    def __init__(self, ids: dict[str, str]) -> None:
        self.ids = ids

    @classmethod
    async def of(cls, address: str) -> "Known":
        async with LightningClient(address) as client:
            started = await client.start_rollout(1, worker_id="w")
            resources = await client.add_resources({})
        ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id, "worker_id": "w"}
        return cls(ids | {"resources_id": resources.resources_id})

    def put_into(self, case: Any) -> None:
        """Let a case ask for these, where it asks for anything of that kind."""
        for part in (case.path_parameters, case.query, case.body):
            if isinstance(part, dict):
                part.update({name: value for name, value in self.ids.items() if name in part})


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_requests_are_answered_as_documented(name: str, kind: str, new_store: NewStore, server: ServerThread) -> None:
    declared = DECLARED[name]
    operation = SCHEMA[declared.path][declared.method]
    sound = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    unsound = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    with served(new_store(kind, scan_debounce_seconds=10.0, real_time=True), server) as address:
        known = asyncio.run(Known.of(address))

        @effort(10, at_most=IN_THE_LONG_PROFILE)
        @given(case=sound | unsound, of_known=st.booleans())
        def check(case: Any, of_known: bool) -> None:
            if of_known:
                known.put_into(case)
            if name == "wait_for_rollouts" and isinstance(case.body, dict):
                case.body["timeout"] = 0.001
            checks = CHECKS if declared.status == 501 else [not_a_server_error, *CHECKS]
            case.validate_response(case.call(base_url=address), checks=checks)

        check()
