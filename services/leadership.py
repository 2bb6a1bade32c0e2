"""Leadership: whether this Controller is the one that acts, while any number of them run for one application.

Floor: services. Reads: who leads. Writes: that this one does.

`sure` is the question before each act: it is answered by this process' own clock, without a trip. A leader that
hears nothing from Redis so stops acting before another one may begin; one that was frozen finds out when it goes on,
before it does anything else. What it had begun to start by then is refused where it starts, by its epoch
(`processes/fence.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import trio

from celery5.broker import leading
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.log import Log
from celery5.protocol.leadership import EPOCH, LOOK, News, Record, Standing
from celery5.protocol.metrics import Family, gauge
from celery5.services.lease import now as clock
from celery5.services.passing import passes

TRIP_LIMIT = 1.0
"""Seconds that one trip may take; then it is made again."""
LEAVE_LIMIT = 2.0
"""Seconds that giving up the lead may take at the end; else the others wait until the lease has lapsed."""


class Performs(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[Record], /) -> Record: ...


class Leadership:
    """The standing of one Controller, `worker` by name. `now` is its clock, whose seconds go on during a suspend."""

    def __init__(
        self, *, redis: Performs, keys: Keys, worker: str, log: Log, now: Callable[[], float] = clock
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._log = log
        self._now = now
        self._standing = Standing(name=worker)
        self._followers: list[Callable[[], object]] = []
        self._told = ""
        self._resigned = False

    @property
    def epoch(self) -> int:
        """The epoch that it leads in, surely or not; 0 when it stands by."""
        return self._standing.epoch

    @property
    def record(self) -> Record:
        """Who leads, as far as is known here."""
        return self._standing.seen or Record()

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as it knows: surely or not."""
        return self._standing.epoch != 0

    @property
    def sure(self) -> bool:
        """Whether it may act, at this moment. Ask before each act."""
        return self._standing.sure(self._now())

    @property
    def line(self) -> str:
        """Where it stands, for people; '' when it leads."""
        if self.leads:
            return "" if self.sure else _UNSURE
        if self._resigned:
            return _RESIGNED
        return f"stands by: {self.record.leader} leads" if self.record.leader else _NOBODY

    def stamp(self) -> Mapping[str, str]:
        """What a process is given that is started now."""
        return {EPOCH: str(self._standing.epoch)}

    def follow(self, tell: Callable[[], object]) -> None:
        """Have `tell` called when it begins to lead, or does so no more."""
        self._followers.append(tell)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lead or stand by until cancelled; then others may lead at once."""
        self._resigned = False
        try:
            await self.look()
            task_status.started()
            while not self._resigned:
                await trio.sleep(self._standing.pause(self._now()) if self._told == "" else LOOK)
                await self._look_safely()
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(LEAVE_LIMIT, shield=True):
                await self.resign()

    async def look(self) -> None:
        """One trip: keep the lead, or try to have it. Raises BrokerUnavailable, and so when no answer comes."""
        if self._resigned:
            return
        asked, standing = self._now(), self._standing
        call = leading.lead(
            self._keys, standing.name, replaces=standing.replaces(asked), epoch=standing.epoch
        )
        with trio.move_on_after(TRIP_LIMIT):
            self._heard(await self._redis.perform(call), asked)
            return
        raise BrokerUnavailable(f"no answer within {TRIP_LIMIT:g} s")

    async def resign(self) -> None:
        """Lead no more: another one may at once. This one does not try again before it is run again."""
        epoch, self._resigned = self._standing.epoch, True
        self._stand(Standing(name=self._standing.name))
        if not epoch:
            return
        try:
            await self._redis.perform(leading.resign(self._keys, self._standing.name, epoch=epoch))
        except BrokerError as error:
            self._log.event("leadership:kept", "debug", why=str(error))
        else:
            self._log.event("leadership:resigned", epoch=epoch)

    def conditions(self) -> Mapping[str, str]:
        """Whether it leads or stands by, it is ready, as long as it knows which."""
        return {"leadership": _UNSURE if self.leads and not self.sure else ""}

    def families(self) -> Iterable[Family]:
        """Whether it leads, as numbers."""
        yield gauge("celery5_controller_leads", "1 while this Controller acts.", self.sure)
        yield gauge(
            "celery5_controller_epoch", "The epoch of the leader, as far as is known.", self.record.epoch
        )

    async def _look_safely(self) -> None:
        """Look; Redis that is away, or says what passes, is told of once."""
        try:
            await self.look()
        except (BrokerUnavailable, BrokerReplied) as error:
            if not passes(error):
                raise
            if self._told != str(error):
                self._told = str(error)
                self._log.event("leadership:unheard", "warning", why=self._told, hint=_UNHEARD)
        else:
            self._told = ""

    def _heard(self, record: Record, asked: float) -> None:
        if self._resigned:  # an answer that was under way
            return
        led = self._standing.epoch
        standing, news = self._standing.heard(record, asked=asked, now=self._now())
        if news is News.LOST or (led and news is News.LEADS):
            self._log.event("leadership:lost", "error", epoch=led, leader=record.leader, hint=_LOST)
        if news is News.LEADS:
            self._log.event("leadership:leads", epoch=record.epoch)
        elif news is News.ANOTHER:
            self._log.event("leadership:stands-by", leader=record.leader, epoch=record.epoch)
        self._stand(standing)

    def _stand(self, standing: Standing) -> None:
        changed, self._standing = standing.epoch != self._standing.epoch, standing
        for tell in self._followers if changed else ():
            tell()


_UNSURE = "it cannot tell whether it still leads: it does nothing"
_UNHEARD = "while it cannot tell whether it leads it starts and ends nothing; what it has started goes on"
_RESIGNED = "leads no more, and ends: another Controller takes over, if one stands by"
_NOBODY = "stands by: nobody leads yet; whoever is first takes over within seconds"
_LOST = "it was silent for too long, and another one leads: what it has started is ended in order"
