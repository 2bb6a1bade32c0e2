"""Receive signed commands to this process, run them, and reply.

The inbox is not polled: it is read when a message announces a command, at the start, and after the listening connection
was lost. Each command runs at most once. A refused command is counted and gets a reply; it never runs.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
import trio

from celery5.broker.calls import commands as trips
from celery5.broker.calls.commands import TAKEN_BY_OTHER, QueuedCommand
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.broker.transient_errors import is_transient
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerReplied,
    CommandRefused,
    Misconfigured,
    NotConcerned,
)
from celery5.logs.log import Level, Log
from celery5.protocol.commands.certificates import TrustStore
from celery5.protocol.commands.definitions import (
    COMMAND_DEFINITIONS,
    MAX_COMMAND_LIFETIME,
    MAX_COMMAND_SIZE,
    MAX_REPLY_SIZE,
    WORKERS,
    CommandNotAccepted,
    CommandReply,
    RefusalReason,
)
from celery5.protocol.commands.signing import (
    ControlCommand,
    Signer,
    format_audience,
    is_command_id,
    sign_command,
    verify_command,
)
from celery5.protocol.job.job import new_id
from celery5.protocol.masking import describe_error
from celery5.runners.user_errors import reraise_cancellation
from celery5.services.commands.dispatcher import CommandRegistry
from celery5.services.process.broker_outages import OutageLog, retry_until_available

READ_BATCH = 32
"""The most commands read in one trip."""
FULL_BATCH_PAUSE = 0.05
"""Seconds between two full trips, so that a flood takes only a part of the event loop's time."""
MAX_RUNNING_COMMANDS = 16
COMMAND_TIMEOUT = 120.0
"""Seconds that a command may take."""
REPLY_TIMEOUT = 2.0
"""Seconds that sending a reply may take, also while this process ends."""
RECORD_TIMEOUT = 2.0
"""Seconds that it may take to record on the disk that a command is about to run."""
STOP_TIMEOUT = 2.0
"""Seconds that running commands have left when this process stops or restarts."""
MAX_OWN_COMMANDS = 100
"""The most waiting commands of a process to itself."""
MAX_LOGGED_REFUSALS = 10
"""Refusals that are logged in a second; more are only counted."""


class InboxKeyring(Protocol):
    """The keys that this process signs with, and the senders that it trusts."""

    def get_signer(self) -> Signer: ...

    def get_trust_store(self) -> TrustStore: ...

    def check(self) -> None: ...

    def record_command(self, command: ControlCommand, now: float, /) -> RefusalReason | None: ...


class InboxAddress(msgspec.Struct, frozen=True):
    """The address of a process for control commands."""

    app: str
    name: str
    # Whether it has an inbox.
    is_open: bool = True
    # Whether commands must be signed.
    is_signed: bool = True
    # Whether a later process will have the same name.
    is_durable: bool = False

    @property
    def audience(self) -> str:
        """Return what a command must name as its audience."""
        return format_audience(self.app, self.name)


class SelfCommandQueue:
    """Sends commands of this process to itself.

    They go through its inbox if it is durable, so that a later process runs them if this one ends. Without a durable
    inbox, and while Redis is unreachable, they wait in memory.
    """

    def __init__(
        self, *, redis: AsyncDriver, keys: Keys, keyring: InboxKeyring, address: InboxAddress
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = keyring
        self._address = address
        self._waiting: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._added = trio.Event()

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
        """Run the command soon. Raises CommandRefused when too many wait already."""
        if (
            self._address.is_open
            and self._address.is_durable
            and await self._send_to_inbox(command, parameters)
        ):
            return
        if len(self._waiting) >= MAX_OWN_COMMANDS:
            raise CommandRefused(
                f"{MAX_OWN_COMMANDS} commands of this process to itself wait already: {command!r} is dropped"
            )
        self._waiting.append((command, dict(parameters)))
        self._added.set()

    async def take_next(self) -> tuple[str, Mapping[str, Any]]:
        """Return the next command that did not go through the inbox; wait for one."""
        while not self._waiting:
            await self._added.wait()
            self._added = trio.Event()
        return self._waiting.popleft()

    async def _send_to_inbox(self, command: str, parameters: Mapping[str, Any]) -> bool:
        try:
            command_id, sealed = await trio.to_thread.run_sync(self._sign, command, parameters)
            return await self._redis.perform(
                trips.send_command(self._keys, self._address.name, command_id, sealed)
            )
        except (BrokerError, CommandRefused, Misconfigured):
            return False

    def _sign(self, command: str, parameters: Mapping[str, Any]) -> tuple[str, bytes]:
        signer = self._keyring.get_signer() if self._address.is_signed else None
        now = time.time()
        control_command = ControlCommand(
            id=new_id(),
            audience=self._address.audience,
            issued=now,
            expires=now + MAX_COMMAND_LIFETIME,
            command=command,
            parameters=dict(parameters),
            sender=self._address.name,
        )
        return control_command.id, sign_command(control_command, signer)


class Inbox:
    """The inbox of one process. `on_expired` is called when a command came too late."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        command_counts: Counter[str],
        performed_commands: dict[str, float],
        worker: str,
        address: InboxAddress,
        keyring: InboxKeyring,
        keys: Keys,
        commands: CommandRegistry,
        self_commands: SelfCommandQueue,
        log: Log,
        on_expired: Callable[[], object] = lambda: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = keyring
        self._address = address
        self._commands = commands
        self._own_commands = self_commands
        self._log = log
        self._refusals = OutageLog(log, "inbox:read-failed")
        self._worker = worker
        self._slots = trio.Semaphore(MAX_RUNNING_COMMANDS)
        self._thread = trio.CapacityLimiter(1)
        self._performed = performed_commands
        self._on_expired = on_expired
        self._running: set[trio.CancelScope] = set()
        self._stop_deadline = math.inf
        self._may_have_commands = trio.Event()
        self._refusal_second = self._refusals_in_second = 0
        self._counts = command_counts

    @property
    def channels(self) -> list[str]:
        """Return the channels to listen to."""
        return [self._keys.inbox(self._address.name)] if self._address.is_open else []

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Read commands: one was sent."""
        self._may_have_commands.set()

    def recheck(self) -> None:
        """Read commands: a message may have been missed while the connection was down."""
        self._may_have_commands.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run commands until cancelled."""
        self._warn_of_address()
        task_status.started()
        self._may_have_commands.set()  # some may have been sent while this process did not listen
        self._stop_deadline = math.inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_keys)
            nursery.start_soon(self._take_own_commands, nursery)
            try:
                await self._take_commands(nursery)
            finally:  # running commands end soon, and get a reply
                self._stop_deadline = trio.current_time() + STOP_TIMEOUT
                for scope in self._running:
                    scope.deadline = min(scope.deadline, self._stop_deadline)

    async def _take_own_commands(self, nursery: trio.Nursery) -> None:
        while True:
            command, parameters = await self._own_commands.take_next()
            await self._slots.acquire()
            nursery.start_soon(self._run_command, command, parameters, None)

    async def _take_commands(self, nursery: trio.Nursery) -> None:
        if not self._address.is_open:
            await trio.sleep_forever()
        while True:
            await self._may_have_commands.wait()
            self._may_have_commands = trio.Event()
            await retry_until_available(partial(self._read, nursery), None)

    def _warn_of_address(self) -> None:
        if not self._address.is_open:
            self._log.event("inbox:disabled", "warning", lost=_WITHOUT_INBOX)
        elif not self._address.is_signed:
            self._log.event("inbox:signatures-disabled", "warning", lost=_WITHOUT_SIGNATURES)

    async def _check_keys(self) -> None:
        """Warn at the start, and not at the first command, if no command can be verified with the keys."""
        if not (self._address.is_open and self._address.is_signed):
            return
        try:
            await trio.to_thread.run_sync(self._keyring.check, limiter=self._thread, abandon_on_cancel=True)
        except (Misconfigured, OSError, ValueError) as error:
            self._log.event("inbox:keys-rejected", "warning", why=str(error), lost=_WITHOUT_KEYS)

    async def _read(self, nursery: trio.Nursery) -> None:
        """Start all commands in the inbox. Raises BrokerReplied or BrokerUnavailable where a later try may succeed."""
        call = trips.read_commands(
            self._keys, self._address.name, count=READ_BATCH, max_bytes=MAX_COMMAND_SIZE
        )
        try:
            while queued_commands := await self._redis.perform(call):
                for queued in queued_commands:
                    await self._receive(queued, nursery)
                if len(queued_commands) == READ_BATCH:
                    await trio.sleep(FULL_BATCH_PAUSE)
        except (BrokerDenied, BrokerReplied) as error:
            self._refusals.record_error(error)
            if isinstance(error, BrokerReplied) and is_transient(error):
                raise
        else:
            self._refusals.record_recovery()

    async def _receive(self, queued: QueuedCommand, nursery: trio.Nursery) -> None:
        try:
            command = await trio.to_thread.run_sync(self._verify, queued, limiter=self._thread)
        except CommandNotAccepted as error:
            await self._refuse(queued, error, entry=queued.entry)
            return
        await self._slots.acquire()
        has_started = False
        try:
            call = trips.take_command(
                self._keys, self._address.name, command.id, queued.entry, worker=self._worker
            )
            # No cancellation between taking the command and running it: no other process would run it.
            with trio.CancelScope(shield=True):
                taken = await self._redis.perform(call)
                if taken == TAKEN_BY_OTHER:
                    return
                refusal: RefusalReason | None = RefusalReason.REPLAYED
                if taken and self._is_first(command):
                    refusal = await self._record(command)
                if refusal is not None:
                    with trio.move_on_after(REPLY_TIMEOUT):
                        await self._refuse(queued, CommandNotAccepted(refusal))
                    return
            has_started = True
            nursery.start_soon(self._run_command, command.command, command.parameters, command)
        finally:
            if not has_started:
                self._slots.release()

    def _verify(self, queued: QueuedCommand) -> ControlCommand:
        """Return the command. Runs in a thread, since it reads files and imports libraries."""
        if queued.size > MAX_COMMAND_SIZE:
            raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{queued.size} bytes")
        try:
            trust = self._keyring.get_trust_store() if self._address.is_signed else None
        except (Misconfigured, OSError, ValueError) as error:
            raise CommandNotAccepted(RefusalReason.NO_KEYS, str(error)) from None
        try:
            return verify_command(
                queued.sealed, audience=self._address.audience, trust=trust, now=time.time()
            )
        except CommandNotAccepted:
            raise
        except Exception as error:  # anyone may write to the inbox, and that must not end this process
            raise CommandNotAccepted(
                RefusalReason.MALFORMED, f"{type(error).__name__}: {error}"[:200]
            ) from None

    def _is_first(self, command: ControlCommand) -> bool:
        """Return whether the command did not run yet.

        Redis keeps its id too, but whoever can write to Redis can delete that.
        """
        now = time.time()
        for command_id in [command_id for command_id, expires in self._performed.items() if expires <= now]:
            del self._performed[command_id]
        if command.id in self._performed:
            return False
        self._performed[command.id] = command.expires
        return True

    async def _record(self, command: ControlCommand) -> RefusalReason | None:
        """Record on the disk that this command is about to run, for the next process of this name.

        Return the reason if it must not run.
        """
        if not self._address.is_signed:
            return None  # without signatures anyone who can write to Redis can send commands anyway
        definition = COMMAND_DEFINITIONS.get(command.command)
        if definition is not None and definition.is_idempotent:
            return None
        with trio.move_on_after(RECORD_TIMEOUT):
            return await trio.to_thread.run_sync(
                self._keyring.record_command,
                command,
                time.time(),
                limiter=self._thread,
                abandon_on_cancel=True,
            )
        return RefusalReason.UNREMEMBERED

    async def _refuse(self, queued: QueuedCommand, error: CommandNotAccepted, *, entry: bytes = b"") -> None:
        self._counts[error.reason.value] += 1
        self._log_refusal(queued, error)
        if error.reason is RefusalReason.EXPIRED:
            self._on_expired()  # this process may have been blocked for too long, and have missed more
        reply = CommandReply(worker=self._worker, ok=False, reason=error.reason, why=str(error))
        document = msgspec.json.encode(reply) if is_command_id(queued.id) else b""
        command_id = queued.id if document else "none"
        replayed = error.reason is RefusalReason.REPLAYED
        call = trips.reply_to_command(
            self._keys, self._address.name, command_id, document, refused_entry=entry, keep_first=replayed
        )
        await self._redis.perform(call)

    def _log_refusal(self, queued: QueuedCommand, error: CommandNotAccepted) -> None:
        now = int(time.monotonic())
        if now != self._refusal_second:
            self._refusal_second, self._refusals_in_second = now, 0
        self._refusals_in_second += 1
        if self._refusals_in_second > MAX_LOGGED_REFUSALS:
            self._counts["untold"] += 1
            return
        self._log.event(
            "inbox:command-refused",
            "warning",
            reason=error.reason.value,
            why=str(error),
            id=queued.id,
            size=queued.size,
        )

    async def _run_command(
        self, command: str, parameters: Mapping[str, Any], received: ControlCommand | None
    ) -> None:
        """Run a command and reply. One of this process to itself was not `received`, and gets no reply."""
        try:
            reply = CommandReply(worker=self._worker, ok=False, reason="interrupted", why=_ENDED)
            level: Level = "warning"
            with trio.CancelScope(shield=True, deadline=self._stop_deadline) as scope:
                self._running.add(scope)
                reply, level = await self._get_reply(command, parameters)
            self._running.discard(scope)
            self._counts["done" if reply.ok else reply.reason] += 1
            definition = COMMAND_DEFINITIONS.get(command)
            if level == "info" and definition is not None and definition.is_routine:
                level = "debug"
            sender = received.sender if received else self._address.name
            self._log.event(
                "inbox:command-executed", level, command=command, sender=sender, ok=reply.ok, why=reply.why
            )
            if received is not None:
                await self._send_reply(received, reply)
        finally:
            self._slots.release()

    async def _get_reply(self, command: str, parameters: Mapping[str, Any]) -> tuple[CommandReply, Level]:
        try:
            with trio.fail_after(COMMAND_TIMEOUT):
                answer = await self._commands.perform(command, parameters)
            raw = msgspec.json.encode(answer)
        except CommandRefused as error:
            concerned = not isinstance(error, NotConcerned)
            return CommandReply(
                worker=self._worker, ok=False, reason="refused", why=str(error), concerned=concerned
            ), "warning" if concerned else "info"
        except trio.TooSlowError:
            why = f"it was not done after {COMMAND_TIMEOUT:g} s"
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why), "error"
        except BaseException as error:  # a bug in a handler must not end the process
            reraise_cancellation(error)
            why = describe_error(error, 1000)
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why), "error"
        if len(raw) > MAX_REPLY_SIZE:
            why = f"it was done, and its answer of {len(raw)} bytes is too large"
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why), "warning"
        return CommandReply(worker=self._worker, ok=True, answer=msgspec.Raw(raw)), "info"

    async def _send_reply(self, command: ControlCommand, reply: CommandReply) -> None:
        document = msgspec.json.encode(reply)
        call = trips.reply_to_command(self._keys, self._address.name, command.id, document)
        # Shielded: the command `shutdown` gets a reply, too.
        with trio.move_on_after(REPLY_TIMEOUT, shield=True):
            try:
                await self._redis.perform(call)
            except BrokerError as error:
                self._log.event("inbox:reply-failed", "warning", id=command.id, why=str(error))


_WITHOUT_INBOX = (
    "celery5 worker "
    + ", ".join(
        name
        for name, definition in COMMAND_DEFINITIONS.items()
        if definition.recipients >= WORKERS and definition.permission != "internal"
    )
    + " do not reach this worker; what it has to do again (a failed boot step, a check, a lost "
    "log line) does not outlive it"
)
_ENDED = "this worker ended, or began again, before it was done: it may be done in part"
_WITHOUT_KEYS = (
    "every command to this worker is refused, until this is mended: celery5 -A APP keys show, as its user"
)
_WITHOUT_SIGNATURES = (
    "whoever can write to this broker can command this worker: stop it, pause it, run tasks on it"
)
