"""Open Publishing: lets jobs that run here send jobs of their own over the worker's connection.

Floor: bootsteps. Reads: nothing. Writes: nothing.
"""

import trio

from celery5.app import App
from celery5.broker.endpoint import Endpoint
from celery5.broker.on_trio import TrioRedis


class LentConnection:
    """In this Trio run, the application's `adelay` uses the worker's own connection."""

    def __init__(self, *, app: App, redis: TrioRedis, endpoint: Endpoint) -> None:
        self._app = app
        self._redis = redis
        self._endpoint = endpoint

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lend the connection until cancelled."""
        with self._app.connections.lend_driver(self._redis, self._endpoint):
            task_status.started()
            await trio.sleep_forever()
