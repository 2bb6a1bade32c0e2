"""Serve the pages: HTML that reads without scripts, and forms for everything that can be done."""

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

import celery5
from celery5.dashboard.access import Authenticator
from celery5.dashboard.formats import FILTERS
from celery5.dashboard.forms import make_fields
from celery5.dashboard.guard import FORM_KEY, SIGN_IN_PATH, get_client, get_path, get_root
from celery5.dashboard.page import Page, PageRequest
from celery5.dashboard.pages import PAGES
from celery5.dashboard.performing import Performer, Problem, describe_problem
from celery5.dashboard.requests import read_form, read_query, to_parameters
from celery5.dashboard.sessions import Sessions
from celery5.dashboard.static import StaticFiles
from celery5.operations.operation import Changed, Operation
from celery5.operations.table import OPERATIONS
from celery5.protocol.masking import escape_text

NOTICE = "celery5_notice"
"""The cookie with what was just done, which the next page says."""
MAX_NOTICE = 300
"""Characters of it. Browsers drop a cookie of more than 4,096 bytes, and quoting makes up to 12 of a character."""
NOUNS = {"dlq": "dead letters", "task": "tasks and jobs", "bulk": "many jobs at once"}
"""What stands for the nouns of commands that need a word more."""


class Site:
    """The routes of the pages.

    Args:
        performer: Performs the operations.
        sessions: The sessions of those who have signed in.
        authenticator: Says whose a token is.
        static: The style sheet and the scripts.
        on_refusal: Called with the address of a client and the reason when a token is refused.
    """

    def __init__(
        self,
        performer: Performer,
        *,
        sessions: Sessions,
        authenticator: Authenticator,
        static: StaticFiles,
        on_refusal: Callable[[str, str], object],
    ) -> None:
        self._on_refusal = on_refusal
        self._performer = performer
        self._sessions = sessions
        self._authenticator = authenticator
        self._static = static
        self._templates = _get_templates()

    def make_routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", self._show_apps),
            Route(SIGN_IN_PATH, self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/{app}/do/{noun}/{verb}", self._operate, methods=["GET", "POST"]),
            *(Route(f"/{{app}}/{page.path}".rstrip("/"), self._make_endpoint(page)) for page in PAGES),
        ]

    # pages

    def _make_endpoint(self, page: Page) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            return await self._show_page(page, request)

        return show

    async def _show_page(self, page: Page, request: Request) -> Response:
        path = {name: str(value) for name, value in request.path_params.items() if name != "app"}
        title = page.title.format_map(path)
        try:
            query = {name: values[-1] for name, values in read_query(request).items()}
            asked = PageRequest(
                app=request.path_params["app"],
                path=path,
                query=query,
                user=request.state.user,
                performer=self._performer,
            )
            self._performer.get_app(asked.app)
            shown = {**await page.load(asked), "query": query, "path": path, "problems": asked.problems}
            return self._render(request, page.template, shown, title=title, page=page)
        except Exception as error:
            problem = describe_problem(error, request)
            title = "Not found" if problem.status == 404 else title
            return self._render_problem(request, problem, title=title, page=page)

    async def _show_apps(self, request: Request) -> Response:
        names = sorted(self._performer.apps)
        if len(names) == 1:
            return RedirectResponse(f"{get_root(request)}/{quote(names[0])}", 303)
        states: dict[str, Any] = {}
        for name in names:  # bound: the applications of this dashboard
            try:
                states[name] = await self._performer.perform(
                    name, OPERATIONS["info:show"], {}, request.state.user
                )
            except Exception as error:
                states[name] = describe_problem(error, request)
        return self._render(request, "apps.html", {"states": states}, title="Applications")

    # operations

    async def _operate(self, request: Request) -> Response:
        """Show the form of an operation, with what it would do; or do it, and go back to the page it came from."""
        values: dict[str, list[str]] = {}
        operation, problem, result = None, None, None
        try:
            path = request.path_params
            self._performer.get_app(path["app"])
            operation = self._performer.get_operation(path["noun"], path["verb"])
            is_post = request.method == "POST"
            values = await read_form(request, self._sessions) if is_post else read_query(request)
            back = self._get_back(request, values.pop("back", [""])[-1])
            parameters = to_parameters(operation, values)
            if is_post or not operation.is_change:
                result = await self._perform(request, operation, parameters)
            if is_post and isinstance(result, Changed) and not (result.replies or result.dry_run):
                return self._go_back(request, back, result)
            if not is_post and operation.is_change:
                result = await self._preview(request, operation, parameters)
        except Exception as error:
            problem = describe_problem(error, request)
            if operation is None or problem.status in (403, 503):
                return self._render_problem(request, problem, title="This cannot be done")
            back = self._get_back(request, "")
        shown = {
            "operation": operation,
            "fields": make_fields(operation, {name: "\n".join(texts) for name, texts in values.items()}),
            "back": back,
            "result": result,
            "columns": operation.shown_columns if isinstance(result, list) or operation.columns else (),
            "problem": problem,
        }
        status = 200 if problem is None else problem.status
        title = (
            f"{operation.verb.replace('-', ' ').capitalize()}: {NOUNS.get(operation.noun, operation.noun)}"
        )
        return self._render(request, "operation.html", shown, title=title, status=status)

    async def _perform(self, request: Request, operation: Operation, parameters: Mapping[str, Any]) -> Any:
        app = request.path_params["app"]
        try:
            return await self._performer.perform(app, operation, parameters, request.state.user, is_text=True)
        finally:
            if operation.is_change:
                self._performer.forget_reads(app)

    async def _preview(self, request: Request, operation: Operation, parameters: Mapping[str, Any]) -> Any:
        """Return what an operation would do, where it can say so and has all that it needs; else None."""
        fields = msgspec.structs.fields(operation.parameters)
        if not any(field.name == "dry_run" for field in fields):
            return None
        if any(field.required and not parameters.get(field.name) for field in fields):
            return None
        return await self._perform(request, operation, {**parameters, "dry_run": True})

    def _get_back(self, request: Request, back: str) -> str:
        """Return where to go afterwards: a path of this dashboard, else the application."""
        root = f"{get_root(request)}/{quote(request.path_params['app'])}"
        return back if back.startswith(root) and "\\" not in back and "\n" not in back else root

    def _go_back(self, request: Request, back: str, done: Changed) -> Response:
        text = f"{done.summary}. {done.failure}" if done.failure else done.summary
        response = RedirectResponse(back, 303)
        response.set_cookie(
            NOTICE,
            quote(text[:MAX_NOTICE]),
            max_age=30,
            path=get_root(request) or "/",
            httponly=True,
            samesite="strict",
            secure=request.state.is_secure,
        )
        return response

    # signing in

    async def _sign_in(self, request: Request) -> Response:
        takes_links = self._authenticator.takes_links
        try:
            token, in_address = await self._read_token(request)
            signed_in = (
                self._authenticator.sign_in(token) if token and (takes_links or not in_address) else None
            )
        except Exception as error:
            return self._render_problem(request, describe_problem(error, request), title="Sign in")
        if signed_in is None:
            wrong = "This token is not valid, or has been used." if token else ""
            if wrong and in_address and not takes_links:
                wrong = "A token is not taken from an address, where it stays in logs: write it here."
            if wrong:
                self._on_refusal(get_client(request), wrong)
            return self._render(
                request,
                "sign_in.html",
                {"wrong": wrong, "by_address": takes_links},
                title="Sign in",
                status=401 if wrong else 200,
            )
        response = RedirectResponse(get_root(request) or "/", 303)
        response.set_cookie(
            self._sessions.cookie,
            self._sessions.make(*signed_in),
            path=get_root(request) or "/",
            httponly=True,
            samesite="strict",
            secure=request.state.is_secure,
        )
        return response

    async def _read_token(self, request: Request) -> tuple[str, bool]:
        """Return the token, and whether it is in the address. A form without a session has no key yet."""
        if request.method == "GET":
            return read_query(request).get("token", [""])[-1], True
        if request.method != "POST":
            return "", False
        request.state.needs_form_key = False
        return (await read_form(request, self._sessions)).get("token", [""])[-1].strip(), False

    async def _sign_out(self, request: Request) -> Response:
        try:
            await read_form(request, self._sessions)
            refusal = await self._sessions.end(request.state.session_cookie)
        except Exception as error:
            return self._render_problem(request, describe_problem(error, request), title="Sign out")
        response: Response = RedirectResponse(f"{get_root(request)}{SIGN_IN_PATH}", 303)
        if refusal:
            problem = Problem(
                403,
                "you are signed out of this process, but others with its secret cannot be told, and take the old "
                f"cookie until it is over: {refusal}",
            )
            response = self._render_problem(request, problem, title="Sign out")
        response.delete_cookie(self._sessions.cookie, path=get_root(request) or "/")
        return response

    # rendering

    def _render_problem(
        self, request: Request, problem: Problem, *, title: str, page: Page | None = None
    ) -> Response:
        return self._render(
            request, "problem.html", {"problem": problem}, title=title, page=page, status=problem.status
        )

    def _render(
        self,
        request: Request,
        template: str,
        values: Mapping[str, Any],
        *,
        title: str,
        page: Page | None = None,
        status: int = 200,
    ) -> Response:
        root, state = get_root(request), request.state
        app = request.path_params.get("app", "")
        is_part = request.headers.get("x-part") == "main"
        notice = "" if is_part else _read_notice(request)
        html = self._templates.get_template(template).render(
            **{"problems": [], **values},
            layout="part.html" if is_part else "layout.html",
            title=title,
            page=page,
            nav=[(listed.nav, listed.path) for listed in PAGES if listed.nav],
            here=_get_address(request),
            root=root,
            base=f"{root}/{quote(app)}",
            app=app,
            apps=sorted(self._performer.apps),
            user=state.user,
            form_key=state.form_key,
            form_key_name=FORM_KEY,
            nonce=state.nonce,
            notice=notice,
            made_at=round(time.time(), 3),
            static=root + self._static.path,
            version=celery5.__version__,
            operations=OPERATIONS,
            link=_make_link,
        )
        response = HTMLResponse(html, status)
        if notice:
            response.delete_cookie(NOTICE, path=root or "/")
        return response


@cache
def _get_templates() -> Environment:
    """Return the templates, which all sites of a process share: to compile one takes longer than to show a page."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_controls,
    )
    templates.filters.update(FILTERS)
    return templates


def _escape_controls(value: Any) -> Any:
    """Return what a template writes without characters that hide, reorder or forge text: names come from anybody."""
    return (
        escape_text(value, keep="\t\n") if isinstance(value, str) and not isinstance(value, Markup) else value
    )


def _get_address(request: Request) -> str:
    """Return the path and the query of a request as the client has written them: names may have any character."""
    query = request.scope["query_string"].decode("latin-1")
    root, raw = quote(get_root(request)), request.scope.get("raw_path") or quote(get_path(request)).encode()
    path = raw.decode("latin-1")
    path = path if path.startswith(root) else root + path
    return f"{path}?{query}" if query else path


def _read_notice(request: Request) -> str:
    return unquote(request.cookies.get(NOTICE, ""))[:MAX_NOTICE]


def _make_link(path: str, **parameters: Any) -> str:
    """Return a path with parameters; those that are empty are left out."""
    given = {name: value for name, value in parameters.items() if value not in ("", None, [])}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path
