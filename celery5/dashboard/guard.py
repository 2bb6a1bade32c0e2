"""Let only requests through that a user makes on purpose: authenticated, from this site, and for this host.

Source: the OWASP cheat sheets on cross-site request forgery and on content security; Sidekiq checks `Sec-Fetch-Site`.
"""

import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery5.dashboard.access import Authenticator, Sessions, User, read_bearer

OPEN_PATHS = ("/sign-in", "/static/")
"""What is shown to everybody: nothing of the application is in it."""
SAFE_METHODS = ("GET", "HEAD")
FORM_KEY = "form_key"
"""The field of a form, and `X-Form-Key` the header of a script, that no other site can know."""


class Guard:
    """Passes on the requests that are let through; `scope["state"]` then has the user and the session.

    Args:
        inner: The application.
        authenticator: Says who makes a request.
        sessions: The sessions of those who have signed in.
        hosts: The names under which the dashboard is reached, with their ports; empty for any. Without them a page of
            another site could reach a loopback address by a name of its own (DNS rebinding).
    """

    def __init__(
        self, inner: ASGIApp, *, authenticator: Authenticator, sessions: Sessions, hosts: Collection[str] = ()
    ) -> None:
        self._inner = inner
        self._authenticator = authenticator
        self._sessions = sessions
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        state = scope.setdefault("state", {})
        state["nonce"], state["user"], state["form_key"] = nonce, None, ""
        request = Request(scope)
        response = self._refuse(request, state)
        await (response or self._inner)(scope, receive, _protecting(send, nonce, request))

    def _refuse(self, request: Request, state: dict[str, Any]) -> Response | None:
        """Return the answer to a request that is not let through; None for one that is."""
        if self._hosts and request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("this dashboard is not reached under that name\n", 421)
        if not _is_from_this_site(request):
            return PlainTextResponse("another site has made this request: it is refused\n", 403)
        if request.method not in (*SAFE_METHODS, "POST"):
            return PlainTextResponse("only GET, HEAD and POST\n", 405, {"allow": "GET, HEAD, POST"})
        user, cookie = self._identify(request)
        if user is None:
            return self._ask_to_sign_in(request)
        state["user"] = user
        # No browser sends a bearer token by itself, so such a request needs no key. A password (`Basic`) it does send.
        has_token = bool(read_bearer(request))
        state["form_key"] = "" if has_token else self._sessions.make_form_key(user, cookie)
        state["needs_form_key"] = request.method == "POST" and not has_token
        return None

    def _identify(self, request: Request) -> tuple[User | None, str]:
        """Return who makes a request, and the cookie of the session, '' for none."""
        user = self._authenticator.identify(request)
        if user is not None or read_bearer(request):
            return user, ""
        cookie = request.cookies.get(self._sessions.cookie, "")
        user = self._sessions.read(cookie) if cookie else None
        return (user, cookie) if user is not None and self._authenticator.confirm(user) else (None, "")

    def _ask_to_sign_in(self, request: Request) -> Response | None:
        path = _get_path(request)
        if path.startswith(OPEN_PATHS):
            return None
        if path.startswith("/api/"):
            detail = (
                "this token is not valid"
                if read_bearer(request)
                else "sign in, or send a token: Authorization: Bearer TOKEN"
            )
            body = {"status": 401, "title": "Unauthorized", "detail": detail}
            headers = {"www-authenticate": "Bearer"}
            return JSONResponse(body, 401, headers, media_type="application/problem+json")
        if request.method == "POST":
            return PlainTextResponse("sign in first\n", 401)
        return RedirectResponse(f"{request.scope.get('root_path', '')}/sign-in", 303)


def _get_path(request: HTTPConnection) -> str:
    """Return the path of a request below the place where the dashboard is mounted."""
    root = request.scope.get("root_path", "")
    path: str = request.scope["path"]
    return path.removeprefix(root) if root and path.startswith(root) else path


def _is_from_this_site(request: Request) -> bool:
    """Return whether no other site has made the request: browsers say so, and other clients send neither header.

    Another site may link to a page, but not embed it, read it, or send a form.
    """
    fetched_by = request.headers.get("sec-fetch-site", "none")
    is_link = request.headers.get("sec-fetch-mode") == "navigate" and request.method in SAFE_METHODS
    if fetched_by not in ("same-origin", "none") and not is_link:
        return False
    origin = request.headers.get("origin")
    if request.method in SAFE_METHODS or origin is None:
        return True
    return urlsplit(origin).netloc == request.headers.get("host", "")


def _protecting(send: Send, nonce: str, request: Request) -> Send:
    """Return a `send` that adds the headers by which a browser protects the page."""
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        )
    )

    async def protect(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = policy
            headers["x-content-type-options"] = "nosniff"
            headers["referrer-policy"] = "same-origin"
            headers["cross-origin-opener-policy"] = "same-origin"
            headers["cross-origin-resource-policy"] = "same-origin"
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return protect
