"""Send finished jobs to the Publisher daemon of this host, and wait until they are stored.

One thread owns the one connection of a process, for callers in plain Python, Trio and asyncio. Jobs that are sent
while it waits for a reply go into the next frame, so that many callers share one write to the daemon's disk. A job
that is sent twice is stored once, since it has its id already: so after a lost connection, frames without a reply are
sent again over a new one, once.
"""

import os
import socket
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from celery5.broker.colour import current_colour
from celery5.errors import (
    BacklogFull,
    BrokerError,
    CeleryError,
    Corrupt,
    MessageTooLarge,
    Misconfigured,
    PublisherUnavailable,
)
from celery5.protocol.counts import format_count
from celery5.protocol.health.breaker import Breaker, BreakerPolicy
from celery5.protocol.job.job import Job
from celery5.protocol.publisher.address import DaemonAddress, check_socket_path
from celery5.protocol.publisher.frames import (
    FRAME_OVERHEAD_BYTES,
    MAX_MESSAGES,
    ClientHello,
    ClientMessage,
    ConnectionRefusal,
    DaemonMessage,
    FrameReader,
    GroupReply,
    JobMessage,
    PublishReply,
    PublishRequest,
    Welcome,
    decode_daemon_message,
    encode_frame,
    make_job_message,
    split_into_frames,
)

if TYPE_CHECKING:
    from celery5.application import Application

SOCKET_FOLDER_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")
"""The variables that name the folder of the default socket; the first that is set counts."""
CONNECT_LIMIT = 2.0
"""Seconds that one attempt to reach the daemon may take."""


def connect_to_daemon(address: DaemonAddress, app: str) -> socket.socket:
    """Return a connection to a daemon, without a handshake.

    Raises:
        OSError: It cannot be reached.
        Misconfigured: Its unix socket is neither this user's nor root's.
    """
    if not address.host:
        connection = socket.socket(socket.AF_UNIX)
        path = address.path or str(get_default_socket(app))
        try:
            connection.settimeout(CONNECT_LIMIT)
            connection.connect(path)
            _check_peer(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection((address.host, address.port), CONNECT_LIMIT)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return connection
        import ssl  # loaded only for TLS

        context = ssl.create_default_context(cafile=address.ca or None)
        if address.certificate:
            context.load_cert_chain(address.certificate, address.key or None)
        return context.wrap_socket(connection, server_hostname=address.host)
    except BaseException:
        connection.close()
        raise


def _check_peer(connection: socket.socket, path: str) -> None:
    """Raise Misconfigured unless this user or root listens on a unix socket.

    Where others may create files, as in /tmp, another user can open the socket first: the jobs, with their arguments,
    would go there, and be reported as stored.
    """
    user = _get_listening_user(connection, path)
    if user not in (os.geteuid(), 0):
        raise Misconfigured(
            f"publisher unix://{path}: user {user} listens there, who is neither this user ({os.geteuid()}) nor root: "
            "run the Publisher as this user, or have systemd open its socket"
        )


def _get_listening_user(connection: socket.socket, path: str) -> int:
    """Return the id of the user whose process listens: as the kernel knows it, or else by the socket's file."""
    option = getattr(socket, "SO_PEERCRED", None)  # Linux
    if option is None:
        return os.stat(path).st_uid
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    return int(user)


_PEER_CREDENTIALS = struct.Struct("iII")
"""The process, the user and the group: `struct ucred` of unix(7)."""


def get_default_socket(app: str) -> Path:
    """Return the path of the daemon's socket when none is set: in a folder that only this user may enter.

    Raises:
        Misconfigured: This user has no such folder.
    """
    folder = next(
        (value for name in SOCKET_FOLDER_VARIABLES if os.path.isabs(value := os.environ.get(name, ""))), ""
    )
    try:
        root = Path(folder) if folder else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no folder for a socket: say --socket PATH") from None
    return Path(check_socket_path(str(root / "celery5" / f"{app.replace('/', '_')}.publisher.sock")))


def send_request(connection: socket.socket, message: ClientMessage) -> DaemonMessage:
    """Send one message and return the reply.

    Raises:
        OSError: The connection is lost, or the daemon is busy.
        Corrupt: The reply cannot be read.
    """
    connection.sendall(encode_frame(message))
    frames = FrameReader(FRAME_OVERHEAD_BYTES)
    while (body := frames.next_frame()) is None:
        received = connection.recv(65536)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        frames.feed(received)
    reply = decode_daemon_message(body)
    if isinstance(reply, ConnectionRefusal) and reply.code == "unavailable":
        raise ConnectionRefusedError(reply.why)
    return reply


CONNECT_PERIOD = 1.0
"""Seconds of attempts to reach the daemon: it may be restarting."""
CLIENT_BREAKER = BreakerPolicy(threshold=1, reset=0.5, growth="exponential", longest=4.0)
"""While the breaker is open, calls fail at once. One failure opens it: that took CONNECT_PERIOD, or ANSWER_LIMIT."""
PING_AFTER = 10.0
"""Seconds of silence after which a connection is checked before it is used."""
PING_LIMIT = 1.0
"""Seconds for the answer to such a check; then a new connection is opened."""
ANSWER_LIMIT = 10.0
"""Seconds that the daemon may take for a reply."""
CALL_LIMIT = 20.0
"""Seconds that a call may take in all."""
IDLE_LIMIT = 5.0
"""Seconds without work after which the thread ends. The connection stays."""

Group = tuple[JobMessage, ...]


class _Delivery:
    """The jobs of one call, and the reply to it."""

    __slots__ = ("answer", "group", "lost", "sent")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.answer: Future[GroupReply] = Future()
        self.sent = False
        # An attempt was sent and lost: the daemon may have stored its jobs, whatever the reply to the next one is.
        self.lost = False


class PublisherClient:
    """A client of the daemon at `address`, for the application named `app`."""

    def __init__(self, *, address: DaemonAddress, app: str) -> None:
        self._address = address
        self._app = app
        self.reset()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<PublisherClient {self._address}>"

    async def publish(self, jobs: Sequence[Job]) -> None:
        """Return when the daemon has stored all `jobs`. In plain Python this blocks; run it with `run_blocking`.

        When it is cancelled, jobs that were not sent yet are withdrawn.

        Raises:
            PublisherUnavailable: The daemon cannot be reached, did not reply in time, or cannot store anything.
            BacklogFull: Its backlog is full.
            MessageTooLarge: A message is too large, or there are too many.
            Misconfigured: It publishes for a different application.
        """
        delivery = self._begun(jobs)
        try:
            await _wait_for_answer(delivery.answer)
        except BaseException:
            delivery.answer.cancel()
            raise
        self._judged(delivery)

    def close(self) -> None:
        """Close the connection. It opens again when needed."""
        with self._talking:
            self._hang_up()

    def reset(self) -> None:
        """Start without a connection, as a forked child must: the connection is its parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._talking = threading.Lock()
        self._waiting: deque[_Delivery] = deque()
        self._thread: threading.Thread | None = None
        self._line: socket.socket | None = None
        self._used_at = 0.0
        self._breaker = Breaker(policy=CLIENT_BREAKER)
        self._why = ""

    # ---- callers

    def _begun(self, jobs: Sequence[Job]) -> _Delivery:
        if len(jobs) > MAX_MESSAGES:
            raise MessageTooLarge(
                f"{format_count(len(jobs), 'job')} in one call: the Publisher takes {MAX_MESSAGES:,} at once; "
                "send them in several calls"
            )
        delivery = _Delivery(tuple(make_job_message(job) for job in jobs))
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="celery5-publisher-client", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(delivery)
            self._changed.notify()
        return delivery

    def _judged(self, delivery: _Delivery) -> None:
        """Raise the error of a reply, if it has one."""
        if delivery.answer.cancel() or not delivery.answer.done():
            raise PublisherUnavailable(
                f"the Publisher at {self._address} has not answered within {CALL_LIMIT:g} s",
                maybe_done=delivery.sent,
            )
        reply = delivery.answer.result()
        if reply.code:
            error = _error(reply, str(self._address))
            if delivery.lost and isinstance(error, BrokerError):
                error.mark_maybe_done()
            raise error
        if not reply.firmly:
            warnings.warn(
                f"the Publisher at {self._address} cannot write its backlog, and has this in memory only: {reply.why}",
                RuntimeWarning,
                stacklevel=8,
            )

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: bool(self._waiting), IDLE_LIMIT):
                    self._thread = None
                    return
                waiting = list(self._waiting)
                self._waiting.clear()
            for part in split_into_frames([delivery.group for delivery in waiting]):
                # Jobs of calls that were cancelled are not sent.
                deliveries = [
                    waiting[index] for index in part if waiting[index].answer.set_running_or_notify_cancel()
                ]
                if deliveries:
                    self._deliver(deliveries)

    def _deliver(self, taken: list[_Delivery]) -> None:
        try:
            with self._talking:
                replies = self._get_replies(taken)
        except BaseException as error:  # the waiting callers must get any error
            replies = [_failed(error, delivery.sent) for delivery in taken]
        for delivery, reply in zip(taken, replies, strict=True):
            delivery.answer.set_result(reply)

    def _get_replies(self, taken: list[_Delivery]) -> Sequence[GroupReply]:
        """Return the daemon's replies, over the open connection or else a new one."""
        request = PublishRequest(tuple(delivery.group for delivery in taken))
        self._check_connection()
        was_connected = self._line is not None
        try:
            return self._asked(request, taken)
        except (OSError, Corrupt) as error:
            self._hang_up()
            if not was_connected:
                raise self._make_unavailable(error) from error
        for delivery in taken:
            delivery.lost = True
        try:
            return self._asked(request, taken)
        except (OSError, Corrupt) as error:
            self._hang_up()
            raise self._make_unavailable(error) from error

    def _check_connection(self) -> None:
        """Close a connection that was silent for a while and does not answer now, as after a cut cable."""
        if self._line is None or time.monotonic() - self._used_at < PING_AFTER:
            return
        try:
            self._line.settimeout(PING_LIMIT)
            send_request(self._line, PublishRequest(()))
        except (OSError, Corrupt):
            self._hang_up()

    def _asked(self, word: PublishRequest, taken: list[_Delivery]) -> Sequence[GroupReply]:
        connection = self._line = self._line or self._found()
        connection.settimeout(ANSWER_LIMIT)
        for delivery in taken:
            delivery.sent = True
        reply = send_request(connection, word)
        self._used_at = time.monotonic()
        if isinstance(reply, ConnectionRefusal):
            raise _error(GroupReply(reply.code, reply.why), "")
        if not isinstance(reply, PublishReply) or len(reply.answers) != len(taken):
            raise Corrupt(f"an answer to something else: {type(reply).__name__}")
        return reply.answers

    def _make_unavailable(self, error: Exception) -> PublisherUnavailable:
        why = str(error)
        if isinstance(error, TimeoutError):  # it hangs: others need not wait as long
            why = self._why = f"no answer within {ANSWER_LIMIT:g} s"
            self._breaker = self._breaker.after_failure(time.monotonic())
        return PublisherUnavailable(
            f"the Publisher at {self._address} cannot be reached: {why}; start it with celery5 publisher start"
        )

    # ---- the connection

    def _found(self) -> socket.socket:
        """Return a new connection after a handshake, with attempts for up to CONNECT_PERIOD."""
        now = time.monotonic()
        if not self._breaker.is_allowed(now):
            raise OSError(self._why)
        self._breaker = self._breaker.with_probe(now)
        while True:
            try:
                connection = self._opened()
            except (OSError, Corrupt) as error:
                self._why = str(error)
                if time.monotonic() - now >= CONNECT_PERIOD:
                    self._breaker = self._breaker.after_failure(time.monotonic())
                    raise
                time.sleep(0.05)
            except BaseException:
                self._breaker = self._breaker.after_cancelled_probe(time.monotonic())
                raise
            else:
                self._breaker = self._breaker.after_success()
                return connection

    def _opened(self) -> socket.socket:
        connection = connect_to_daemon(self._address, self._app)
        try:
            reply = send_request(connection, ClientHello(self._app))
            if isinstance(reply, ConnectionRefusal):
                raise _error(GroupReply(reply.code, reply.why), "")
            if not isinstance(reply, Welcome):
                raise Corrupt("no welcome")
        except BaseException:
            connection.close()
            raise
        return connection

    def _hang_up(self) -> None:
        connection, self._line = self._line, None
        if connection is not None:
            connection.close()


def _failed(error: BaseException, sent: bool) -> GroupReply:
    """Return the reply for callers whose frame failed with an error."""
    if isinstance(error, MessageTooLarge):
        return GroupReply("too-large", str(error))
    if isinstance(error, Misconfigured):
        return GroupReply("unfit", str(error))
    return GroupReply("unavailable", str(error) or type(error).__name__, maybe=sent)


def _error(answer: GroupReply, where: str) -> CeleryError:
    at = f"the Publisher at {where}: " if where and where not in answer.why else ""
    if answer.code == "too-large":
        return MessageTooLarge(f"{at}{answer.why}")
    if answer.code == "unfit":
        return Misconfigured(f"{at}{answer.why}")
    kind = BacklogFull if answer.code == "full" else PublisherUnavailable
    return kind(f"{at}{answer.why}", maybe_done=answer.maybe)


async def _wait_for_answer(answer: "Future[GroupReply]") -> None:
    """Return when the reply is there, or after `CALL_LIMIT`."""
    colour = current_colour()
    if colour is None:
        with suppress(TooLate):
            answer.result(CALL_LIMIT)
    elif colour == "trio":
        await _wait_on_trio(answer)
    else:
        import asyncio

        await asyncio.wait([asyncio.wrap_future(answer)], timeout=CALL_LIMIT)


async def _wait_on_trio(answer: "Future[GroupReply]") -> None:
    import trio

    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def set_done(_answer: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    answer.add_done_callback(set_done)
    with trio.move_on_after(CALL_LIMIT):
        await done.wait()


_ALL: "weakref.WeakSet[PublisherClient]" = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_ALL):
        connection = client._line  # pyright: ignore[reportPrivateUsage]
        client.reset()
        if connection is not None:
            os.close(connection.detach())  # without a shutdown: the connection is the parent's


os.register_at_fork(after_in_child=_after_fork)


class DaemonSender:
    """Sends those jobs of an application that may go to the daemon of its setting `publisher`."""

    def __init__(self, app: "Application") -> None:
        self._app = app
        self._client: PublisherClient | None = None
        self._said = ""

    async def send(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Send the jobs that may go by the daemon; return the others, which go to Redis directly."""
        daemon_jobs, direct_jobs = self._parted(jobs)
        if daemon_jobs:
            await self._to().publish(daemon_jobs)
        return direct_jobs

    def _parted(self, jobs: Sequence[Job]) -> tuple[Sequence[Job], Sequence[Job]]:
        """Return the jobs for the daemon, and those for Redis.

        A job goes to Redis directly if sending must return what Redis knows: the holder of its key, or the count of
        replicas.
        """
        default = self._app.settings.replicas
        direct_jobs = [
            job for job in jobs if job.lock or (default if job.replicas is UNSET else job.replicas)
        ]
        if not direct_jobs or len(direct_jobs) == len(jobs):
            return ((), jobs) if direct_jobs else (jobs, ())
        directly = {job.id for job in direct_jobs}
        return [job for job in jobs if job.id not in directly], direct_jobs

    def _to(self) -> "PublisherClient":
        address = self._app.settings.publisher
        if self._client is None or address != self._said:
            from celery5.protocol.publisher.address import parse_daemon_address

            self._client = PublisherClient(address=parse_daemon_address(address), app=self._app.name)
            self._said = address
        return self._client

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._client is not None:
            self._client.close()
