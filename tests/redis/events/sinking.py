"""Sinking: Data Sinks that do as they are told, and the service that gives them documents, in the test's own Trio
run."""

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from celery5 import App, RetryPolicy
from celery5.logs.log import Log
from celery5.protocol.events.documents import ResultDocument
from celery5.protocol.events.sinks import get_all_recipients, get_all_sink_options
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.events.sink_delivery import SinkDelivery

QUICK = RetryPolicy(max_retries=2, backoff=0.01, jitter=False)


class Kept:
    """A sink that keeps what it is given in memory, unless `refuses` says that it will not."""

    def __init__(
        self,
        name: str = "kept",
        refuses: Callable[[ResultDocument], bool] = lambda _: False,
        **said: Any,
    ) -> None:
        self.name = name
        self.refuses = refuses
        self.retry = QUICK
        self.batches: list[int] = []
        self.documents: list[ResultDocument] = []
        self.__dict__.update(said)

    def write(self, documents: Sequence[ResultDocument]) -> Any:
        """In a thread."""
        self.batches.append(len(documents))
        refused = [document.id for document in documents if self.refuses(document)]
        if refused:
            raise ValueError(f"{self.name} will not have {refused[0]}")
        self.documents += documents

    @property
    def values(self) -> list[Any]:
        """The values of what it has, in order."""
        return [document.value for document in self.documents]


class Hanging(Kept):
    """A sink that never ends, until it is let go."""

    def __init__(self, name: str = "hanging", **said: Any) -> None:
        super().__init__(name, **said)
        self.go = threading.Event()

    def write(self, documents: Sequence[ResultDocument]) -> None:
        """Hang."""
        self.batches.append(len(documents))
        self.go.wait(30)


class Awaited(Kept):
    """A sink on Trio."""

    async def write(self, documents: Sequence[ResultDocument]) -> None:
        """On Trio."""
        await trio.lowlevel.checkpoint()
        self.documents += documents


async def get_sink_names(app: App) -> SinkDelivery:
    """The service, for the sinks of an application's tasks."""
    tasks = list(app.tasks.values())
    return SinkDelivery(
        broker_router=await app.connections.get_async_driver(),
        keys=app.keys,
        sink_options=get_all_sink_options(tasks),
        recipients=get_all_recipients(tasks),
        queue_names=[],
        message_limit=app.settings.message_limit,
        log=Log(worker="router", app=app.name),
        asyncio_runner=AsyncioRunner(),
        default_loop=app.loop,
    )


@asynccontextmanager
async def delivering(app: App) -> AsyncGenerator[SinkDelivery, None]:
    """Documents are delivered while the block lasts. Nobody announces them here: they are looked for."""
    one = await get_sink_names(app)
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)

        async def look() -> None:
            while True:
                one.recheck()
                await trio.sleep(0.02)

        nursery.start_soon(look)
        try:
            yield one
        finally:
            nursery.cancel_scope.cancel()
