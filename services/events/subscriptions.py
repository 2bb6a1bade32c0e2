"""Declare in Redis which events the tasks of this worker are subscribed to, and keep the declaration current.

Routers make jobs for every subscription in the registry, whether a worker runs or not. A subscription that no worker
declares any more expires. A worker without subscriptions does nothing here.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import trio

from celery5.broker.calls import events as trips
from celery5.broker.calls import queues
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.logs.log import Log
from celery5.protocol.events.messages import Subscription, encode
from celery5.services.process.broker_outages import OutageLog, retry_until_available

OFTEN = 60.0
"""Seconds between two declarations at most: after that long the registry is whole again, should Redis lose it."""
RETRY_DELAY = 1.0
"""Seconds until another attempt, while Redis is unreachable."""
PORTION = 200
"""Kept events that are sent again in one trip."""

T = TypeVar("T")


class Subscriptions:
    """The subscriptions of one worker's tasks, by the application whose events those are."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        subscribed: Mapping[str, Sequence[Subscription]],
        subscription_ttl: float,
        event_catch_up: bool,
        log: Log,
    ) -> None:
        self._redis = redis
        self._subscribed = subscribed
        self._lasts = subscription_ttl
        self._room = PORTION if event_catch_up else 0
        self._log = log
        self._outages = OutageLog(log, "subscription:declare-failed")
        self._back: dict[str, tuple[str, ...]] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Declare them, and again before their time is over, until cancelled."""
        if not self._subscribed:
            task_status.started()
            await trio.sleep_forever()
        await self._look()
        await self.declare()
        task_status.started()
        while True:
            await trio.sleep(min(self._lasts / 3, OFTEN))
            await retry_until_available(
                self.declare, self._outages, min(self._lasts / 3, RETRY_DELAY), even_refused=True
            )

    async def declare(self) -> None:
        """Declare all of them once; those that are new get the events that were kept."""
        for app, subscriptions in self._subscribed.items():
            named = [(each.name, encode(each)) for each in subscriptions]
            more, back = True, self._back.get(app, ())
            while more:
                wanted = [each for each in subscriptions if each.name not in back]
                subjects = sorted({subject for each in wanted for subject in each.subjects})
                told = await self._redis.perform(
                    trips.declare_subscriptions(
                        Keys(app), named, subjects, ttl=self._lasts, catch_up=self._room
                    )
                )
                self._learn(app, told.unsubscribed)
                # What is only wanted by those that were taken back would be kept again, and sent again.
                more = self._room > 0 and told.sent == self._room
                back = told.unsubscribed
                if told.changed or told.sent:
                    self._log.event(
                        "subscription:declared", of=app, changed=told.changed, caught_up=told.sent
                    )

    def _learn(self, app: str, back: tuple[str, ...]) -> None:
        """Remember what was taken back, and tell once of each."""
        new = [name.replace("\n", " ") for name in back if name not in self._back.get(app, ())]
        self._back[app] = back
        if new:
            self._log.event("events:unsubscribed", "warning", of=app, subscriptions=new, hint=_BACK)

    async def _look(self) -> None:
        """Warn of applications that nobody has seen yet: their names may be misspelt."""
        for app, subscriptions in self._subscribed.items():
            if app in {each.job.app for each in subscriptions}:
                continue
            known = await self._redis.perform(trips.is_app_known(Keys(app)))
            if not known and not await self._redis.perform(queues.list_queues(Keys(app))):
                events = sorted({each.event for each in subscriptions})
                self._log.event(
                    "events:application-not-found", "warning", of=app, events=events, hint=_UNKNOWN
                )


_UNKNOWN = "no application of this name has queues or events in Redis: it is new, or of=... is misspelt"
_BACK = "celery5 event unsubscribe took these back: they get no events, until celery5 event resubscribe"
