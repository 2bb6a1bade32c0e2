"""The dashboard of an application without a server of HTTP: a client that is signed in with a role."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
from starlette.requests import HTTPConnection

from celery5 import App
from celery5.dashboard import Dashboard, Identify, User
from celery5.dashboard.access import to_role


def identify(request: HTTPConnection) -> User | None:
    """The user that a test names in a header."""
    role = to_role(request.headers.get("x-test-role", ""))
    return None if role is None else User("anna", role)


def is_script(request: HTTPConnection) -> bool:
    """Whether a test says that the user is known by a bearer token alone."""
    return "x-test-script" in request.headers


@asynccontextmanager
async def browsing(
    *apps: App, role: str = "admin", **options: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of the dashboard of some applications, as a user of this role."""
    options = {"hosts": ["jobs.example"], **options}
    dashboard = Dashboard(apps, authenticator=Identify(identify, by_bearer=is_script), **options)
    transport = httpx.ASGITransport(app=dashboard)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://jobs.example", headers={"x-test-role": role}
    ) as client:
        yield client


class _Text(HTMLParser):
    """Collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)


def read_text(html: str) -> str:
    """What a reader sees of a page, in one line."""
    parser = _Text()
    parser.feed(html)
    return " ".join(" ".join(parser.words).split())


def find_form_key(html: str) -> str:
    """The key that a form of the page has."""
    found = re.search(r'name="form_key" value="(\w+)"', html)
    assert found
    return found[1]


async def press(
    client: httpx.AsyncClient, app: App, operation: str, values: Mapping[str, Any]
) -> httpx.Response:
    """Send the form of an operation, as a browser does; the page that follows."""
    path = f"/{app.name}/do/{operation.replace(':', '/')}"
    form = await client.get(path, params=dict(values))
    key = find_form_key(form.text)
    return await client.post(path, data={**values, "form_key": key}, follow_redirects=True)
