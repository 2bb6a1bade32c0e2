"""A connection for blocking reads, on which one read at a time waits at the server.

An abandoned blocking read can lose messages: the server has delivered them to a connection that nobody reads. So a read
that was sent is never abandoned. Cancellation asks the server over another connection to end the wait (CLIENT
UNBLOCK), and then waits for the reply. If messages have come first, the caller gets them.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import trio
from trio.lowlevel import Abort, checkpoint_if_cancelled, current_task, wait_task_rescheduled

from celery5.broker.call import Call
from celery5.broker.connection.exchange import ReplyError, pack_command, read_reply
from celery5.broker.connection.link import Link, LinkEvent, SingleConnection, ignore_event
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.connection.transport import Connect, connect
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.refused_calls import RefusedCalls
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_reply
from celery5.errors import BrokerError, BrokerReadOnly

T = TypeVar("T")

# Seconds between two requests to unblock: the first can come before the server has begun to block.
UNBLOCK_INTERVAL = 0.005
# Seconds that one such request may take.
UNBLOCK_TIMEOUT = 1.0


class ParkedRedis(SingleConnection):
    """One connection for blocking reads (XREADGROUP BLOCK and its like), one at a time.

    `control` is the connection for CLIENT UNBLOCK. `on_connected` is called after each handshake, before any read:
    what was delivered to a lost connection is in this consumer's pending list. The other arguments are those of
    `TrioRedis`.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        control: TrioRedis,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5-park",
        watch: Callable[[LinkEvent], None] = ignore_event,
        on_connected: Callable[[], None] = lambda: None,
        connect: Connect = connect,
    ) -> None:
        link = Link(
            endpoint=endpoint,
            timing=timing,
            name=name,
            watch=watch,
            on_connected=on_connected,
            connect=connect,
        )
        super().__init__(link)
        self._control = control
        self._turn = trio.Lock()
        self._refused = RefusedCalls(self._where, link.report)
        self._leaving: PendingRequest | None = None
        self._unblock_requested = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled; as `TrioRedis.run`."""
        try:
            await self._run_beside(self._release, task_status)
        finally:
            self._refused.end()

    async def perform(self, call: Call[T], on_reply: Callable[[T], None] | None = None) -> T:
        """Perform one call, blocking or not, and return its decoded reply; others wait for their turn.

        `on_reply` is called with a reply that is not empty in the step in which it comes: a turn of the loop before the
        caller continues, and whatever happens to the caller.

        The reply must come `call.blocks` seconds plus `timing.reply` after sending. If the call is cancelled before
        sending, it never runs. If it is cancelled later, the server is asked to end the wait: a reply that is not empty
        is returned all the same, and the cancellation is raised at the caller's next checkpoint; an empty one raises
        Cancelled here.
        """
        await checkpoint_if_cancelled()
        decoded: list[T] = []

        def on_raw_reply(raw: Any) -> None:
            if type(raw) is not ReplyError and not _is_empty(raw):
                try:
                    decoded.append(call.decode(raw))
                except Exception:
                    return  # the caller decodes it again and raises: an error here would end the connection
                if on_reply is not None:
                    on_reply(decoded[0])

        async with self._turn:
            request = await self._read(call, pack_command(call.words), on_raw_reply)
            if (
                type(request.reply) is ReplyError
                and str(request.reply).startswith("NOSCRIPT")
                and call.script
            ):
                request = await self._read(call, pack_command(call.with_script_text), on_raw_reply)
        if request.error is not None or type(request.reply) is ReplyError or _is_empty(request.reply):
            await checkpoint_if_cancelled()
        if request.error is not None:
            raise request.error
        if type(request.reply) is ReplyError:
            raise self._handle_error_reply(call, request.reply)
        if self._refused.kinds:
            self._refused.record_accepted(call)
        return decoded[0] if decoded else read_reply(call, request.reply, where=self._where)

    def _handle_error_reply(self, call: Call[Any], reply: ReplyError) -> BrokerError:
        error = translate_reply(str(reply), where=self._where, script=call.script)
        self._refused.record_refused(call, error)
        if isinstance(error, BrokerReadOnly):
            self._link.reconnect(str(error))
        return error

    async def _read(
        self, call: Call[Any], data: bytes, on_raw_reply: Callable[[Any], None]
    ) -> PendingRequest:
        link = self._link
        if not link.is_accepting:
            await link.wait_until_accepting()
        request = PendingRequest(data, link.deadline(call.blocks), call.repeatable)
        request.on_reply = on_raw_reply

        def leave(_raise_cancel: object) -> Abort:
            if not request.sent:
                request.task = None
                link.pipeline.withdraw(request)
                return Abort.SUCCEEDED
            request.repeatable = False
            if call.blocks:
                self._leaving = request
                self._unblock_requested.set()
            return Abort.FAILED

        link.pipeline.submit(request)
        request.task = current_task()
        await wait_task_rescheduled(leave)
        return request

    async def _release(self) -> None:
        """Ask the server to end the wait of a read whose caller was cancelled, until it is over."""
        while True:
            await self._unblock_requested.wait()
            self._unblock_requested = trio.Event()
            request = self._leaving
            while request is not None and request.task is not None and self._link.greeting is not None:
                unblock: Call[int] = Call(
                    ("CLIENT", "UNBLOCK", self._link.greeting.client_id), int, repeatable=True
                )
                # Without the control connection the read ends by itself, when its time at the server is over.
                with suppress(BrokerError), trio.move_on_after(UNBLOCK_TIMEOUT):
                    await self._control.perform(unblock)
                await trio.sleep(UNBLOCK_INTERVAL)


def _is_empty(raw: object) -> bool:
    return raw is None or raw == [] or raw == {}
