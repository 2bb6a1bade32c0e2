"""Declare in Redis which events the tasks of this worker are subscribed to, and keep the declaration current.

Routers make jobs for every subscription in the registry, whether a worker runs or not. A subscription that no worker
declares any more expires. A worker without subscriptions does nothing here.
"""

from collections.abc import Mapping, Sequence

import trio

from celery5.broker.calls import events as trips
from celery5.broker.calls import queues
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.logs.log import Log
from celery5.protocol.events.messages import Subscription, encode
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog, retry_until_available

MAX_DECLARE_INTERVAL = 60.0
"""The most seconds between two declarations: after that the registry is complete again if Redis lost it."""
CATCH_UP_BATCH = 200
"""Kept events that are sent again in one trip."""


class Subscriptions:
    """Declares the subscriptions of one worker's tasks, by the application whose events those are.

    It does so on the default broker, where Routers look.
    """

    def __init__(
        self,
        *,
        default_redis: AsyncDriver,
        subscribed: Mapping[str, Sequence[Subscription]],
        subscription_ttl: float,
        event_catch_up: bool,
        log: Log,
    ) -> None:
        self._redis = default_redis
        self._subscribed = subscribed
        self._ttl = subscription_ttl
        self._catch_up = CATCH_UP_BATCH if event_catch_up else 0
        self._log = log
        self._outages = OutageLog(log, "subscription:declare-failed")
        self._unsubscribed: dict[str, tuple[str, ...]] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Declare them, and again before they expire, until cancelled."""
        if not self._subscribed:
            task_status.started()
            await trio.sleep_forever()
        await self._warn_of_unknown_apps()
        await self.declare()
        task_status.started()
        while True:
            await trio.sleep(min(self._ttl / 3, MAX_DECLARE_INTERVAL))
            await retry_until_available(
                self.declare, self._outages, min(self._ttl / 3, RETRY_INTERVAL), even_refused=True
            )

    async def declare(self) -> None:
        """Declare all of them once; new ones get the events that were kept."""
        for app, subscriptions in self._subscribed.items():
            entries = [(subscription.name, encode(subscription)) for subscription in subscriptions]
            has_more, unsubscribed = True, self._unsubscribed.get(app, ())
            while has_more:
                # Events that only removed subscriptions want would be kept again, and sent again.
                wanted = [
                    subscription.subjects
                    for subscription in subscriptions
                    if subscription.name not in unsubscribed
                ]
                subjects = sorted({subject for of_one in wanted for subject in of_one})
                call = trips.declare_subscriptions(
                    Keys(app), entries, subjects, ttl=self._ttl, catch_up=self._catch_up
                )
                reply = await self._redis.perform(call)
                unsubscribed = reply.unsubscribed
                self._note_unsubscribed(app, unsubscribed)
                has_more = self._catch_up > 0 and reply.sent == self._catch_up
                if reply.changed or reply.sent:
                    self._log.event(
                        "subscription:declared", of=app, changed=reply.changed, caught_up=reply.sent
                    )

    def _note_unsubscribed(self, app: str, names: tuple[str, ...]) -> None:
        """Remember the subscriptions that an operator has removed, and log each once."""
        new = [name.replace("\n", " ") for name in names if name not in self._unsubscribed.get(app, ())]
        self._unsubscribed[app] = names
        if new:
            self._log.event("events:unsubscribed", "warning", of=app, subscriptions=new, hint=_UNSUBSCRIBED)

    async def _warn_of_unknown_apps(self) -> None:
        """Warn of applications that have nothing in Redis yet: their names may be misspelt."""
        for app, subscriptions in self._subscribed.items():
            if app in {subscription.job.app for subscription in subscriptions}:
                continue
            is_known = await self._redis.perform(trips.is_app_known(Keys(app)))
            if not is_known and not await self._redis.perform(queues.list_queues(Keys(app))):
                events = sorted({subscription.event for subscription in subscriptions})
                self._log.event(
                    "events:application-not-found", "warning", of=app, events=events, hint=_UNKNOWN
                )


_UNKNOWN = "no application of this name has queues or events in Redis: it is new, or of=... is misspelt"
_UNSUBSCRIBED = (
    "celery5 event unsubscribe took these back: they get no events, until celery5 event resubscribe"
)
