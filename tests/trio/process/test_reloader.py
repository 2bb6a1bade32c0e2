"""Reloader: the service that watches the configuration, as far as it needs no worker."""

import trio

from celery5 import App
from celery5.logs.log import Log
from celery5.services.process.reloader import NextIncarnation, Reloader


async def test_a_backend_whose_watch_returns_at_once_is_not_spun_on() -> None:
    class Restless:
        where = "the restless one"
        loads = 0

        def load(self) -> dict[str, object]:
            self.loads += 1
            return {}

        async def watch(self) -> None:
            await trio.lowlevel.checkpoint()

    restless = Restless()
    app = App("shop", config=restless)
    with trio.move_on_after(0.9):
        log = Log(worker="w", app="shop")
        await Reloader(
            app=app, configuration=restless, reload=True, next_incarnation=NextIncarnation(), log=log
        ).run()
    assert restless.loads == 2  # when the application was made, and once since
