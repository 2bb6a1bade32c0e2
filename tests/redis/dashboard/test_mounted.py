"""The dashboard inside other web applications: FastAPI, Starlette and Django, on Trio and on asyncio."""

import asyncio
from typing import Any

import django  # type: ignore[import-untyped]
import httpx
import pytest
from django.conf import settings  # type: ignore[import-untyped]
from django.core.handlers.asgi import ASGIHandler  # type: ignore[import-untyped]
from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]
from django.urls import path  # type: ignore[import-untyped]
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from celery5 import App
from celery5.dashboard import Dashboard, Identify, User
from tests.redis.dashboard.site import find_form_key, read_text


def home(_: HttpRequest) -> HttpResponse:
    """A view of the project around."""
    return HttpResponse("the shop")


def nothing() -> None:
    """A task."""


urlpatterns = [path("", home)]


def make_dashboard(app: App) -> Dashboard:
    return Dashboard(app, authenticator=Identify(lambda request: User("anna", "operator")))


def in_starlette(app: App) -> Any:
    return Starlette(routes=[Mount("/jobs", make_dashboard(app))])


def in_fastapi(app: App) -> Any:
    api = FastAPI()
    api.mount("/jobs", make_dashboard(app))
    return api


def in_django(app: App) -> Any:
    if not settings.configured:
        settings.configure(
            ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test", DATABASES={}, DEBUG=False
        )
        django.setup()
    return Starlette(routes=[Mount("/jobs", make_dashboard(app)), Mount("/", ASGIHandler())])


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


SITES = [in_starlette, in_fastapi, in_django]


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


def test_the_project_around_answers_elsewhere(app: App) -> None:
    async def look() -> httpx.Response:
        transport = httpx.ASGITransport(app=in_django(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            return await client.get("/")

    answer = asyncio.run(look())
    assert answer.text == "the shop"
