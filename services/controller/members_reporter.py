"""Store in Redis what the leading Controller knows of its members, so that every surface says the same of them."""

from typing import ClassVar

import trio

from celery5.broker.calls import cluster
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.process.missing import REPORT_PERIOD
from celery5.services.controller.foreman import Foreman


class MembersReporter:
    """Stores a report every few seconds while its Controller leads. A report of one that is gone expires."""

    only_observes: ClassVar = True

    def __init__(self, *, redis: AsyncDriver, keys: Keys, foreman: Foreman, log: Log) -> None:
        self._redis = redis
        self._keys = keys
        self._foreman = foreman
        self._log = log

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Report until cancelled."""
        task_status.started()
        while True:
            if self._foreman.may_report:
                try:
                    await self._report()
                except BrokerError as error:  # that it cannot be reached is logged by others
                    self._log.event("member:report-failed", "debug", why=str(error))
            await trio.sleep(REPORT_PERIOD)

    async def _report(self) -> None:
        at = await self._redis.perform(SERVER_TIME)
        if self._foreman.may_report:  # it may have lost the lead on the way
            await self._redis.perform(cluster.store_members_report(self._keys, self._foreman.make_report(at)))
