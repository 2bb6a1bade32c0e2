"""A client that looks at the pages of one application, and presses their buttons."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from html import unescape
from typing import Any

import httpx

from celery5 import App
from tests.redis.dashboard.site import browsing, find_form_key, read_text


class Client:
    """Looks at pages, presses buttons and asks the JSON API, as `anna`."""

    def __init__(self, http: httpx.AsyncClient, app: App) -> None:
        self._http = http
        self._app = app

    async def look(self, path: str, *, status: int = 200, **query: Any) -> str:
        """What a page shows, as text in one line."""
        return read_text(await self.load(path, status=status, **query))

    async def load(self, path: str, *, status: int = 200, **query: Any) -> str:
        """The HTML of a page."""
        answer = await self._http.get(f"/{self._app.name}/{path}".rstrip("/"), params=query or None)
        assert answer.status_code == status, read_text(answer.text)
        return answer.text

    async def press(self, operation: str, *, status: int = 200, **values: Any) -> str:
        """Send the form of an operation, as a browser does; the text of the page that follows."""
        path = f"/{self._app.name}/do/{operation.replace(':', '/')}"
        page = await self._http.get(f"/{self._app.name}/jobs")
        data = {**values, "form_key": find_form_key(page.text), "back": f"/{self._app.name}/bulk"}
        answer = await self._http.post(path, data=data, follow_redirects=True)
        assert answer.status_code == status, read_text(answer.text)
        return read_text(answer.text)

    async def ask(self, operation: str, *, status: int = 200, **parameters: Any) -> Any:
        """What the JSON API answers to a look."""
        path = f"/api/v1/{self._app.name}/{operation.replace(':', '/')}"
        answer = await self._http.get(path, params=parameters)
        assert answer.status_code == status, answer.text
        return answer.json()


@asynccontextmanager
async def looking_at(app: App, *, role: str = "admin") -> AsyncGenerator[Client, None]:
    """A client of the dashboard of an application, as a user of this role."""
    async with browsing(app, role=role) as http:
        yield Client(http, app)


def find_links(html: str, part: str) -> list[str]:
    """The addresses of links that have this part."""
    return [unescape(link) for link in re.findall(r'href="([^"]*)"', html) if part in unescape(link)]


def summarize_actions(trail: list[Any]) -> list[Mapping[str, Any]]:
    """Who has done what, from where, and to how many."""
    return [
        {"who": entry.who, "source": entry.source, "action": entry.action, "count": entry.count}
        for entry in trail
    ]
