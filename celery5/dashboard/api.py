"""Serve the JSON API: each operation at `/api/v1/APPLICATION/NOUN/VERB`, GET to see and POST to change."""

from functools import lru_cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from celery5.dashboard.formats import encode_json
from celery5.dashboard.guard import get_root
from celery5.dashboard.openapi import make_openapi
from celery5.dashboard.performing import Performer, describe_problem
from celery5.dashboard.requests import check_form_key, read_body, read_query, to_parameters
from celery5.dashboard.sessions import Sessions
from celery5.errors import Misconfigured
from celery5.operations.operation import Changed
from celery5.protocol.masking import escape_json, get_error_text

JSON = "application/json"
PROBLEM = "application/problem+json"
"""The type of an answer that says what went wrong. Source: RFC 9457."""


class JsonApi:
    """The routes of the JSON API.

    Args:
        performer: Performs the operations.
        sessions: The sessions of those who have signed in.
    """

    def __init__(self, performer: Performer, sessions: Sessions) -> None:
        self._performer = performer
        self._sessions = sessions

    def make_routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/v1/openapi.json", self._show_openapi),
            Route("/api/v1", self._list_apps),
            Route("/api/v1/{app}/{noun}/{verb}", self._answer, methods=["GET", "POST"]),
        ]

    async def _show_openapi(self, request: Request) -> Response:
        return Response(_encode_openapi(get_root(request)), media_type=JSON)

    async def _list_apps(self, request: Request) -> Response:
        return _respond({"applications": sorted(self._performer.apps), "user": request.state.user._asdict()})

    async def _answer(self, request: Request) -> Response:
        try:
            result = await self._perform(request)
        except Exception as error:
            problem = describe_problem(error, request)
            body = {"status": problem.status, "title": type(error).__name__, "detail": problem.detail}
            return _respond(body, problem.status, PROBLEM)
        if isinstance(result, Changed) and result.has_failed:
            body = {"status": 409, "title": "NothingDone", "detail": f"{result.summary}; {result.failure}"}
            return _respond(body, 409, PROBLEM)
        return _respond(result)

    async def _perform(self, request: Request) -> Any:
        path = request.path_params
        operation = self._performer.get_operation(path["noun"], path["verb"])
        is_post = request.method == "POST"
        if operation.is_change and not is_post:
            raise Misconfigured(f"{operation.name} changes something: use POST")
        if not is_post:
            parameters = to_parameters(operation, read_query(request))
        else:
            check_form_key(request, self._sessions, request.headers.get("x-form-key", ""))
            parameters = await _read_object(request)
        user = request.state.user
        try:
            return await self._performer.perform(
                path["app"], operation, parameters, user, is_text=not is_post
            )
        finally:
            if operation.is_change:
                self._performer.forget_reads(path["app"])


async def _read_object(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
        raise Misconfigured(f"send the parameters as a JSON object, with content-type: {JSON}")
    try:
        return msgspec.json.decode(await read_body(request) or b"{}", type=dict[str, Any])
    except (
        ValueError,
        RecursionError,
    ) as error:  # as deep as the interpreter's stack, or of digits without end
        raise Misconfigured(f"the parameters are no JSON object: {get_error_text(error, 200)}") from None


@lru_cache(maxsize=4)
def _encode_openapi(root: str) -> bytes:
    """Return the description of the API: it takes 80 ms to make, in which the server answers nobody."""
    return _encode(make_openapi(root))


def _respond(value: Any, status: int = 200, media_type: str = JSON) -> Response:
    return Response(_encode(value), status, media_type=media_type)


def _encode(value: Any) -> bytes:
    return escape_json(encode_json(value).decode()).encode()
