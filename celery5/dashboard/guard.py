"""Let only requests through that a user makes on purpose: authenticated, from this site, and for this host.

Source: the OWASP cheat sheets on cross-site request forgery and on content security; Sidekiq checks `Sec-Fetch-Site`.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery5.dashboard.access import Authenticator, ProxyHeaders, User, read_bearer
from celery5.dashboard.hosts import AllowedHosts
from celery5.dashboard.sessions import Sessions
from celery5.errors import BrokerError

SIGN_IN_PATH = "/sign-in"
"""The page that is shown to everybody: nothing of the application is in it."""
SAFE_METHODS = ("GET", "HEAD")
FORM_KEY = "form_key"
"""The field of a form, and `X-Form-Key` the header of a script, that no other site can know."""


HSTS = "max-age=31536000"
"""What tells a browser to reach this site by TLS only, for a year."""


MAX_AT_ONCE = 8
"""Requests of one user that are answered at once. A browser sends six."""
MAX_WAITING = 24
"""Further requests of one user, which wait until one of those has been answered."""
WAIT_LIMIT = 5.0
"""Seconds that they wait at most."""


class UserShares:
    """Bounds how many requests of one user are answered at once, so that no user keeps the others out.

    Behind a proxy all come from one address, so a server cannot tell whose connections are whose.
    """

    def __init__(self) -> None:
        self._limiters: dict[str, anyio.CapacityLimiter] = {}

    @property
    def users(self) -> int:
        """How many users have requests that are answered, or wait."""
        return len(self._limiters)

    @asynccontextmanager
    async def take(self, user: str) -> AsyncGenerator[bool, None]:
        """Wait for the turn of a request of this user, which lasts while the block does. Yield False for none."""
        limiter = self._limiters.setdefault(user, anyio.CapacityLimiter(MAX_AT_ONCE))
        has_turn = False
        try:
            if limiter.statistics().tasks_waiting < MAX_WAITING:
                with anyio.move_on_after(WAIT_LIMIT):
                    await limiter.acquire()
                    has_turn = True
            yield has_turn
        finally:
            if has_turn:
                limiter.release()
            found = limiter.statistics()
            is_unused = not (found.borrowed_tokens or found.tasks_waiting)
            if is_unused and self._limiters.get(user) is limiter:  # another one may have begun meanwhile
                del self._limiters[user]


class Guard:
    """Passes on the requests that are let through; `scope["state"]` then has the user and the session.

    Args:
        inner: The application.
        authenticator: Says who makes a request.
        sessions: The sessions of those who have signed in.
        hosts: The names under which the dashboard is reached.
        open_paths: What is shown to everybody, besides the page for signing in.
        on_refusal: Called with the address of a client and the reason when its token, or its proxy, is refused.
    """

    def __init__(
        self,
        inner: ASGIApp,
        *,
        authenticator: Authenticator,
        sessions: Sessions,
        hosts: AllowedHosts,
        open_paths: Collection[str] = (),
        on_refusal: Callable[[str, str], object] = lambda client, why: None,
    ) -> None:
        self._on_refusal = on_refusal
        self._inner = inner
        self._authenticator = authenticator
        self._sessions = sessions
        self._hosts = hosts
        self._open_paths = frozenset((SIGN_IN_PATH, *open_paths))
        self._shares = UserShares()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        state = scope.setdefault("state", {})
        state["nonce"], state["user"], state["form_key"], state["session_cookie"] = nonce, None, "", ""
        state["is_secure"] = self._hosts.is_secure or scope.get("scheme") == "https"
        state["needs_form_key"] = True
        request = Request(scope)
        response = await self._refuse(request, state)
        protecting = _protecting(send, nonce, HSTS if self._hosts.is_secure else "")
        if response is not None or state["user"] is None:
            await (response or self._inner)(scope, receive, protecting)
            return
        async with self._shares.take(state["user"].name) as has_turn:
            await (self._inner if has_turn else _refuse_many(request))(scope, receive, protecting)

    async def _refuse(self, request: Request, state: dict[str, Any]) -> Response | None:
        """Return the answer to a request that is not let through; None for one that is."""
        if not self._hosts.allows(request.headers.getlist("host")):
            return PlainTextResponse(UNKNOWN_HOST, 421)
        if (refusal := self._refuse_other_site(request)) is not None:
            return refusal
        if request.method not in (*SAFE_METHODS, "POST"):
            return PlainTextResponse("only GET, HEAD and POST\n", 405, {"allow": "GET, HEAD, POST"})
        try:
            user, cookie, is_by_bearer = await self._identify(request)
        except BrokerError:
            return PlainTextResponse(UNCHECKED, 503)
        if user is None:
            if why := self._find_refusal(request):
                self._on_refusal(get_client(request), why)
            return self._ask_to_sign_in(request)
        state["user"], state["session_cookie"] = user, cookie
        # No browser sends a bearer token by itself, so such a request needs no key: but only where it is by the token
        # that the user is known. A cookie, a password (`Basic`) and whatever a proxy looks at it does send.
        state["form_key"] = "" if is_by_bearer else self._sessions.make_form_key(user, cookie)
        state["needs_form_key"] = request.method == "POST" and not is_by_bearer
        return None

    def _refuse_other_site(self, request: Request) -> Response | None:
        """Return the answer to a request that another site has made; None for others.

        Browsers say so, and other clients send neither header. Another site may link to a page, but not embed it, read
        it, or send a form.
        """
        fetched_by = request.headers.get("sec-fetch-site", "none")
        is_safe = request.method in SAFE_METHODS
        is_link = request.headers.get("sec-fetch-mode") == "navigate" and is_safe
        if fetched_by not in ("same-origin", "none") and not is_link:
            return PlainTextResponse(OTHER_SITE, 403)
        origins = request.headers.getlist("origin")
        if is_safe or not origins:
            return None
        is_own = self._hosts.is_own_origin(origins[0], request.headers["host"]) if len(origins) == 1 else None
        if is_own is None:
            return PlainTextResponse("the Origin of this request cannot be read\n", 400)
        return None if is_own else PlainTextResponse(OTHER_SITE, 403)

    async def _identify(self, request: Request) -> tuple[User | None, str, bool]:
        """Return who makes a request, the cookie of the session ('' for none), and whether a bearer token says so."""
        bearer = read_bearer(request)
        user = self._authenticator.identify(request)
        if user is not None or bearer:
            return user, "", bool(bearer) and self._authenticator.is_by_bearer(request)
        cookie = request.cookies.get(self._sessions.cookie, "")
        session = self._sessions.read(cookie) if cookie else None
        if session is None or not self._authenticator.confirm(session.user, session.grant):
            return None, "", False
        if await self._sessions.is_signed_out(session):
            return None, "", False
        return session.user, cookie, False

    def _find_refusal(self, request: Request) -> str:
        """Return why what a request carries is refused; '' when it carries nothing that names a user."""
        if read_bearer(request):
            return "this token is not valid"
        if isinstance(self._authenticator, ProxyHeaders) and self._authenticator.names_user(request):
            return "the header with a user is not from the proxy, or without its secret, or not valid"
        return ""

    def _ask_to_sign_in(self, request: Request) -> Response | None:
        path = get_path(request)
        if path in self._open_paths:
            return None
        if path.startswith("/api/"):
            detail = (
                "this token is not valid"
                if read_bearer(request)
                else "sign in, or send a token in the header Authorization, after the word Bearer"
            )
            body = {"status": 401, "title": "Unauthorized", "detail": detail}
            headers = {"www-authenticate": "Bearer"}
            return JSONResponse(body, 401, headers, media_type="application/problem+json")
        if request.method == "POST":
            return PlainTextResponse("sign in first\n", 401)
        return RedirectResponse(f"{get_root(request)}{SIGN_IN_PATH}", 303)


UNKNOWN_HOST = (
    "this dashboard is not reached under that name: start it with --public-host NAME, or mount it as "
    "Dashboard(..., hosts=[NAME])\n"
)
UNCHECKED = "the broker cannot be reached, so nobody knows whether this session was signed out: try again\n"
TOO_MANY = f"this user has {MAX_AT_ONCE} requests at once already: try again when one has been answered"
OTHER_SITE = "another site has made this request: it is refused\n"


def _refuse_many(request: Request) -> Response:
    """Return the answer to a user who has too many requests."""
    headers = {"retry-after": "1"}
    if not get_path(request).startswith("/api/"):
        return PlainTextResponse(f"{TOO_MANY}\n", 429, headers)
    body = {"status": 429, "title": "Too Many Requests", "detail": TOO_MANY}
    return JSONResponse(body, 429, headers, media_type="application/problem+json")


def get_root(request: HTTPConnection) -> str:
    """Return the path where the dashboard is mounted; '' at the top.

    A server may say `/` for the top, and an address that begins with two slashes would be that of another host.
    """
    root = str(request.scope.get("root_path", "")).strip("/")
    return f"/{root}" if root else ""


def get_client(request: HTTPConnection) -> str:
    """Return the address of the client; `socket` for one on a unix socket."""
    return request.client.host if request.client and request.client.host else "socket"


def get_path(request: HTTPConnection) -> str:
    """Return the path of a request below the place where the dashboard is mounted, as starlette finds its routes."""
    root: str = request.scope.get("root_path", "")
    path: str = request.scope["path"]
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else path


def _protecting(send: Send, nonce: str, hsts: str) -> Send:
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
            if hsts:
                headers["strict-transport-security"] = hsts
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return protect
