"""Tell workers by Redis whether they may be recycled, so that it works on every platform and every host."""

import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.controller.foreman import Foreman


class RecyclingPermits:
    """Writes the permits of the Foreman. One that cannot be written is left out: the Foreman repeats it."""

    def __init__(self, *, redis: AsyncDriver, keys: Keys, foreman: Foreman, log: Log) -> None:
        self._redis = redis
        self._keys = keys
        self._permits = foreman.permits
        self._log = log

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write permits until cancelled."""
        task_status.started()
        while True:
            permit = await self._permits.receive()
            try:
                await self._redis.perform(
                    cluster.set_recycling_permit(self._keys, permit.name, is_granted=permit.is_granted)
                )
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("member:permit-failed", "debug", name=permit.name, why=str(error))
