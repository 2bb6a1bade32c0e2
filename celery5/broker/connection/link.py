"""Link: one connection to the broker that comes back by itself.

The supervisor connects, shakes hands, lets the pipeline work, and when the connection ends starts again: with
backoff and jitter, behind a circuit breaker whose probe is the supervisor's own attempt. The warden is the
only one that looks at the clock: it fails what waited too long to be sent, ends a connection that owes an
answer for too long, and pings a silent one.

What a lost connection means for a call is decided in one place, `Pipeline.cut`: nothing is ever sent twice
unless the call says that it may be.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from celery5.broker.connection.exchange import (
    NEED_DATA,
    ProtocolError,
    PushNotification,
    ReplyParser,
    pack_command,
    pack_commands,
)
from celery5.broker.connection.handshake import Resp, ServerHello, build_hello, parse_server_hello
from celery5.broker.connection.pipeline import PendingRequest, Pipeline
from celery5.broker.connection.transport import Connect, Transport, connect
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError, BrokerUnavailable, CircuitOpen
from celery5.protocol.health.breaker import Breaker, BreakerPolicy, BreakerState
from celery5.protocol.job.retry_policy import full_jitter


@dataclass(frozen=True, slots=True)
class LinkConnected:
    """The handshake succeeded. `client_id` is the server's handle for this connection."""

    link: str
    where: str
    server: str
    version: str
    client_id: int


@dataclass(frozen=True, slots=True)
class LinkConnectFailed:
    """An attempt to connect failed; the next one comes after `pause` seconds."""

    link: str
    where: str
    reason: str
    pause: float


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A working connection ended.

    `failed` calls may or may not have run, `kept` calls wait for the next connection.
    """

    link: str
    where: str
    reason: str
    failed: int
    requeued: int


@dataclass(frozen=True, slots=True)
class BreakerOpened:
    """Too many failures in a row: calls are refused at once. A probe is sent after `probe_in` seconds. `is_error`: it
    has opened too often."""

    link: str
    where: str
    reason: str
    probe_in: float
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class BreakerClosed:
    """The probe succeeded: calls flow again."""

    link: str
    where: str


LinkEvent = LinkConnected | LinkConnectFailed | LinkLost | BreakerOpened | BreakerClosed


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Counters of one link: commands sent, writes they took, successful handshakes, and what is under way now."""

    commands: int
    batches: int
    connects: int
    unsent: int
    inflight: int


def ignore_event(_event: LinkEvent) -> None:
    """Watch nothing."""


# What a transport and the parser raise when a connection is over.
CONNECTION_ERRORS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError)

# A connection that did not live this long, in seconds, does not reset the backoff.
MIN_STABLE_TIME = 1.0

_PING = pack_command(("PING",))


class Link:
    """Supervisor of one connection.

    `on_connected` is called after each successful handshake, before any call is sent; `on_push` with each pushed
    frame.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        timing: Timing,
        name: str,
        watch: Callable[[LinkEvent], None] = ignore_event,
        resp: Resp = 2,
        on_connected: Callable[[], None] = lambda: None,
        on_push: Callable[[list[Any]], None] = lambda _frame: None,
        connect: Connect = connect,
    ) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self.name = name
        self.where = endpoint.masked_url
        self.pipeline = Pipeline(where=self.where, max_unsent_bytes=timing.max_unsent_bytes, push=on_push)
        self.breaker = Breaker(
            policy=BreakerPolicy(
                threshold=timing.breaker_failures,
                reset=timing.breaker_reset,
                longest=max(timing.breaker_reset, timing.backoff_cap),
            )
        )
        self.connected = False
        self.connects = 0
        self.connected_since: float | None = None
        self.greeting: ServerHello | None = None
        self._watch = watch
        self._resp: Resp = resp
        self._on_up = on_connected
        self._connect = connect
        self._opened = trio.Event()
        self._ended = False
        self._fatal: BrokerError | None = None
        self._scope: trio.CancelScope | None = None
        self._outer: trio.CancelScope | None = None
        self._reason = ""
        self._last_failure = ""
        # Set while the pipeline takes calls: checked once per call.
        self.is_accepting = False

    # ---- what callers use

    async def wait_until_accepting(self) -> None:
        """Return when calls may be queued.

        Raises CircuitOpen, or BrokerUnavailable when the link is not running.
        """
        if not self._opened.is_set() and not self._ended:
            with trio.move_on_after(self.timing.reply):
                await self._opened.wait()
        if self._ended:
            raise BrokerUnavailable(
                f"the link {self.name!r} to broker {self.where} is closed; nothing was sent"
            )
        if not self._opened.is_set():
            raise BrokerUnavailable(
                f"the link {self.name!r} to broker {self.where} is not running: start its run"
            )
        if self.breaker.state is not BreakerState.CLOSED:
            raise self._circuit_open(maybe_done=False)

    async def perform(self, ticket: PendingRequest) -> None:
        """Queue a ticket and wait until it is done. Raises the ticket's error."""
        if not self.is_accepting:
            await self.wait_until_accepting()
        pipeline = self.pipeline
        if pipeline.sends_at_once:
            # A task that is cancelled already must not send anything.
            await trio.lowlevel.checkpoint_if_cancelled()
        pipeline.submit(ticket)
        await pipeline.wait(ticket)
        if ticket.error is not None:
            raise ticket.error

    def begin(self, ticket: PendingRequest) -> bool:
        """Send a ticket at once, if nothing else is under way, for somebody who will `finish` it."""
        ticket.awaited = (
            self.is_accepting and self.pipeline.sends_at_once and self.pipeline.send_alone(ticket)
        )
        return ticket.awaited

    async def finish(self, ticket: PendingRequest) -> None:
        """Wait until a ticket that was begun is done. Raises the ticket's error."""
        if not ticket.is_done:
            await self.pipeline.wait(ticket)
        if ticket.error is not None:
            raise ticket.error

    def deadline(self, extra: float = 0.0) -> float:
        """When a call made now must have its reply; `extra` seconds of the server's time are allowed for."""
        return trio.current_time() + self.timing.reply + extra

    def reconnect(self, reason: str) -> None:
        """End this connection; a new one follows.

        `reason` is the whole message that in-flight calls fail with.
        """
        if self._scope is not None and not self._reason:
            self._reason = reason
            self._scope.cancel()

    def fail(self, error: BrokerError) -> None:
        """End the link for good: `run` raises `error`."""
        if self._fatal is None:
            self._fatal = error
        if self._outer is not None:
            self._outer.cancel()

    def statistics(self) -> LinkStatistics:
        """Counters, now."""
        pipeline = self.pipeline
        return LinkStatistics(
            commands=pipeline.commands,
            batches=pipeline.batches,
            connects=self.connects,
            unsent=pipeline.unsent_count,
            inflight=len(pipeline.inflight),
        )

    # ---- the supervisor

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the connection up until cancelled. `started()` after the first handshake.

        Raises BrokerUnavailable when the server was not reached within `timing.first_connect`, and at any
        time BrokerDenied, BrokerTooOld or BrokerReplied when the server refuses the handshake.
        """
        self._ended = False
        self._fatal = None
        self._opened.set()
        self.is_accepting = self.breaker.state is BreakerState.CLOSED
        try:
            async with trio.open_nursery() as nursery:
                self._outer = nursery.cancel_scope
                nursery.start_soon(self._guard)
                await self._keep_up(task_status)
        finally:
            self.is_accepting = False
            self._ended = True
            self.connected = False
            closed = f"the link {self.name!r} to broker {self.where} is closed"
            self.pipeline.disconnect(closed)
            self.pipeline.fail_unsent(lambda was_sent: BrokerUnavailable(closed, maybe_done=was_sent))
        if self._fatal is not None:
            raise self._fatal

    async def _keep_up(self, task_status: trio.TaskStatus[None]) -> None:
        attempt = 0
        earlier: BrokerUnavailable | None = None
        first = True
        give_up = trio.current_time() + self.timing.first_connect
        while True:
            try:
                transport, replies = await self._open(give_up if first else float("inf"))
            except BrokerUnavailable as error:
                rest = self._failed(str(error))
                # A breaker at rest must not use up the little time that a first connection has.
                pause = self._pause(attempt) if first else max(self._pause(attempt), rest)
                if first and trio.current_time() + pause >= give_up:
                    # An attempt that was cut short by the end of that time says less than the one before.
                    cut_short = trio.current_time() >= give_up
                    self.fail(earlier if cut_short and earlier is not None else error)
                    return
                earlier = error
                self._watch(LinkConnectFailed(self.name, self.where, str(error), pause))
                attempt += 1
                await trio.sleep(pause)
                continue
            except BrokerError as error:
                self.fail(error)
                return
            up_since = self._up()
            if first:
                first = False
                task_status.started()
            await self._serve(transport, replies)
            attempt = 0 if trio.current_time() - up_since >= MIN_STABLE_TIME else attempt + 1
            if attempt:
                await trio.sleep(self._pause(attempt))

    async def _open(self, give_up: float) -> tuple[Transport, ReplyParser]:
        """One attempt. Raises BrokerUnavailable to try again, any other BrokerError to give up."""
        now = trio.current_time()
        self.breaker = self.breaker.with_probe(now)
        limit = min(self.timing.connect, max(give_up - now, 0.001))
        transport: Transport | None = None
        replies = ReplyParser()
        try:
            with trio.fail_after(limit):
                transport = await self._connect(self.endpoint)
                self.greeting = await self._shake_hands(transport, replies)
        except BaseException as error:
            if transport is not None:
                await transport.aclose()
            if isinstance(error, trio.TooSlowError):
                raise BrokerUnavailable(
                    f"broker {self.where} did not answer within {limit:g} s of connecting"
                ) from error
            if isinstance(error, CONNECTION_ERRORS):
                raise translate_error(error, maybe_done=False, where=self.where) from error
            raise
        return transport, replies

    async def _shake_hands(self, transport: Transport, replies: ReplyParser) -> ServerHello:
        commands = build_hello(self.endpoint, resp=self._resp, name=self.name)
        await transport.send(pack_commands(commands))
        answers: list[Any] = []
        while len(answers) < len(commands):
            answer = replies.next()
            if answer is NEED_DATA:
                received = await transport.receive()
                if not received:
                    if answers:
                        parse_server_hello(
                            answers, where=self.where
                        )  # a server that turns us away may say why
                    raise trio.BrokenResourceError("closed during the handshake")
                replies.feed(received)
            elif type(answer) is not PushNotification:
                answers.append(answer)
        return parse_server_hello(answers, where=self.where)

    def _up(self) -> float:
        now = self.connected_since = self.pipeline.last_received = trio.current_time()
        was = self.breaker.state
        self.breaker = self.breaker.after_success()
        self.is_accepting = True
        self.connected = True
        self.connects += 1
        self._last_failure = ""
        greeting = self.greeting
        assert greeting is not None
        self._watch(
            LinkConnected(self.name, self.where, greeting.server, greeting.version, greeting.client_id)
        )
        if was is not BreakerState.CLOSED:
            self._watch(BreakerClosed(self.name, self.where))
        self._on_up()
        return now

    async def _serve(self, transport: Transport, replies: ReplyParser) -> None:
        """Let the pipeline work over this transport until it breaks or is dropped."""
        self._reason = ""
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._until_broken, self.pipeline.write, transport)
                await self._until_broken(self.pipeline.read, transport, replies)
        finally:
            self._scope = None
            self.connected = False
            await transport.aclose()
        failed, kept = self.pipeline.disconnect(self._reason)
        self._watch(LinkLost(self.name, self.where, self._reason, failed, kept))

    async def _until_broken(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await work(*args)
        except CONNECTION_ERRORS as error:
            self.reconnect(str(translate_error(error, maybe_done=False, where=self.where)))

    def _failed(self, reason: str) -> float:
        """An attempt failed: tell the breaker, and say how long it wants to rest."""
        now = trio.current_time()
        was = self.breaker.state
        self.breaker = self.breaker.after_failure(now)
        self._last_failure = reason
        if self.breaker.state is not BreakerState.OPEN:
            return 0.0
        self.is_accepting = False
        rest = self.breaker.open_until - now
        if was is BreakerState.CLOSED:
            is_error = self.breaker.log_level(now) == "error"
            self._watch(BreakerOpened(self.name, self.where, reason, rest, is_error))
            self.pipeline.fail_unsent(lambda was_sent: self._circuit_open(maybe_done=was_sent))
        return rest

    def _pause(self, attempt: int) -> float:
        timing = self.timing
        return full_jitter(attempt, start=timing.backoff_start, cap=timing.backoff_cap, random=random.random)

    def _circuit_open(self, *, maybe_done: bool) -> CircuitOpen:
        return CircuitOpen(
            f"broker {self.where} is left in peace for a moment (circuit breaker open): {self._last_failure}",
            maybe_done=maybe_done,
        )

    # ---- the warden

    async def _guard(self) -> None:
        """Watch the deadlines of both queues, and a silent connection.

        A ticket queued from now on has a deadline of at least `now + reply`, so sleeping until then misses
        none; so it is with a connection made from now on and its first ping.
        """
        longest = min(self.timing.reply, self.timing.idle_ping)
        while True:
            now = trio.current_time()
            await trio.sleep_until(min(now + longest, self._next_look(now)))
            now = trio.current_time()
            pipeline = self.pipeline
            pipeline.fail_unsent(self._waited_too_long, until=now)
            if not self.connected:
                continue
            if pipeline.inflight:
                if now >= self._answer_due(pipeline.inflight[0]):
                    self.reconnect(f"broker {self.where} gave no answer within {self.timing.reply:g} s")
            elif not pipeline.unsent and now >= pipeline.last_received + self.timing.idle_ping:
                pipeline.submit(PendingRequest(_PING, now + self.timing.reply, repeatable=False))

    def _next_look(self, now: float) -> float:
        pipeline = self.pipeline
        looks = [pipeline.unsent[0].deadline] if pipeline.unsent else []
        if self.connected:
            if pipeline.inflight:
                looks.append(self._answer_due(pipeline.inflight[0]))
            else:
                looks.append(pipeline.last_received + self.timing.idle_ping)
        # Whatever is due at this very moment was dealt with; never spin.
        return max(min(looks, default=float("inf")), now + 0.001)

    def _answer_due(self, ticket: PendingRequest) -> float:
        if ticket.replies:
            # Some of a long batch has come: the server is at work as long as it goes on.
            return max(ticket.deadline, self.pipeline.last_received + self.timing.reply)
        return ticket.deadline

    def _waited_too_long(self, was_sent: bool) -> BrokerUnavailable:
        reason = self._last_failure or "no connection"
        return BrokerUnavailable(
            f"broker {self.where}: not sent within {self.timing.reply:g} s ({reason})", maybe_done=was_sent
        )


class SingleConnection:
    """What the drivers with one connection have in common: they run a link and report its state."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._where = link.where

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled; `started()` after the first handshake.

        Raises BrokerUnavailable if there is no first connection within `timing.first_connect` seconds, and
        BrokerDenied or BrokerTooOld if the server refuses us. After the first success it reconnects for ever.
        """
        await self._link.run(task_status=task_status)

    async def _run_beside(
        self, service: Callable[[], Awaitable[None]], task_status: trio.TaskStatus[None]
    ) -> None:
        """Run the link, and `service` as long as the link runs. Raise the error of the link, not in a group."""
        failure: BrokerError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service)
            try:
                await self._link.run(task_status=task_status)
            except BrokerError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._link.connected

    @property
    def connected_since(self) -> float | None:
        """The time, on Trio's clock, of the last successful handshake."""
        return self._link.connected_since

    @property
    def client_id(self) -> int | None:
        """The server's id of this connection, from the last handshake."""
        return self._link.greeting.client_id if self._link.greeting else None

    @property
    def server_version(self) -> str | None:
        """The version that the server sent in the last handshake."""
        return self._link.greeting.version if self._link.greeting else None

    @property
    def breaker(self) -> BreakerState:
        """The state of this connection's circuit breaker."""
        return self._link.breaker.state

    def statistics(self) -> LinkStatistics:
        """Return the counters of this connection."""
        return self._link.statistics()
