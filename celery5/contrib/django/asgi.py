"""Mount the dashboard in the ASGI application of a Django project, with Django's own users and permissions."""

import hashlib
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http import HTTPStatus
from importlib import import_module
from io import BytesIO
from typing import Any
from urllib.parse import quote

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.db import close_old_connections
from django.shortcuts import resolve_url
from django.urls import NoReverseMatch, reverse

from celery5.contrib.django.application import get_app
from celery5.dashboard import Dashboard, Identify, User
from celery5.operations.operation import Role

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApplication = Callable[[Scope, Receive, Send], Awaitable[None]]

PERMISSIONS: tuple[tuple[str, Role], ...] = (
    ("celery5.administer_dashboard", "admin"),
    ("celery5.operate_dashboard", "operator"),
    ("celery5.view_dashboard", "viewer"),
)
"""The permissions of Django for the roles of the dashboard, the largest first."""
_USER = "celery5.django_user"
"""The key in a scope of ASGI that has the user of the dashboard."""


class DashboardMount:
    """An ASGI application: the dashboard of the project's application below a path, and the project elsewhere.

    Who may use it is a member of the staff with a permission, whose role follows from that: see PERMISSIONS. Others
    are sent to the page where they sign in, or refused.

    Args:
        project: The ASGI application of the project: `get_asgi_application()`.
        path: Where the dashboard is.
        hosts: The names under which browsers reach it; by default those in ALLOWED_HOSTS, without its patterns.
    """

    def __init__(self, project: ASGIApplication, path: str = "/jobs", *, hosts: Collection[str] = ()) -> None:
        self._project = project
        self._root = f"/{path.strip('/')}"
        names = hosts or [name for name in settings.ALLOWED_HOSTS if not name.startswith((".", "*"))]
        secret = hashlib.sha256(f"celery5.dashboard {settings.SECRET_KEY}".encode()).hexdigest()
        access = Identify(lambda request: request.scope.get(_USER))
        self._dashboard = Dashboard(get_app(), authenticator=access, hosts=names, secret=secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        outer = str(scope.get("root_path", ""))
        path = str(scope.get("path", "")).removeprefix(outer)
        if scope["type"] != "http" or not f"{path}/".startswith(f"{self._root}/"):
            await self._project(scope, receive, send)
            return
        find: Callable[[Scope], Awaitable[User | str | None]] = sync_to_async(_find_user)
        try:
            user = await find(scope)
        except DisallowedHost:
            await _answer(send, HTTPStatus.BAD_REQUEST, "this host is not in ALLOWED_HOSTS\n")
            return
        if isinstance(user, User):
            inner = {**scope, "root_path": f"{outer}{self._root}", _USER: user}
            await self._dashboard(inner, receive, send)
        elif (
            user is None and scope["method"] in ("GET", "HEAD") and not path.startswith(f"{self._root}/api/")
        ):
            place = f"{_find_sign_in_page()}?next={quote(f'{outer}{path}')}"
            await _answer(send, HTTPStatus.FOUND, "", location=place)
        elif user is None:
            await _answer(send, HTTPStatus.UNAUTHORIZED, "sign in to the site first\n")
        else:
            await _answer(
                send,
                HTTPStatus.FORBIDDEN,
                f"{user} is not staff with the permission celery5.view_dashboard\n",
            )


def with_dashboard(
    project: ASGIApplication, path: str = "/jobs", *, hosts: Collection[str] = ()
) -> DashboardMount:
    """Return the project's ASGI application with the dashboard below a path: see `DashboardMount`."""
    return DashboardMount(project, path, hosts=hosts)


def get_role(user: Any) -> Role | None:
    """Return the role of a user of Django in the dashboard; None for one that may not use it."""
    if not (user.is_active and user.is_staff):
        return None
    return next((role for permission, role in PERMISSIONS if user.has_perm(permission)), None)


def _find_user(scope: Scope) -> User | str | None:
    """Return who makes a request: a user of the dashboard, the name of one without permission, or None for nobody.

    Raises DisallowedHost.
    """
    close_old_connections()
    try:
        request = ASGIRequest(scope, BytesIO())
        request.get_host()
        store = import_module(settings.SESSION_ENGINE).SessionStore
        request.session = store(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
        user = get_user(request)
        if not user.is_authenticated:
            return None
        role = get_role(user)
        return str(user.get_username()) if role is None else User(str(user.get_username()), role)
    finally:
        close_old_connections()


def _find_sign_in_page() -> str:
    """Return the address of the admin's page for signing in, or the one of LOGIN_URL where there is no admin."""
    try:
        return str(reverse("admin:login"))
    except NoReverseMatch:
        return str(resolve_url(settings.LOGIN_URL))


async def _answer(send: Send, status: HTTPStatus, text: str, **headers: str) -> None:
    """Send an answer without the dashboard."""
    listed = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store", **headers}
    raw = [(name.encode(), value.encode()) for name, value in listed.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": raw})
    await send({"type": "http.response.body", "body": text.encode()})
