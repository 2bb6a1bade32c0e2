"""The dashboard as one ASGI application, which is served by itself or mounted in another one."""

import warnings
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery5.app import App
from celery5.broker.reply_limit import limit_replies
from celery5.dashboard.access import Authenticator, ProxyHeaders
from celery5.dashboard.api import JsonApi
from celery5.dashboard.guard import Guard
from celery5.dashboard.hosts import AllowedHosts
from celery5.dashboard.performing import Performer
from celery5.dashboard.sessions import Sessions
from celery5.dashboard.site import Site
from celery5.dashboard.static import StaticFiles
from celery5.errors import Misconfigured

REPLY_LIMIT = 2.0
"""Seconds for which a request waits for an answer of Redis; then the page says that there is none."""

OnError = Callable[[str, Exception], object]
OnRefusal = Callable[[str, str], object]


class Dashboard:
    """The pages and the JSON API of one or several applications, as an ASGI 3 application on Trio or asyncio.

    Args:
        apps: The applications.
        authenticator: Says who makes a request, and which role that user has. There is no dashboard without.
        hosts: The names under which it is reached, besides loopback ones: each `NAME`, or `NAME:PORT`. A request for
            another name is refused, since a page of another site may have made it (DNS rebinding).
        public_url: The address that browsers have for it, such as `https://jobs.example`: its name is one of `hosts`,
            and with `https` cookies are sent by TLS only.
        secret: What signs sessions, of at least 32 bytes; None for one that ends with this process. Several processes
            need the same.
        on_error: Called with the path of a request and an error of ours, which the client does not see; None to raise
            it to the server.
        on_refusal: Called with the address of a client and the reason when a token is refused, or what a proxy sends.

    Raises:
        Misconfigured: Two applications have the same name, or there is none; a host or the secret is wrong.
    """

    def __init__(
        self,
        apps: App | Sequence[App],
        *,
        authenticator: Authenticator,
        hosts: Collection[str] = (),
        public_url: str = "",
        secret: str | None = None,
        on_error: OnError | None = None,
        on_refusal: OnRefusal = lambda client, why: None,
    ) -> None:
        listed = [apps] if isinstance(apps, App) else list(apps)
        by_name = {app.name: app for app in listed}
        if not listed or len(by_name) < len(listed):
            raise Misconfigured("a dashboard shows one application or several, each with its own name")
        sessions, performer = Sessions(secret, listed[0]), Performer(by_name)
        static = StaticFiles()
        site = Site(
            performer, sessions=sessions, authenticator=authenticator, static=static, on_refusal=on_refusal
        )
        routes: list[Route] = [
            *static.make_routes(),
            *JsonApi(performer, sessions).make_routes(),
            *site.make_routes(),
        ]
        pages: ASGIApp = Starlette(routes=routes)
        self._guarded = Guard(
            pages,
            authenticator=authenticator,
            sessions=sessions,
            hosts=AllowedHosts(hosts, public_url),
            open_paths=static.paths,
            on_refusal=on_refusal,
        )
        if isinstance(authenticator, ProxyHeaders) and authenticator.warning:
            warnings.warn(authenticator.warning, stacklevel=2)
        self._performer = performer
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or take part in the life of a server."""
        if scope["type"] == "lifespan":
            await _live(receive, send, self._performer.read_ahead)
            return
        has_started = False

        async def note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            with limit_replies(REPLY_LIMIT):
                await self._guarded(scope, receive, note)
            if (unexpected := scope.get("state", {}).get("unexpected")) is not None:
                raise unexpected
        except Exception as error:
            # Starlette has answered, unless the error is the guard's: its file of tokens is gone, for example.
            if not has_started:
                await PlainTextResponse("this dashboard has an error: see its log\n", 500)(
                    scope, receive, send
                )
            if self._on_error is None:
                raise
            self._on_error(scope.get("path", ""), error)


async def _live(receive: Receive, send: Send, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run what belongs to the life of a server: Starlette would take a cancellation for a failure.

    A dashboard that is mounted has no such life, and works without.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while True:
            phase = (await receive())["type"]
            if phase == "lifespan.shutdown":
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await send({"type": f"{phase}.complete"})
                return
            await send({"type": f"{phase}.complete"})
