"""A Data Source that takes what Celery's producers send, and publishes it as jobs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from celery5.app import App
from celery5.contrib.celery.messages import CeleryMessage, MessageRules, Untranslatable, make_job
from celery5.contrib.celery.receivers import Received, Receiver, make_celery, open_receiver
from celery5.errors import BadArguments, MessageTooLarge, Misconfigured
from celery5.events.sources import REMEMBER, Emit, source
from celery5.protocol.events.documents import SourceDocument
from celery5.protocol.job.job import Job, parse_queue_names
from celery5.protocol.masking import MAX_ERROR_LENGTH, get_error_text
from celery5.runners.context import LOG_EVENT

STOP_LIMIT = 5.0
"""Seconds that closing the connection to Celery's broker may take."""
T = TypeVar("T")


class CeleryBridge:
    """Takes the messages of Celery's queues in Routers, and publishes them as jobs with the same ids.

    A message is acknowledged when its job is published, so it may be published again after a crash, which makes no
    second job. What cannot be translated becomes a dead letter of the task `NAME.refused`, which translates it when it
    is replayed; or goes to `refused_queue`.

    Args:
        app: The application whose tasks the messages name.
        celery: The application of Celery, whose settings say how its broker is reached; or the URL of that broker.
        queues: The queues of Celery to take all messages of. No worker of Celery's may read them any more.
        name: The name of the source.
        remember: The seconds for which an id is known.
        refused_queue: The queue of Celery for what cannot be translated: a worker of Celery's may read it.

    Raises:
        Misconfigured: Celery is not installed, or an argument makes no sense.
    """

    def __init__(
        self,
        app: App,
        celery: Any,
        *,
        queues: Sequence[str] = ("celery",),
        name: str = "celery-bridge",
        remember: float = REMEMBER,
        refused_queue: str = "",
    ) -> None:
        if isinstance(queues, str) or not queues or refused_queue in queues:
            raise Misconfigured(
                f"queues is {queues!r}; give a list of queues of Celery, without refused_queue"
            )
        self.name = name
        self._app = app
        self._celery = make_celery(celery, "broker")
        self._queues = [parse_queue_names(queue, "queues")[0] for queue in queues]
        self._refused_queue = refused_queue
        self._rules = MessageRules(self._celery.timezone, is_zero_first=True, remember=remember)
        self._limiter: trio.CapacityLimiter | None = None
        self.source = source(self, name=name, remember=remember, loop="trio")

        @app.task(name=f"{name}.refused", source=self.source, max_retries=0)
        def receive_refused(document: SourceDocument) -> str:
            """Send the job of a message that could not be translated when it came. Raises Untranslatable."""
            return app.send_jobs([self._read_document(document)])[0].id

        self.refused = receive_refused

    def _read_document(self, document: SourceDocument) -> Job:
        message = msgspec.json.decode(document.body, type=CeleryMessage)
        is_zero_first = document.attributes.get("zero_first") == "yes"
        return make_job(self._app, message, msgspec.structs.replace(self._rules, is_zero_first=is_zero_first))

    async def run(self, emit: Emit) -> None:
        """Take messages until cancelled."""
        self._limiter = trio.CapacityLimiter(1)  # a connection of kombu is for one thread at a time
        receiver = await self._in_thread(partial(open_receiver, self._celery, self._queues, self.name))
        try:
            while True:
                received = await self._in_thread(receiver.receive)
                if received:
                    await self._pass_on(receiver, received, emit)
        finally:
            with trio.move_on_after(STOP_LIMIT, shield=True):
                await self._in_thread(receiver.close)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._limiter)

    async def _pass_on(self, receiver: Receiver, received: Sequence[Received], emit: Emit) -> None:
        """Publish messages as jobs, then acknowledge them."""
        rules = msgspec.structs.replace(self._rules, is_zero_first=receiver.is_zero_first)
        jobs: list[Job] = []
        done: list[Received] = []
        for incoming in received:
            try:
                jobs.append(make_job(self._app, incoming.message, rules))
                done.append(incoming)
            except Untranslatable as error:
                if await self._refuse(receiver, incoming, str(error), emit):
                    done.append(incoming)
        if jobs:
            await self._app.asend_jobs(jobs)
            LOG_EVENT.get()("bridge:messages-sent", "debug", source=self.name, count=len(jobs))
        await self._in_thread(partial(receiver.acknowledge, done))

    async def _refuse(self, receiver: Receiver, received: Received, why: str, emit: Emit) -> bool:
        """Keep a message of which no job can be made; return whether it is still to be acknowledged."""
        message, queue = received.message, self._refused_queue
        if not queue:
            try:
                await emit(
                    msgspec.json.encode(message),
                    id=message.id,
                    attributes={"task": message.task, "zero_first": "yes" if receiver.is_zero_first else ""},
                )
            except (BadArguments, MessageTooLarge, TypeError, ValueError) as error:
                queue = f"{self.name}.refused"
                why = f"{why}; {get_error_text(error, MAX_ERROR_LENGTH)}"
        if queue:
            await self._in_thread(partial(receiver.put_aside, received, queue))
        LOG_EVENT.get()(
            "bridge:message-refused",
            "warning",
            source=self.name,
            job=message.id,
            task=message.task,
            why=why,
            kept_in=f"Celery's queue {queue}" if queue else f"the dead letters of {self.refused.queue}",
        )
        return not queue
