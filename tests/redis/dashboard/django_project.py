"""A Django project with the dashboard in front of it: `python -m tests.redis.dashboard.django_project NAME BROKER`."""

import asyncio
import sys
from typing import Any

import django
import httpx
import trio
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.routing import Mount

from celery5 import App
from tests.redis.dashboard.test_mounted import make_dashboard, nothing, use


def home(_: HttpRequest) -> HttpResponse:
    """A view of the project around."""
    return HttpResponse("the shop")


urlpatterns = [path("", home)]


async def look(site: Any) -> str:
    """What the project answers."""
    transport = httpx.ASGITransport(app=site)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
        return (await client.get("/")).text


def main() -> None:
    """Use the dashboard and the project on asyncio, and the dashboard on Trio."""
    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test", DATABASES={})
    django.setup()
    app = App(sys.argv[1], broker=sys.argv[2])
    app.task(name="t")(nothing)
    site = Starlette(routes=[Mount("/jobs", make_dashboard(app)), Mount("/", ASGIHandler())])
    asyncio.run(use(site, app))
    text = asyncio.run(look(site))
    trio.run(use, site, app)
    sys.stdout.write(f"{text}, on asyncio and on trio\n")


if __name__ == "__main__":
    main()
