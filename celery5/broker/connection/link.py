"""Link: one connection to the broker that reconnects by itself.

The supervisor connects, shakes hands, runs the pipeline, and when the connection ends starts again: with backoff and
jitter, behind a circuit breaker whose probe is the supervisor's next attempt. The watchdog alone checks the clock: it
fails requests that waited too long to be sent, ends a connection on which a reply is overdue, and pings a silent one.

What a lost connection means for a call is decided in one place, `Pipeline.disconnect`: no call is sent twice unless it
is repeatable.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from celery5.broker.call import Word
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
from celery5.broker.connection.sentinel import AskSentinel, ConnectServer, ask_primary, open_connection
from celery5.broker.connection.transport import Connect, Transport, connect
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound
from celery5.broker.transient_errors import is_connection_refused
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError, BrokerUnavailable, CircuitOpen
from celery5.protocol.health.breaker import Breaker, BreakerPolicy, BreakerState
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.process.wake_ups import get_next_tick


class LinkConnected(msgspec.Struct, frozen=True):
    """The handshake succeeded. `client_id` is the server's handle for this connection. `broker`: the address of the
    broker, where `where` is that of a server. `is_return`: it follows a LinkLost."""

    link: str
    where: str
    server: str
    version: str
    client_id: int
    broker: str = ""
    is_return: bool = False


class LinkConnectFailed(msgspec.Struct, frozen=True):
    """An attempt to connect failed; the next one comes after `pause` seconds. `is_refused`: a person must correct
    something before it can succeed."""

    link: str
    where: str
    reason: str
    pause: float
    is_refused: bool = False


class LinkLost(msgspec.Struct, frozen=True):
    """A working connection ended.

    `failed` calls may or may not have run; `resent` calls are sent again over the next connection. A call that was sent
    had waited for its answer for `silence` seconds.
    """

    link: str
    where: str
    reason: str
    failed: int
    resent: int
    silence: float = 0.0


class LinkEnded(msgspec.Struct, frozen=True):
    """A link whose connection was lost has ended: that connection is not made again."""

    link: str
    where: str


class BreakerOpened(msgspec.Struct, frozen=True):
    """Too many failures in a row: calls are refused at once. A probe is sent after `probe_in` seconds. `is_error`: it
    has opened too often."""

    link: str
    where: str
    reason: str
    probe_in: float
    is_error: bool = False


class BreakerClosed(msgspec.Struct, frozen=True):
    """The probe succeeded: calls flow again."""

    link: str
    where: str


class CallsRefused(msgspec.Struct, frozen=True):
    """The server has refused a call which it takes at other times; `code` is in REFUSALS."""

    where: str
    reason: str
    code: str


class CallsAccepted(msgspec.Struct, frozen=True):
    """The server has taken a call of the kind that it had refused. `is_end`: the connection that would notice ends."""

    where: str
    code: str
    is_end: bool = False


LinkEvent = (
    LinkConnected
    | LinkConnectFailed
    | LinkLost
    | LinkEnded
    | BreakerOpened
    | BreakerClosed
    | CallsRefused
    | CallsAccepted
)


class LinkStatistics(msgspec.Struct, frozen=True):
    """Counters of one link: commands sent, writes, successful handshakes, and requests that are unsent or in flight."""

    commands: int
    batches: int
    connects: int
    unsent: int
    inflight: int


def ignore_event(_event: LinkEvent) -> None:
    """Do nothing with a LinkEvent."""


# What a transport and the parser raise when a connection is over.
CONNECTION_ERRORS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ProtocolError)

LATE_REPLY = 1.0
"""Seconds without a reply after which sentinels are asked whether there is another primary."""

PRIMARY_CHECK_INTERVAL = 5.0
"""Seconds, on average, after which a process asks the sentinels although replies come."""

# A connection that did not live this long, in seconds, does not reset the backoff.
MIN_STABLE_TIME = 1.0

_PING = pack_command(("PING",))


class SentinelLinks:
    """The links of a process to one broker that sentinels watch.

    They leave a primary together: what was read from one server must not be settled on another.
    """

    def __init__(self) -> None:
        self.links = set[Link]()
        self._next_check = 0.0
        self.draw_next_check()

    def draw_next_check(self) -> None:
        """Draw when to ask the sentinels next: at random, so that many processes do not ask at once."""
        self._next_check = trio.current_time() + PRIMARY_CHECK_INTERVAL * random.uniform(0.5, 1.5)

    def is_check_due(self) -> bool:
        """Return whether it is time to ask the sentinels although replies come."""
        return trio.current_time() >= self._next_check

    def leave_for(self, primary: tuple[str, int]) -> None:
        """Have each link that is connected to another server than this primary connect to it."""
        for link in self.links:
            link.leave_for(primary)


_sentinel_links: trio.lowlevel.RunVar[dict[Endpoint, SentinelLinks]] = trio.lowlevel.RunVar(
    "celery5_sentinel_links"
)


def _get_sentinel_links(endpoint: Endpoint) -> SentinelLinks:
    """Return the links to one broker in this run of Trio."""
    try:
        by_endpoint = _sentinel_links.get()
    except LookupError:
        by_endpoint = dict[Endpoint, SentinelLinks]()
        _sentinel_links.set(by_endpoint)
    return by_endpoint.setdefault(endpoint, SentinelLinks())


class Link:
    """The supervisor of one connection.

    `on_connected` is called after each successful handshake, before any call is sent; `on_push` with each pushed frame.
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
        # The server of the last connection: with sentinels in the URL, the primary that they have named.
        self.server = self.where
        self._node: tuple[str, int] | None = None
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
        self._on_connected = on_connected
        self._connect = connect
        self._opened = trio.Event()
        self._ended = False
        self._fatal: BrokerError | None = None
        self._scope: trio.CancelScope | None = None
        self._outer: trio.CancelScope | None = None
        self._reason = ""
        self._is_lost = False
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

    async def perform(self, request: PendingRequest) -> None:
        """Queue a request and wait until it is done. Raises the request's error."""
        if not self.is_accepting:
            await self.wait_until_accepting()
        pipeline = self.pipeline
        if pipeline.sends_at_once:
            # A task that is cancelled already must not send anything.
            await trio.lowlevel.checkpoint_if_cancelled()
        pipeline.submit(request)
        await pipeline.wait(request)
        if request.error is not None:
            raise request.error

    def begin(self, request: PendingRequest) -> bool:
        """Send a request at once, if nothing else is under way, for a caller that will `finish` it."""
        request.awaited = (
            self.is_accepting and self.pipeline.sends_at_once and self.pipeline.send_alone(request)
        )
        return request.awaited

    async def finish(self, request: PendingRequest) -> None:
        """Wait until a request that was begun is done. Raises the request's error."""
        if not request.is_done:
            await self.pipeline.wait(request)
        if request.error is not None:
            raise request.error

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

    def leave_for(self, primary: tuple[str, int]) -> None:
        """End this connection if it is to another server than this primary."""
        if self.connected and self._node != primary:
            self.reconnect(f"broker {self.where} has another primary by now")

    def fail(self, error: BrokerError) -> None:
        """End the link for good: `run` raises `error`."""
        if self._fatal is None:
            self._fatal = error
        if self._outer is not None:
            self._outer.cancel()

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
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

        Raises BrokerUnavailable when the server was not reached within `timing.first_connect`, and BrokerDenied,
        BrokerUnsupported or BrokerReplied when it refuses the first handshake. A server that refuses a later one counts
        as unreachable: passwords and permissions change while processes run, and whoever changed them can change them
        back. Raises ClusterFound at any time.
        """
        self._ended = False
        self._fatal = None
        self._opened.set()
        self.is_accepting = self.breaker.state is BreakerState.CLOSED
        try:
            async with trio.open_nursery() as nursery:
                self._outer = nursery.cancel_scope
                nursery.start_soon(self._watch_clock)
                if self.endpoint.topology == "sentinel":
                    nursery.start_soon(self._watch_primary)
                await self._keep_up(task_status)
        finally:
            self.is_accepting = False
            self._ended = True
            self.connected = False
            if self._is_lost:
                self._is_lost = False
                self._watch(LinkEnded(self.name, self.where))
            closed = f"the link {self.name!r} to broker {self.where} is closed"
            self.pipeline.disconnect(closed)
            self.pipeline.fail_unsent(lambda was_sent: BrokerUnavailable(closed, maybe_done=was_sent))
        if self._fatal is not None:
            raise self._fatal

    async def _keep_up(self, task_status: trio.TaskStatus[None]) -> None:
        attempt = 0
        earlier: BrokerError | None = None
        first = True
        give_up = trio.current_time() + self.timing.first_connect
        while True:
            try:
                transport, replies = await self._open(give_up if first else float("inf"))
            except BrokerError as error:
                if isinstance(error, ClusterFound) or (first and not isinstance(error, BrokerUnavailable)):
                    self.fail(error)
                    return
                open_for = self._record_failure(str(error))
                # An open breaker must not use up the little time that a first connection has.
                pause = self._pause(attempt) if first else max(self._pause(attempt), open_for)
                if first and trio.current_time() + pause >= give_up:
                    # The error of an attempt that the end of that time cut short explains less than the one before.
                    cut_short = trio.current_time() >= give_up
                    self.fail(earlier if cut_short and earlier is not None else error)
                    return
                earlier = error
                is_refused = is_connection_refused(error)
                self._watch(LinkConnectFailed(self.name, self.where, str(error), pause, is_refused))
                attempt += 1
                await trio.sleep(pause)
                continue
            up_since = self._record_connection()
            if first:
                first = False
                task_status.started()
            await self._serve(transport, replies)
            attempt = 0 if trio.current_time() - up_since >= MIN_STABLE_TIME else attempt + 1
            if attempt:
                await trio.sleep(self._pause(attempt))

    async def _open(self, give_up: float) -> tuple[Transport, ReplyParser]:
        """Connect once. Raises BrokerError."""
        now = trio.current_time()
        self.breaker = self.breaker.with_probe(now)
        limit = min(self.timing.connect, max(give_up - now, 0.001))
        try:
            with trio.fail_after(limit):
                return await open_connection(
                    self.endpoint, limit, ask=self._ask_sentinel, connect=self._connect_server
                )
        except trio.TooSlowError as error:
            raise BrokerUnavailable(
                f"broker {self.where} did not answer within {limit:g} s of connecting"
            ) from error

    async def _ask_sentinel(self, step: AskSentinel) -> list[Any]:
        """Send commands to a sentinel, over a connection of their own, and return its replies."""
        try:
            with trio.fail_after(step.within):
                transport, replies, _ = await self._dial_server(step.endpoint, resp=2)
                try:
                    return await _exchange(transport, replies, step.commands)
                finally:
                    await transport.aclose()
        except (trio.TooSlowError, *CONNECTION_ERRORS) as error:
            cause = TimeoutError() if isinstance(error, trio.TooSlowError) else error
            raise translate_error(cause, maybe_done=False, where=step.endpoint.masked_url) from error

    async def _connect_server(self, step: ConnectServer) -> tuple[Transport, ReplyParser]:
        """Connect to the server and shake hands."""
        where = step.endpoint.masked_url
        try:
            with trio.fail_after(step.within):
                transport, replies, self.greeting = await self._dial_server(step.endpoint, resp=self._resp)
        except trio.TooSlowError as error:
            raise BrokerUnavailable(
                f"broker {where} did not answer within {step.within:g} s of connecting"
            ) from error
        except CONNECTION_ERRORS as error:
            raise translate_error(error, maybe_done=False, where=where) from error
        self.server, self._node = where, (step.endpoint.host, step.endpoint.port)
        return transport, replies

    async def _dial_server(
        self, endpoint: Endpoint, *, resp: Resp
    ) -> tuple[Transport, ReplyParser, ServerHello]:
        transport = await self._connect(endpoint)
        try:
            replies = ReplyParser()
            hello = build_hello(endpoint, resp=resp, name=self.name)
            answers: list[Any] = []
            try:
                await _exchange(transport, replies, hello, answers)
            except trio.BrokenResourceError:
                if answers:  # a server that refuses us may have sent why
                    parse_server_hello(answers, endpoint)
                raise
            return transport, replies, parse_server_hello(answers, endpoint)
        except BaseException:
            await transport.aclose()
            raise

    def _record_connection(self) -> float:
        now = self.connected_since = self.pipeline.last_received = trio.current_time()
        was = self.breaker.state
        self.breaker = self.breaker.after_success()
        self.is_accepting = True
        self.connected = True
        self.connects += 1
        self._last_failure = ""
        greeting = self.greeting
        assert greeting is not None
        is_return, self._is_lost = self._is_lost, False
        self._watch(
            LinkConnected(
                self.name,
                self.server,
                greeting.server,
                greeting.version,
                greeting.client_id,
                self.where,
                is_return,
            )
        )
        if was is not BreakerState.CLOSED:
            self._watch(BreakerClosed(self.name, self.where))
        self._on_connected()
        return now

    async def _serve(self, transport: Transport, replies: ReplyParser) -> None:
        """Run the pipeline over this transport until it breaks or is dropped."""
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
        silence = self._get_silence()
        failed, kept = self.pipeline.disconnect(self._reason)
        self._is_lost, self._last_failure = True, self._reason
        self._watch(LinkLost(self.name, self.where, self._reason, failed, kept, silence))

    async def _until_broken(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await work(*args)
        except CONNECTION_ERRORS as error:
            self.reconnect(str(translate_error(error, maybe_done=False, where=self.where)))

    def _record_failure(self, reason: str) -> float:
        """Report a failed attempt to the breaker. Return the seconds for which it stays open."""
        now = trio.current_time()
        was = self.breaker.state
        self.breaker = self.breaker.after_failure(now)
        self._last_failure = reason
        if self.breaker.state is not BreakerState.OPEN:
            return 0.0
        self.is_accepting = False
        open_for = self.breaker.open_until - now
        if was is BreakerState.CLOSED:
            is_error = self.breaker.log_level(now) == "error"
            self._watch(BreakerOpened(self.name, self.where, reason, open_for, is_error))
            self.pipeline.fail_unsent(lambda was_sent: self._circuit_open(maybe_done=was_sent))
        return open_for

    def _pause(self, attempt: int) -> float:
        timing = self.timing
        return full_jitter(attempt, start=timing.backoff_start, cap=timing.backoff_cap, random=random.random)

    def _circuit_open(self, *, maybe_done: bool) -> CircuitOpen:
        return CircuitOpen(
            f"broker {self.where} is not tried again yet (circuit breaker open): {self._last_failure}",
            maybe_done=maybe_done,
        )

    def report(self, event: CallsRefused | CallsAccepted) -> None:
        """Pass on what a driver has read from replies."""
        self._watch(event)

    # ---- the watchdog

    async def _watch_clock(self) -> None:
        """Check the deadlines of both queues, and ping a silent connection.

        A request that is queued while this sleeps has a deadline of at least `now + reply`, so none is missed. The same
        is true of a new connection and its first ping.
        """
        longest = min(self.timing.reply, self.timing.idle_ping)
        while True:
            now = trio.current_time()
            await trio.sleep_until(min(now + longest, self._get_next_check(now)))
            await trio.lowlevel.checkpoint()  # what others send at this time saves the ping
            now = trio.current_time()
            pipeline = self.pipeline
            pipeline.fail_unsent(self._waited_too_long, until=now)
            if not self.connected:
                continue
            if pipeline.inflight:
                if now >= self._reply_due(pipeline.inflight[0]):
                    self.reconnect(f"broker {self.where} gave no answer within {self.timing.reply:g} s")
            elif not pipeline.unsent and now >= self._ping_due():
                pipeline.submit(PendingRequest(_PING, now + self.timing.reply, repeatable=False))

    async def _watch_primary(self) -> None:
        """Ask the sentinels now and then whether there is another primary, and at once while a reply is late.

        A primary that hangs, or is gone, is noticed by the late reply. One that is cut off from the sentinels, and not
        from us, answers all the time, and what it accepts is lost when it is joined again. A subscription to their
        `+switch-master` would need one more connection for each link at all times.
        """
        group = _get_sentinel_links(self.endpoint)
        group.links.add(self)
        try:
            while True:
                await trio.sleep(LATE_REPLY)
                if not self.connected or not (self._is_reply_late() or group.is_check_due()):
                    continue
                group.draw_next_check()
                primary = await ask_primary(self.endpoint, self._ask_sentinel)
                if primary is not None:
                    group.leave_for(primary)
        finally:
            group.links.discard(self)

    def _is_reply_late(self) -> bool:
        return self._get_silence() >= LATE_REPLY

    def _get_silence(self) -> float:
        """Return for how many seconds the reply to the oldest call has been missing; 0 if none is."""
        if not self.pipeline.inflight:
            return 0.0
        expected = self._reply_due(self.pipeline.inflight[0]) - self.timing.reply
        return max(trio.current_time() - expected, 0.0)

    def _get_next_check(self, now: float) -> float:
        pipeline = self.pipeline
        next_checks = [pipeline.unsent[0].deadline] if pipeline.unsent else []
        if self.connected:
            if pipeline.inflight:
                next_checks.append(self._reply_due(pipeline.inflight[0]))
            else:
                next_checks.append(self._ping_due())
        # What is due now was handled already: do not loop without a pause.
        return max(min(next_checks, default=float("inf")), now + 0.001)

    def _ping_due(self) -> float:
        """Return when a connection is pinged that stays silent: soon enough, and together with what else is sent."""
        silent_since, longest = self.pipeline.last_received, self.timing.idle_ping
        tick = get_next_tick(silent_since, longest)
        # A connection with calls now and then needs no ping in between. One without falls in with the ticks.
        return tick if tick - silent_since >= longest / 3 else silent_since + longest / 2

    def _reply_due(self, request: PendingRequest) -> float:
        if request.replies:
            # A part of a long batch has come: the server works as long as more arrives.
            return max(request.deadline, self.pipeline.last_received + self.timing.reply)
        return request.deadline

    def _waited_too_long(self, was_sent: bool) -> BrokerUnavailable:
        reason = self._last_failure or "no connection"
        return BrokerUnavailable(
            f"broker {self.where}: not sent within {self.timing.reply:g} s ({reason})", maybe_done=was_sent
        )


async def _exchange(
    transport: Transport,
    replies: ReplyParser,
    commands: Sequence[tuple[Word, ...]],
    answers: list[Any] | None = None,
) -> list[Any]:
    """Send commands on a connection that nobody else uses yet; return the replies, which are added to `answers`."""
    answers = [] if answers is None else answers
    await transport.send(pack_commands(commands))
    while len(answers) < len(commands):
        reply = replies.next()
        if reply is NEED_DATA:
            data = await transport.receive()
            if not data:
                raise trio.BrokenResourceError("closed during the handshake")
            replies.feed(data)
        elif type(reply) is not PushNotification:
            answers.append(reply)
    return answers


class SingleConnection:
    """What the drivers with one connection have in common: they run a link and report its state."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._where = link.where

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled; `started()` after the first handshake.

        Raises BrokerUnavailable if there is no first connection within `timing.first_connect` seconds, and
        BrokerDenied or BrokerUnsupported if the server refuses us then. After the first success it reconnects for ever.
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
