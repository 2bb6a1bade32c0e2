"""Leadership: elect the one Controller of an application that may act.

Ask `has_valid_lease` before each act: the process' own clock answers it, without a round trip. So a leader that
hears nothing from Redis stops acting before another one may begin, and one that was frozen finds out before it
acts again. Members that it was starting refuse to start, by their epoch
(`processes/foreground.py`).
"""

from collections.abc import Callable, Iterable, Mapping

import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.cluster.leadership import (
    EPOCH_VARIABLE,
    POLL_PERIOD,
    LeaderRecord,
    LeadershipChange,
    LeadershipState,
)
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.process.lease import now as clock

REQUEST_LIMIT = 1.0
"""Seconds that one round trip may take before it is tried again."""
RESIGN_LIMIT = 2.0
"""Seconds that resigning may take at the end. After that the others wait until the lease has lapsed."""


class Leadership:
    """The leadership as one Controller sees it.

    Args:
        worker: the name of this Controller.
        clock: a clock in seconds that goes on during a suspend.
    """

    def __init__(
        self, *, redis: AsyncDriver, keys: Keys, worker: str, log: Log, clock: Callable[[], float] = clock
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._log = log
        self._now = clock
        self._state = LeadershipState(name=worker)
        self._changed = trio.Event()
        self._outages = OutageLog(log, "leadership:interrupted", "leadership:resumed", hint=_UNHEARD)
        self._resigned = False

    @property
    def epoch(self) -> int:
        """Return the epoch in which it leads, with or without a valid lease; 0 when it stands by."""
        return self._state.epoch

    @property
    def record(self) -> LeaderRecord:
        """Return the last known record of the leader."""
        return self._state.last_record or LeaderRecord()

    @property
    def is_leader(self) -> bool:
        """Return whether it leads as far as it knows, with or without a valid lease."""
        return self._state.epoch != 0

    @property
    def has_valid_lease(self) -> bool:
        """Return whether it may act at this moment. Ask before each act."""
        return self._state.has_valid_lease(self._now())

    @property
    def status_line(self) -> str:
        """Return its state, for people; '' when it leads."""
        if self.is_leader:
            return "" if self.has_valid_lease else _UNSURE
        if self._resigned:
            return _RESIGNED
        return f"stands by: {self.record.leader} leads" if self.record.leader else _NOBODY

    def get_epoch_environment(self) -> Mapping[str, str]:
        """Return the environment variables for a process that is started now."""
        return {EPOCH_VARIABLE: str(self._state.epoch)}

    async def wait_changed(self) -> None:
        """Wait until it begins or ceases to lead."""
        await self._changed.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lead or stand by until cancelled, then resign."""
        self._resigned = False
        try:
            await self.refresh()
            task_status.started()
            while not self._resigned:
                await trio.sleep(self._state.get_poll_delay(self._now()))
                await retry_until_available(self.refresh, self._outages, POLL_PERIOD)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(RESIGN_LIMIT, shield=True):
                await self.resign()

    async def refresh(self) -> None:
        """Renew the lease or try to get it, in one round trip.

        Raises BrokerUnavailable, also when no answer comes.
        """
        if self._resigned:
            return
        requested_at, state = self._now(), self._state
        call = cluster.claim_leadership(
            self._keys, state.name, replaces=state.get_replaceable_version(requested_at), epoch=state.epoch
        )
        with trio.move_on_after(REQUEST_LIMIT):
            self._apply_record(await self._redis.perform(call), requested_at)
            return
        raise BrokerUnavailable(f"no answer within {REQUEST_LIMIT:g} s")

    async def resign(self) -> None:
        """Stop leading, so that another Controller may lead at once.

        This one does not try again until `run` is called again.
        """
        epoch, self._resigned = self._state.epoch, True
        self._set_state(LeadershipState(name=self._state.name))
        if not epoch:
            return
        try:
            await self._redis.perform(cluster.resign_leadership(self._keys, self._state.name, epoch=epoch))
        except BrokerError as error:
            self._log.event("leadership:resign-failed", "debug", why=str(error))
        else:
            self._log.event("leadership:resigned", epoch=epoch)

    def conditions(self) -> Mapping[str, str]:
        """Report ready while it knows whether it leads or stands by."""
        return {"leadership": _UNSURE if self.is_leader and not self.has_valid_lease else ""}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield whether it leads, as a metric."""
        yield make_gauge(
            "celery5_controller_is_leader",
            "1 while this Controller leads and its lease is valid.",
            self.has_valid_lease,
        )
        yield make_gauge(
            "celery5_controller_epoch",
            "The epoch of the leader, as far as is known.",
            self.record.epoch,
            merge="max",
        )

    def _apply_record(self, record: LeaderRecord, requested_at: float) -> None:
        if self._resigned:  # the answer to a request from before it resigned
            return
        led = self._state.epoch
        state, news = self._state.apply_record(record, asked_at=requested_at, now=self._now())
        if news is LeadershipChange.LOST or (led and news is LeadershipChange.ACQUIRED):
            self._log.event("leadership:lost", "error", epoch=led, leader=record.leader, hint=_LOST)
        if news is LeadershipChange.ACQUIRED:
            self._log.event("leadership:acquired", epoch=record.epoch)
        elif news is LeadershipChange.NEW_LEADER:
            self._log.event("leadership:changed", leader=record.leader, epoch=record.epoch, role="standby")
        self._set_state(state)

    def _set_state(self, state: LeadershipState) -> None:
        changed, self._state = state.epoch != self._state.epoch, state
        if changed:
            self._changed.set()
            self._changed = trio.Event()


class LocalLeadership:
    """What stands for the leadership while the broker that knows the leader cannot be reached.

    This Controller leads members that end with it, for no other one can adopt them; and it leads nothing otherwise.

    Args:
        may_act: Whether the members end with this process.
    """

    def __init__(self, *, may_act: bool) -> None:
        self.is_leader = may_act
        self.has_valid_lease = may_act
        self.status_line = _LOCAL if may_act else _NOT_LOCAL

    def get_epoch_environment(self) -> Mapping[str, str]:
        """Return nothing: no epoch is known."""
        return {}

    async def wait_changed(self) -> None:
        """Wait for ever."""
        await trio.sleep_forever()

    async def resign(self) -> None:
        """Do nothing: nobody knows that it leads."""


_LOCAL = (
    "the default broker cannot be reached: until it answers, this Controller supervises its own members, even if "
    "another one leads"
)
_NOT_LOCAL = "the default broker cannot be reached: until it answers, this Controller starts and ends nothing"
_UNSURE = "it cannot tell whether it still leads: it does nothing"
_UNHEARD = "while it cannot tell whether it leads it starts and ends nothing; what it has started goes on"
_RESIGNED = "leads no more, and ends: another Controller takes over, if one stands by"
_NOBODY = "stands by: nobody leads yet; whoever is first takes over within seconds"
_LOST = "it was silent for too long, and another one leads: what it has started is ended in order"
