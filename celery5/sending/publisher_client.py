"""Publisher Client: hands finished jobs to the Publisher daemon of this host, and waits until they are stored (C79).

One thread has the one connection of a process, whatever its callers are made of: plain Python, Trio, asyncio. What they
send while it waits for an answer goes with the next frame, so that many of them share one write to the daemon's disk.
Handing a job over twice is handing it over once, since it has its id: so what was on its way when the connection broke
is sent again over a new one, once.
"""

import os
import socket
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
"""What names the folder of the usual socket, the first that does."""
CONNECT_LIMIT = 2.0
"""Seconds that one attempt to reach the daemon may take."""


def connect_to_daemon(address: DaemonAddress, app: str) -> socket.socket:
    """A connection to a daemon, before the first word. Raises OSError."""
    if not address.host:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(CONNECT_LIMIT)
            line.connect(address.path or str(get_default_socket(app)))
        except BaseException:
            line.close()
            raise
        return line
    line = socket.create_connection((address.host, address.port), CONNECT_LIMIT)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return line
        import ssl  # only who speaks TLS need have it loaded

        context = ssl.create_default_context(cafile=address.ca or None)
        if address.certificate:
            context.load_cert_chain(address.certificate, address.key or None)
        return context.wrap_socket(line, server_hostname=address.host)
    except BaseException:
        line.close()
        raise


def get_default_socket(app: str) -> Path:
    """Where the daemon of an application listens unless told otherwise: in the user's folder for such things, which
    nobody else may enter. Raises Misconfigured."""
    said = next(
        (each for name in SOCKET_FOLDER_VARIABLES if os.path.isabs(each := os.environ.get(name, ""))), ""
    )
    try:
        root = Path(said) if said else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no folder for a socket: say --socket PATH") from None
    return Path(check_socket_path(str(root / "celery5" / f"{app.replace('/', '_')}.publisher.sock")))


def send_request(connection: socket.socket, message: ClientMessage) -> DaemonMessage:
    """Say one word, and read the one that answers it. Raises OSError, also when the daemon has no time now, and
    Corrupt."""
    connection.sendall(encode_frame(message))
    frames = FrameReader(FRAME_OVERHEAD_BYTES)
    while (body := frames.next_frame()) is None:
        received = connection.recv(65536)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        frames.feed(received)
    answer = decode_daemon_message(body)
    if isinstance(answer, ConnectionRefusal) and answer.code == "unavailable":
        raise ConnectionRefusedError(answer.why)
    return answer


CONNECT_PERIOD = 1.0
"""Seconds for which the daemon is looked for when it is away: it may be starting anew."""
RECONNECT_PAUSE = 0.5
"""Seconds for which callers are told at once that it is away, before it is looked for again."""
ANSWER_LIMIT = 10.0
"""Seconds that the daemon has for an answer."""
CALL_LIMIT = 20.0
"""Seconds that a caller waits in all."""
IDLE_LIMIT = 5.0
"""Seconds without work after which the thread ends. The connection stays."""

Group = tuple[JobMessage, ...]


class _Delivery:
    """What one call hands over, and the answer to it."""

    __slots__ = ("answer", "group", "lost", "sent")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.answer: Future[GroupReply] = Future()
        self.sent = False
        # An attempt was sent and lost; the daemon may have stored its jobs, so the answer to the next one is not all.
        self.lost = False


class PublisherClient:
    """The way to the daemon at `address` for the application named `app`."""

    def __init__(self, *, address: DaemonAddress, app: str) -> None:
        self._address = address
        self._app = app
        self.reset()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<PublisherClient {self._address}>"

    async def publish(self, jobs: Sequence[Job]) -> None:
        """Return when the daemon has stored all `jobs`. In plain Python this blocks; run it with `run_blocking`.

        Cancelled, it takes back what was not sent yet.

        Raises PublisherUnavailable when it cannot be reached, has not answered in time, or cannot store anything;
        BacklogFull, MessageTooLarge, and Misconfigured when it publishes for another application.
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
        """Begin without a connection, as a forked child must: that one is its parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._talking = threading.Lock()
        self._waiting: deque[_Delivery] = deque()
        self._thread: threading.Thread | None = None
        self._line: socket.socket | None = None
        self._away_until = 0.0
        self._why = ""

    # ---- callers

    def _begun(self, jobs: Sequence[Job]) -> _Delivery:
        if len(jobs) > MAX_MESSAGES:
            raise MessageTooLarge(
                f"{len(jobs)} jobs in one call: the Publisher takes {MAX_MESSAGES} at once; send them in several calls"
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
        """Raises what the answer means, if it is no good one."""
        if delivery.answer.cancel() or not delivery.answer.done():
            raise PublisherUnavailable(
                f"the Publisher at {self._address} has not answered within {CALL_LIMIT:g} s",
                maybe_done=delivery.sent,
            )
        answer = delivery.answer.result()
        if answer.code:
            error = _error(answer, str(self._address))
            if delivery.lost and isinstance(error, BrokerError):
                error.mark_maybe_done()
            raise error
        if not answer.firmly:
            warnings.warn(
                f"the Publisher at {self._address} cannot write its backlog, and has this in memory only: {answer.why}",
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
                found = list(self._waiting)
                self._waiting.clear()
            for part in split_into_frames([each.group for each in found]):
                # What a caller has taken back meanwhile is not sent.
                taken = [found[n] for n in part if found[n].answer.set_running_or_notify_cancel()]
                if taken:
                    self._deliver(taken)

    def _deliver(self, taken: list[_Delivery]) -> None:
        try:
            with self._talking:
                answers = self._told(taken)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            answers = [_failed(error, each.sent) for each in taken]
        for each, answer in zip(taken, answers, strict=True):
            each.answer.set_result(answer)

    def _told(self, taken: list[_Delivery]) -> Sequence[GroupReply]:
        """The daemon's answers, over the connection that there is, or else over a new one."""
        word = PublishRequest(tuple(each.group for each in taken))
        kept = self._line is not None
        try:
            return self._asked(word, taken)
        except (OSError, Corrupt) as error:
            self._hang_up()
            if not kept:
                raise PublisherUnavailable(self._said(error)) from error
        for each in taken:
            each.lost = True
        try:
            return self._asked(word, taken)
        except (OSError, Corrupt) as error:
            self._hang_up()
            raise PublisherUnavailable(self._said(error)) from error

    def _asked(self, word: PublishRequest, taken: list[_Delivery]) -> Sequence[GroupReply]:
        line = self._line = self._line or self._found()
        line.settimeout(ANSWER_LIMIT)
        for each in taken:
            each.sent = True
        answer = send_request(line, word)
        if isinstance(answer, ConnectionRefusal):
            raise _error(GroupReply(answer.code, answer.why), "")
        if not isinstance(answer, PublishReply) or len(answer.answers) != len(taken):
            raise Corrupt(f"an answer to something else: {type(answer).__name__}")
        return answer.answers

    def _said(self, error: BaseException) -> str:
        why = f"no answer within {ANSWER_LIMIT:g} s" if isinstance(error, TimeoutError) else str(error)
        return f"the Publisher at {self._address} cannot be reached: {why}; start it with celery5 publisher start"

    # ---- the connection

    def _found(self) -> socket.socket:
        """A connection, once the daemon has said that it is the right one. It is looked for, for a moment."""
        now = time.monotonic()
        if now < self._away_until:
            raise OSError(self._why)
        while True:
            try:
                return self._opened()
            except (OSError, Corrupt) as error:
                self._why = str(error)
                if time.monotonic() - now >= CONNECT_PERIOD:
                    self._away_until = time.monotonic() + RECONNECT_PAUSE
                    raise
                time.sleep(0.05)

    def _opened(self) -> socket.socket:
        line = connect_to_daemon(self._address, self._app)
        try:
            answer = send_request(line, ClientHello(self._app))
            if isinstance(answer, ConnectionRefusal):
                raise _error(GroupReply(answer.code, answer.why), "")
            if not isinstance(answer, Welcome):
                raise Corrupt("no welcome")
        except BaseException:
            line.close()
            raise
        return line

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def _failed(error: BaseException, sent: bool) -> GroupReply:
    """What those hear who waited when something else than an answer came."""
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
    """Return when the answer is there, and after `CALL_LIMIT` without it."""
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
        line = client._line  # pyright: ignore[reportPrivateUsage]
        client.reset()
        if line is not None:
            os.close(line.detach())  # without a farewell: the connection is the parent's


os.register_at_fork(after_in_child=_after_fork)


class DaemonSender:
    """What of an application's jobs goes to the daemon that its setting `publisher` names."""

    def __init__(self, app: "Application") -> None:
        self._app = app
        self._client: PublisherClient | None = None
        self._said = ""

    async def send(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Send the jobs that may go by the daemon; return the others, which go to Redis directly."""
        mine, others = self._parted(jobs)
        if mine:
            await self._to().publish(mine)
        return others

    def _parted(self, jobs: Sequence[Job]) -> tuple[Sequence[Job], Sequence[Job]]:
        """Where something of Redis is to be known before sending returns, it is asked: who has a job's key, or whether
        replicas have it."""
        if self._app.settings.replicas:
            return (), jobs
        if not any(job.lock for job in jobs):
            return jobs, ()
        return [job for job in jobs if not job.lock], [job for job in jobs if job.lock]

    def _to(self) -> "PublisherClient":
        said = self._app.settings.publisher
        if self._client is None or said != self._said:
            from celery5.protocol.publisher.address import parse_daemon_address

            self._client = PublisherClient(address=parse_daemon_address(said), app=self._app.name)
            self._said = said
        return self._client

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._client is not None:
            self._client.close()
