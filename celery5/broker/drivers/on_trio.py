"""The Trio driver: one connection to the broker, shared by all tasks of a Trio program."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.connection.exchange import (
    ReplyError,
    any_succeeded,
    is_script_missing,
    pack_command,
    pack_commands,
    read_reply,
)
from celery5.broker.connection.link import (
    Link,
    LinkEvent,
    SingleConnection,
    ignore_event,
)
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.connection.transport import Connect, connect
from celery5.broker.drivers.refused_calls import RefusedCalls
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import (
    ASK_MEMORY,
    describe_memory_refusal,
    is_memory_refusal,
    translate_reply,
    unreadable_reply,
)
from celery5.errors import BrokerError, BrokerReadOnly

T = TypeVar("T")

# These would block a shared connection, or change its state.
_REFUSED: Final = {
    *(
        "BLPOP",
        "BRPOP",
        "BLMOVE",
        "BRPOPLPUSH",
        "BLMPOP",
        "BZPOPMIN",
        "BZPOPMAX",
        "BZMPOP",
        "WAIT",
        "WAITAOF",
    ),
    *("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "MONITOR", "SYNC", "PSYNC"),
    *("WATCH", "QUIT", "RESET", "HELLO", "AUTH", "SELECT"),
}
_REFUSED_SUBCOMMANDS: Final = {"REPLY", "TRACKING"}


class TrioRedis(SingleConnection):
    """One connection on which all tasks of a process perform their calls at the same time.

    It works while `run` runs.

    Args:
        endpoint: The broker.
        timing: All time limits.
        name: How the server lists this connection.
        watch: Called with each LinkEvent.
        connect: Opens the transport; tests pass memory streams.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5",
        watch: Callable[[LinkEvent], None] = ignore_event,
        connect: Connect = connect,
    ) -> None:
        link = Link(endpoint=endpoint, timing=timing, name=name, watch=watch, connect=connect)
        super().__init__(link)
        self.endpoint: Endpoint = endpoint
        self._reply_within = timing.reply
        # Commands that were checked and are harmless: most calls only cost a look-up in this set.
        self._allowed: set[Any] = set()
        self._refused = RefusedCalls(self._where, link.report)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled: see SingleConnection."""
        try:
            await super().run(task_status=task_status)
        finally:
            self._refused.end()

    async def perform(self, call: Call[T]) -> T:
        """Perform one call and return its decoded reply.

        If it is cancelled before it was sent, it never runs; if later, it may have run and its reply is
        dropped. Raises BrokerUnavailable (`maybe_done` if the connection was lost after sending),
        CircuitOpen, BrokerLoading, BrokerReadOnly, BrokerDenied, BrokerReplied.
        """
        request = self._make_request(call)
        await self._link.perform(request)
        return await self._decoded(call, request)

    def begin(self, call: Call[Any]) -> PendingRequest | None:
        """Send a call at once if nothing else is under way, for `finish`, which must be awaited soon.

        Returns None if nothing was sent.
        """
        request = self._make_request(call)
        return request if self._link.begin(request) else None

    async def finish(self, call: Call[T], request: PendingRequest) -> T:
        """Return the decoded reply to a call that was begun. Raises as `perform`."""
        await self._link.finish(request)
        return await self._decoded(call, request)

    async def _decoded(self, call: Call[T], request: PendingRequest) -> T:
        reply = request.reply
        if type(reply) is ReplyError:
            try:
                reply = await self._handle_error_reply(call, reply, maybe_done=request.sent_before)
            except BrokerError as error:
                raise await self._describe(error) from None
        if self._refused.kinds:
            self._refused.record_accepted(call)
        try:  # inline, not by read_reply: the hot path
            return call.decode(reply)
        except Exception as error:
            raise unreadable_reply(call, error, where=self._where) from error

    def _make_request(self, call: Call[Any]) -> PendingRequest:
        if call.words[0] not in self._allowed or call.blocks:
            self._check(call)
        return PendingRequest(
            pack_command(call.words), trio.current_time() + self._reply_within, call.repeatable
        )

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls in one write, adjacent on the wire, and return their decoded replies in order.

        All of them run even if one fails; the first error is raised when all replies have come. After a lost
        connection they are sent again only if every one of them is repeatable.
        """
        if not calls:
            return []
        replies, failure = await self._exchange(calls)
        if failure is not None:
            raise failure
        return [
            read_reply(call, reply, where=self._where) for call, reply in zip(calls, replies, strict=True)
        ]

    async def perform_each(self, calls: Sequence[Call[T]]) -> list[T | BrokerError]:
        """Perform several calls in one write; return the decoded reply of each, or its error."""
        replies, _ = await self._exchange(calls)
        decoded: list[T | BrokerError] = []
        for call, reply in zip(calls, replies, strict=True):
            try:
                decoded.append(
                    reply if isinstance(reply, BrokerError) else read_reply(call, reply, where=self._where)
                )
            except BrokerError as error:
                decoded.append(error)
        return decoded

    async def _exchange(self, calls: Sequence[Call[Any]]) -> tuple[list[Any], BrokerError | None]:
        """Send calls in one write. Return the raw replies, each error in its place, and the first error."""
        for call in calls:
            if call.words[0] not in self._allowed or call.blocks:
                self._check(call, alone=False)
        repeatable = all(call.repeatable for call in calls)
        data = pack_commands([call.words for call in calls])
        request = PendingRequest(data, self._link.deadline(), repeatable, len(calls))
        await self._link.perform(request)
        replies = [request.reply] if request.replies is None else request.replies
        failure: BrokerError | None = None
        for index, reply in enumerate(replies):
            if type(reply) is ReplyError:
                maybe_done = request.sent_before or any_succeeded(replies)
                try:
                    replies[index] = await self._handle_error_reply(
                        calls[index], reply, maybe_done=maybe_done
                    )
                except BrokerError as error:
                    replies[index] = error
                    failure = failure or error
            elif self._refused.kinds:
                self._refused.record_accepted(calls[index])
        return replies, None if failure is None else await self._describe(failure)

    async def _handle_error_reply(self, call: Call[Any], first: ReplyError, *, maybe_done: bool) -> Any:
        """Handle an error reply: send a script that the server did not know, or raise the error.

        With `maybe_done` an earlier attempt may have run: the error then has `maybe_done`.
        """
        reply: Any = first
        try:
            if is_script_missing(call, first):
                # It did not run, so this does not repeat it.
                request = PendingRequest(
                    pack_command(call.with_script_text), self._link.deadline(), call.repeatable
                )
                await self._link.perform(request)
                reply = request.reply
                if type(reply) is not ReplyError:
                    return reply
                maybe_done = maybe_done or request.sent_before
            error = translate_reply(str(reply), where=self._where, script=call.script)
            if isinstance(error, BrokerReadOnly):
                self._link.reconnect(str(error))
            self._refused.record_refused(call, error)
            raise error
        except BrokerError as failure:
            if maybe_done:
                failure.mark_maybe_done()
            raise

    async def _describe(self, error: BrokerError) -> BrokerError:
        """Return an error; that of a server that is full with how full it is."""
        if not is_memory_refusal(error):
            return error
        request = PendingRequest(pack_command(ASK_MEMORY), self._link.deadline(), repeatable=True)
        try:
            await self._link.perform(request)
        except BrokerError:  # the connection is lost by now
            described = error
        else:
            described = describe_memory_refusal(error, request.reply)
        self._refused.record_full(described)
        return described

    def _check(self, call: Call[Any], *, alone: bool = True) -> None:
        word = call.words[0]
        command = (word.decode() if isinstance(word, bytes) else str(word)).upper()
        if command in _REFUSED or call.blocks or (command in {"MULTI", "EXEC"} and alone):
            raise ValueError(
                f"{command} cannot share a connection: perform it on a ParkedRedis or, for MULTI, with perform_all"
            )
        if command == "CLIENT":
            if str(call.words[1]).upper() in _REFUSED_SUBCOMMANDS:
                raise ValueError(f"CLIENT {call.words[1]!r} would change the connection for everybody")
        elif command not in {"MULTI", "EXEC"}:
            self._allowed.add(word)
