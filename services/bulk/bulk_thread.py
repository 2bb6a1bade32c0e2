"""Perform bulk actions in a thread with its own event loop: they go on when nobody looks.

The dashboard may be mounted in an application on asyncio, and what performs bulk actions is a service on Trio.
"""

import os
import socket
import threading
from functools import partial
from weakref import WeakKeyDictionary

import trio

from celery5.app import App
from celery5.audit.actor import Actor, acting, get_actor
from celery5.broker.colour import run_in_thread
from celery5.bulk.actions import BulkCount
from celery5.errors import BulkActionRefused
from celery5.logs.log import Log
from celery5.protocol.bulk import BulkRequest
from celery5.services.bulk.bulk_performer import BulkPerformer

START_LIMIT = 10.0
"""Seconds that the thread has to start."""


class BulkThread:
    """The thread of one application, which is started with the first action.

    It ends with the process; what it performed then is interrupted as soon as its lease is over, and can be resumed.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._running: tuple[BulkPerformer, trio.lowlevel.TrioToken] | None = None

    async def submit(self, request: BulkRequest, counted: BulkCount) -> str:
        """Have an action performed in the name of who acts now; return its id.

        Args:
            request: What to do.
            counted: How much that is.

        Raises:
            Misconfigured: The action makes no sense.
            BulkActionRefused: Too many actions wait.
        """
        actor = get_actor()
        return await run_in_thread(partial(self._submit, request, counted, actor))

    async def resume(self, action_id: str) -> None:
        """Go on with an action that was interrupted, recorded under who acts now. Raises BulkActionRefused."""
        await run_in_thread(partial(self._resume, action_id, get_actor()))

    def wait_until_idle(self) -> None:
        """Return when the thread has nothing to do, and all of it is recorded. For plain Python."""
        if self._running is not None:
            performer, token = self._running
            trio.from_thread.run(performer.wait_until_idle, trio_token=token)

    def _submit(self, request: BulkRequest, counted: BulkCount, actor: Actor) -> str:
        performer, token = self._start()

        async def submit() -> str:
            with acting(*actor):
                return await performer.submit(request, counted)

        return trio.from_thread.run(submit, trio_token=token)

    def _resume(self, action_id: str, actor: Actor) -> None:
        performer, token = self._start()

        async def resume() -> None:
            with acting(*actor):
                await performer.resume(action_id)

        trio.from_thread.run(resume, trio_token=token)

    def _start(self) -> tuple[BulkPerformer, trio.lowlevel.TrioToken]:
        """Return what performs actions, and the token of its event loop."""
        with self._lock:
            if self._running is not None:
                return self._running
            is_up = threading.Event()
            thread = threading.Thread(
                target=trio.run, args=(self._perform, is_up), daemon=True, name="bulk actions"
            )
            thread.start()
            if not is_up.wait(START_LIMIT) or self._running is None:
                raise BulkActionRefused("the thread for bulk actions does not start: see the log")
            return self._running

    async def _perform(self, is_up: threading.Event) -> None:
        name = f"{socket.gethostname()}:{os.getpid()}:dashboard"
        log = Log(worker=name, app=self._app.name, kind="dashboard")
        performer = BulkPerformer(app=self._app, worker=name, log=log)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(performer.run)
                self._running = performer, trio.lowlevel.current_trio_token()
                is_up.set()
        finally:
            self._running = None
            log.finish()


_BY_APP: WeakKeyDictionary[App, BulkThread] = WeakKeyDictionary()


def get_bulk_thread(app: App) -> BulkThread:
    """Return what performs the bulk actions of an application in this process."""
    return _BY_APP.setdefault(app, BulkThread(app))
