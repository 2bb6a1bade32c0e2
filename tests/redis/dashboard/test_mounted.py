"""The dashboard inside other web applications: FastAPI, Starlette and Django, on Trio and on asyncio."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from celery5 import App
from celery5.dashboard import Dashboard, Identify, User
from tests.redis.dashboard.site import find_form_key, read_text


def nothing() -> None:
    """A task."""


def make_dashboard(app: App) -> Dashboard:
    return Dashboard(
        app, authenticator=Identify(lambda request: User("anna", "operator")), hosts=["shop.example"]
    )


def in_starlette(app: App) -> Any:
    return Starlette(routes=[Mount("/jobs", make_dashboard(app))])


def in_fastapi(app: App) -> Any:
    api = FastAPI()
    api.mount("/jobs", make_dashboard(app))
    return api


@pytest.mark.parametrize("root", ["", "/", "//", "/jobs", "/jobs/", "//other.example"])
async def test_no_address_leads_to_another_host_wherever_a_server_says_it_is_mounted(
    app: App, root: str
) -> None:
    """A browser takes `//sign-in` for a host; servers may say `/` for the top."""
    guarded = Dashboard(app, authenticator=Identify(lambda request: None), hosts=["shop.example"])
    for site in (guarded, make_dashboard(app)):
        transport = httpx.ASGITransport(app=site, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            for path in ("", "/", "/shop", "/no/such/page"):
                answer = await client.get((root + path) or "/")
                if answer.next_request is not None:
                    assert answer.next_request.url.host == "shop.example", answer.headers


async def use(site: Any, app: App) -> None:
    """Look at a page, press a button, ask the API, and load a style sheet, all below the place of the mount."""
    transport = httpx.ASGITransport(app=site)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
        first = await client.get("/jobs/")
        assert (first.status_code, first.headers["location"]) == (303, f"/jobs/{app.name}")
        page = await client.get(f"/jobs/{app.name}/queues")
        assert "Queues" in read_text(page.text)
        sheet = page.text.partition('rel="stylesheet" href="')[2].partition('"')[0]
        assert sheet.startswith("/jobs/static/")
        assert (await client.get(sheet)).status_code == 200
        values = {"task": "t", "why": "a test", "form_key": find_form_key(page.text)}
        values["back"] = f"/jobs/{app.name}/limits"
        done = await client.post(f"/jobs/{app.name}/do/task/suspend", data=values, follow_redirects=True)
        assert str(done.url) == f"http://shop.example/jobs/{app.name}/limits"
        assert "t is suspended" in read_text(done.text)
        answer = await client.get(f"/jobs/api/v1/{app.name}/task/limits")
        assert answer.json()[0]["why"] == "a test"
        assert (await client.get("/jobs/api/v1/openapi.json")).json()["servers"] == [{"url": "/jobs"}]
        await app.limits.aresume("t")


SITES = [in_starlette, in_fastapi]


@pytest.mark.parametrize("make", SITES)
async def test_it_is_mounted_on_trio(app: App, make: Any) -> None:
    app.task(name="t")(nothing)
    await use(make(app), app)


@pytest.mark.parametrize("make", SITES)
def test_it_is_mounted_on_asyncio(app: App, make: Any) -> None:
    app.task(name="t")(nothing)

    async def run() -> None:
        await use(make(app), app)

    asyncio.run(run())


def test_it_is_mounted_in_front_of_a_django_project_that_answers_elsewhere(app: App) -> None:
    """In its own process: Django has one configuration a process, and the pages of the guide have theirs."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.redis.dashboard.django_project", app.name, app.settings.broker],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "the shop, on asyncio and on trio\n"), ended.stderr
