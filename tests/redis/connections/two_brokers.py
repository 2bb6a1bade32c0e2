"""Two brokers: an application whose queue `post` is on a second server, which a test may kill and revive."""

import asyncio
from functools import partial
from typing import Any

import trio

from celery5 import App

COLOURS = ("plain", "trio", "asyncio")


async def asked(colour: str, plain: Any, awaited: Any, *args: Any, **options: Any) -> Any:
    """What a door gives in one colour. What is left out of it is so in all of them."""
    if colour == "plain":
        return await trio.to_thread.run_sync(partial(plain, *args, **options))
    if colour == "trio":
        return await awaited(*args, **options)
    return await trio.to_thread.run_sync(lambda: asyncio.run(awaited(*args, **options)))


def app_on(name: str, url: str, second: str, **settings: Any) -> App:
    """The application, on both servers."""
    return with_tasks(App(name, broker=url, brokers={"mails": second}, routes={"post": "mails"}, **settings))


def far_end(name: str, second: str, **settings: Any) -> App:
    """The same application as who knows nothing but the second server sees it."""
    return with_tasks(App(name, broker=second, **settings))


def with_tasks(app: App) -> App:
    """One task on each broker, one that waits on the first for a job on the second, one without its own queue."""

    @app.task(name="near", queue="near")
    async def near(number: int) -> int:
        return number

    @app.task(name="post", queue="post")
    async def post(number: int) -> int:
        return -number

    @app.task(name="fails", queue="post", max_retries=0)
    async def fails() -> None:
        raise ValueError("it fails")

    @app.task(name="across", queue="near")
    async def across(number: int) -> int:
        return await (await post.adelay(number)).aget(timeout=30)

    if app.brokers.is_multi_broker:

        @app.task(name="mailed", broker="mails")
        def mailed(text: str) -> str:
            return text

        del mailed
    del near, fails, across
    return app
