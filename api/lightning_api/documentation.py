"""The OpenAPI document, made of the operations and their pydantic types."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NotRequired

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core.core_schema import DataclassField, ModelField, TypedDictField
from typing_extensions import TypedDict

from lightning_api.calls import Call
from lightning_api.edge import UNGUARDED
from lightning_api.operations import JsonBody, Nothing, Operation, QueryString, operation
from lightning_api.payloads import encode_json
from lightning_api.replies import Reply
from lightning_api.settings import Settings
from lightning_sql import __version__

__all__ = ["documentation_of", "openapi_document"]

_REF_TEMPLATE: Final = "#/components/schemas/{model}"
_OPENAPI_JSON: Final = b"application/vnd.oai.openapi+json"


class Failure(TypedDict):
    """Why a call failed."""

    detail: str
    error_type: NotRequired[str]


class SchemaViolation(TypedDict):
    """What is wrong with one part of a request."""

    type: str
    loc: list[str | int]
    msg: str
    input: NotRequired[Any]
    ctx: NotRequired[dict[str, Any]]


class SchemaViolations(TypedDict):
    """Everything that is wrong with a request."""

    detail: list[SchemaViolation]


class Problem(TypedDict):
    """Problem details, as RFC 9457 has them."""

    type: str
    title: str
    status: int
    detail: str
    errors: NotRequired[list[SchemaViolation]]


_FAILURES: Final[dict[int, tuple[str, str, Any]]] = {
    400: ("The body cannot be decoded, or the arguments make no sense", "application/json", Failure),
    401: ("The bearer token is missing or wrong", "application/json", Failure),
    403: ("A page of an origin that is not allowed wants to change something", "application/json", Failure),
    404: ("No such record", "application/json", Failure),
    413: ("The body is too large", "application/json", Failure),
    422: ("The request does not fit its schema", "application/json", SchemaViolations),
    500: ("The server failed", "application/json", Failure),
    503: ("The database is not available; Retry-After says when to try again", "application/json", Failure),
}


_IDEMPOTENCY_KEY: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Names this call: a repeat under the same key within a day does nothing and is answered alike.",
    "schema": {"type": "string", "pattern": "^[!-~]([ -~]{0,510}[!-~])?$"},
}


def openapi_document(operations: Sequence[Operation], settings: Settings) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the operations."""
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for declared in operations:
        paths.setdefault(declared.path, {})[declared.method.lower()] = _described(declared, schemas, settings)
    components: dict[str, Any] = {"schemas": schemas.definitions}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "lightning-sql",
            "version": __version__,
            "description": "A durable store for Agent Lightning: rollouts, attempts, spans, resources, workers.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": paths,
        "components": components,
    }
    if settings.token is not None:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


class _Generator(GenerateJsonSchema):
    """Answers leave no field out, so each is required there, whatever its default."""

    def field_is_required(
        self,
        field: ModelField | DataclassField | TypedDictField,
        total: bool,
    ) -> bool:
        answered = self.mode == "serialization" and field["type"] == "model-field"
        return answered or super().field_is_required(field, total)


class _Schemas:
    """The JSON schemas of everything that operations read and answer, with common definitions."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        wanted: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = []
        for declared in operations:
            if isinstance(declared.source, JsonBody):
                wanted.append((f"{declared.name} reads", "validation", TypeAdapter(declared.source.schema)))
            elif isinstance(declared.source, QueryString):
                wanted.append((f"{declared.name} reads", "validation", TypeAdapter(declared.source.model)))
            if declared.returns is not None:
                wanted.append((f"{declared.name} answers", "serialization", TypeAdapter(declared.returns)))
        for kind in (Failure, SchemaViolations, Problem):
            adapter: TypeAdapter[Any] = TypeAdapter(kind)
            wanted.append((kind.__name__, "serialization", adapter))
        schemas, definitions = TypeAdapter.json_schemas(wanted, ref_template=_REF_TEMPLATE, schema_generator=_Generator)
        self._schemas = {key: schema for (key, _mode), schema in schemas.items()}
        self.definitions: dict[str, Any] = definitions.get("$defs", {})

    def of(self, key: str) -> dict[str, Any]:
        return self._schemas[key]

    def resolved(self, key: str) -> dict[str, Any]:
        schema = self._schemas[key]
        return self.definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _described(declared: Operation, schemas: _Schemas, settings: Settings) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": declared.name,
        "summary": declared.summary,
        "tags": [declared.tag],
        "parameters": [*_path_parameters(declared.path)],
        "responses": _responses(declared, schemas, settings),
    }
    if isinstance(declared.source, JsonBody):
        schema: dict[str, Any] = schemas.of(f"{declared.name} reads")
        optional = declared.source.default is not None
        described["requestBody"] = {
            "required": not optional,
            "content": {
                "application/json": {"schema": {"anyOf": [schema, {"type": "null"}]} if optional else schema},
                **{media_type: {"schema": more} for media_type, more in declared.source.more_types.items()},
            },
        }
    elif isinstance(declared.source, QueryString):
        described["parameters"] += _query_parameters(schemas.resolved(f"{declared.name} reads"))
    elif declared.media_type != "application/json":
        binary = {"type": "string", "format": "binary"}
        described["requestBody"] = {"required": True, "content": {declared.media_type: {"schema": binary}}}
    if declared.keyed:
        described["parameters"].append(_IDEMPOTENCY_KEY)
    if settings.token is not None and declared.path in UNGUARDED:
        described["security"] = []
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in re.findall(r"{(\w+)}", path)]


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(parameter)}
        for name, parameter in schema["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a parameter, which cannot be null in a URL."""
    branches = [branch for branch in schema.get("anyOf", ()) if branch != {"type": "null"}]
    if not branches:
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    if rest.get("default", "") is None:
        del rest["default"]
    return {**rest, **branches[0]} if len(branches) == 1 else {**rest, "anyOf": branches}


def _responses(declared: Operation, schemas: _Schemas, settings: Settings) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if declared.returns is not None:
        success["content"] = {declared.media_type: {"schema": schemas.of(f"{declared.name} answers")}}
    elif declared.media_type != "application/json":
        success["content"] = {declared.media_type: {"schema": {"type": "string", "format": "binary"}}}
    responses: dict[str, Any] = {str(declared.status): success}
    for status in sorted(_possible_failures(declared, settings)):
        description, media_type, failure = _FAILURES[status]
        schema: dict[str, Any] = schemas.of(failure.__name__)
        if declared.problems:
            media_type, schema = "application/problem+json", schemas.of("Problem")
        elif declared.media_type != "application/json" and status not in (401, 403):
            media_type, schema = declared.media_type, {"type": "string", "format": "binary"}
        responses[str(status)] = {"description": description, "content": {media_type: {"schema": schema}}}
    return responses


def _possible_failures(declared: Operation, settings: Settings) -> set[int]:
    statuses = set(declared.errors)
    if isinstance(declared.source, JsonBody):
        statuses |= {413, 422} if declared.problems else {400, 413, 422}
    elif isinstance(declared.source, QueryString):
        statuses |= {422}
    elif declared.media_type != "application/json":
        statuses |= {400, 413}
    if declared.path not in UNGUARDED:
        statuses |= {500} if settings.token is None else {401, 500}
    if declared.method == "POST" and settings.token is None:
        statuses |= {403}
    return statuses


def documentation_of(operations: Sequence[Operation], settings: Settings) -> tuple[Operation, ...]:
    """The operations that serve the document: as JSON, and to a browser as a page."""

    @cache
    def document() -> bytes:
        return encode_json(openapi_document(operations, settings))

    @cache
    def page() -> bytes:
        return _page(operations).encode()

    @operation("GET", "/schema", Nothing(), tag="documentation")
    async def schema(call: Call, _nothing: None) -> Reply:
        """Show the OpenAPI document."""
        if b"text/html" in (call.header(b"accept") or b""):
            return Reply(200, page(), ((b"content-type", b"text/html; charset=utf-8"),))
        return Reply(200, document(), ((b"content-type", _OPENAPI_JSON),))

    @operation("GET", "/schema/openapi.json", Nothing(), tag="documentation")
    async def schema_json(_call: Call, _nothing: None) -> Reply:
        """Get the OpenAPI document."""
        return Reply(200, document(), ((b"content-type", b"application/json"),))

    return schema, schema_json


_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color-scheme:light dark}"
    "td{padding:.15rem .8rem .15rem 0;vertical-align:top}code{font-size:.95em}"
)


def _page(operations: Sequence[Operation]) -> str:
    rows = "\n".join(
        f"<tr><td><code>{declared.method}</code></td><td><code>{html.escape(declared.path)}</code></td>"
        f"<td>{html.escape(declared.summary)}</td></tr>"
        for declared in operations
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>lightning-sql {__version__}</title>'
        f"<style>{_STYLE}</style><h1>lightning-sql {__version__}</h1>"
        '<p>Every route, with its types, is in the <a href="/schema/openapi.json">OpenAPI document</a>.</p>'
        f"<table>{rows}</table></html>"
    )
