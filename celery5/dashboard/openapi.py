"""Describe the JSON API as an OpenAPI document, from the types of the operations."""

from collections.abc import Mapping
from typing import Any

import msgspec

from celery5.operations.operation import Operation
from celery5.operations.parameters import list_parameters
from celery5.operations.table import OPERATIONS

REFERENCE = "#/components/schemas/{name}"
PROBLEM_SCHEMA = {
    "type": "object",
    "properties": {
        "status": {"type": "integer"},
        "title": {"type": "string"},
        "detail": {"type": "string", "description": "One line: what is wrong, and what to do."},
    },
    "required": ["status", "title", "detail"],
}
PROBLEMS = {
    "400": "A parameter is wrong.",
    "401": "Nobody has signed in.",
    "403": "The user's role does not allow it.",
    "404": "There is no such thing.",
    "409": "It cannot be done as things are.",
    "429": "The user has too many requests at once.",
    "503": "The broker cannot be reached.",
    "504": "It took too long.",
}


def make_openapi(root: str = "", operations: Mapping[str, Operation] = OPERATIONS) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        root: The path where the dashboard is mounted.
        operations: The operations to describe.
    """
    types = [kind for operation in operations.values() for kind in (operation.parameters, operation.result)]
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_describe_other, ref_template=REFERENCE
    )
    pairs = list(zip(schemas[::2], schemas[1::2], strict=True))
    for operation, (parameters, _) in zip(operations.values(), pairs, strict=True):
        _accept_texts(operation, _get_component(components, parameters))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "celery5 dashboard",
            "version": "1",
            "description": "Each operation does what the command of the same noun and verb does.",
        },
        "servers": [{"url": root or "/"}],
        "paths": {
            f"/api/v1/{{app}}/{operation.noun}/{operation.verb}": {
                "post" if operation.is_change else "get": _describe(operation, parameters, result, components)
            }
            for operation, (parameters, result) in zip(operations.values(), pairs, strict=True)
        },
        "components": {
            "schemas": {**components, "Problem": PROBLEM_SCHEMA},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))  # defaults may be tuples
    return plain


def _describe(
    operation: Operation, parameters: Mapping[str, Any], result: Any, components: Mapping[str, Any]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name.replace(":", "_").replace("-", "_"),
        "summary": operation.summary,
        "tags": [operation.noun],
        "description": f"For {operation.role}s.",
        "parameters": [{"name": "app", "in": "path", "required": True, "schema": {"type": "string"}}],
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": result}}},
            **{status: _describe_problem(text) for status, text in PROBLEMS.items()},
        },
    }
    if operation.is_change:
        described["requestBody"] = {"content": {"application/json": {"schema": parameters}}, "required": True}
        return described
    schema = _get_component(components, parameters)
    described["parameters"] += [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": part}
        for name, part in schema["properties"].items()
    ]
    return described


def _get_component(components: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = components[reference["$ref"].rpartition("/")[2]]
    return schema


def _accept_texts(operation: Operation, schema: Mapping[str, Any]) -> None:
    """Have the schema of an operation's parameters say that a duration may be a text, as `Operation.make` takes it."""
    for parameter in list_parameters(operation.parameters):
        if parameter.widget == "duration":
            described = schema["properties"][parameter.name]
            for part in described.get("anyOf", [described]):
                if part["type"] == "number":
                    part["type"] = ["number", "string"]


def _describe_problem(text: str) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(name="Problem")}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}


def _describe_other(kind: type) -> dict[str, Any]:
    """Return the schema of a type that JSON has not: it is sent as its text."""
    return {"type": "string"}
