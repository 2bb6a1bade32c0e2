"""Read the bodies and parameters of requests, within bounds."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request

from celery5.dashboard.guard import FORM_KEY
from celery5.dashboard.performing import Forbidden
from celery5.dashboard.sessions import Sessions
from celery5.errors import Misconfigured
from celery5.operations.operation import Operation

MAX_BODY = 1024 * 1024
"""Bytes of a request."""
MAX_FIELDS = 1000
"""Fields of a form or of a query."""


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises Misconfigured when it is too large."""
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > MAX_BODY:
                raise Misconfigured(f"this request has more than {MAX_BODY} bytes")
    return bytes(body)


async def read_form(request: Request, sessions: Sessions) -> dict[str, list[str]]:
    """Return the fields of a form, without its key.

    Raises:
        Forbidden: It has not the key that the dashboard has given this session.
        Misconfigured: It is too large.
    """
    fields = _to_lists(await read_body(request))
    keys = fields.pop(FORM_KEY, [""])
    check_form_key(request, sessions, keys[-1])
    return fields


def check_form_key(request: Request, sessions: Sessions, key: str) -> None:
    """Raise Forbidden unless a request that changes something has the key of its session."""
    state = request.state
    if not state.needs_form_key:
        return
    # Whoever the authenticator knows by other means than a session has keys without a cookie in them.
    if not sessions.is_form_key(key, state.user, state.session_cookie):
        raise Forbidden("this form is out of date, or not from here: load the page again")


def read_query(request: Request) -> dict[str, list[str]]:
    """Return the parameters in the address of a request. Raises Misconfigured for too many."""
    query: bytes = request.scope["query_string"]
    return _to_lists(query)


def _to_lists(text: bytes) -> dict[str, list[str]]:
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"
        )
    except ValueError as error:
        raise Misconfigured(f"this request cannot be read: {error}") from None
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


def to_parameters(operation: Operation, fields: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the fields of a form or query as parameters: lists where the operation takes lists, else the last value.

    What the operation takes as an object, any value or a list of any values is JSON.
    """
    hints = {field.name: str(field.type) for field in msgspec.structs.fields(operation.parameters)}
    values: dict[str, Any] = {}
    for name, texts in fields.items():
        kind = hints.get(name, "")
        if texts[-1] and ("dict[" in kind or "Any" in kind):
            try:
                values[name] = msgspec.json.decode(texts[-1])
            except (ValueError, RecursionError) as error:
                raise Misconfigured(f"{operation.name}: {name} is no JSON: {error}") from None
        elif "list[" in kind or "tuple[" in kind:
            # A text field has a line for each value.
            values[name] = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        else:
            values[name] = texts[-1]
    return values
