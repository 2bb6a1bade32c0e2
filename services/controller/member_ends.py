"""Note in Redis how processes of members ended, so that whoever misses a worker sees what its Controller knows."""

from typing import ClassVar

import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.controller.foreman import Foreman


class MemberEnds:
    """Notes the ends of members that were out of order, and what follows each.

    What cannot be written is left out: the log has it, too.
    """

    only_observes: ClassVar = True

    def __init__(self, *, redis: AsyncDriver, keys: Keys, foreman: Foreman, log: Log) -> None:
        self._redis = redis
        self._keys = keys
        self._ends = foreman.member_ends
        self._log = log

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Note ends until cancelled."""
        task_status.started()
        while True:
            end = await self._ends.receive()
            try:
                await self._redis.perform(cluster.note_member_end(self._keys, end))
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("member:note-failed", "debug", name=end.member, why=str(error))
