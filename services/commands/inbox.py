"""Inbox: takes signed commands to this process, has them done, and answers.

Nothing is polled: it looks when it is woken, when it begins, and when the listening connection was made anew. A command
is done once at most. What is refused is answered, too, counted, and never done.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from celery5.broker.calls import commands as trips
from celery5.broker.calls.commands import TAKEN_BY_OTHER, QueuedCommand
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, BrokerReplied, CommandRefused, Misconfigured
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
from celery5.services.commands.dispatcher import CommandRegistry
from celery5.services.process.broker_outages import is_recoverable, retry_until_available

AT_ONCE = 32
"""Commands read in one trip."""
PAUSE = 0.05
"""Seconds between two full trips: a flood gets no more than a part of the loop's time."""
RETRY_DELAY = 1.0
"""Seconds until another look, when AsyncDriver does not serve."""
TOGETHER = 16
"""Commands that are being done at once."""
LIMIT = 120.0
"""Seconds that a command may take."""
ANSWER_LIMIT = 2.0
"""Seconds that an answer may take to be written, also while this process ends."""
NOTE_LIMIT = 2.0
"""The most seconds for recording on the disk that a command is about to be done."""
STOP_LIMIT = 2.0
"""Seconds that commands which are being done get when this process ends, or begins anew."""
OWN = 100
"""Commands to itself that a process keeps at most."""
TOLD = 10
"""Refusals that are logged in a second; the others are counted."""

T = TypeVar("T")


class InboxKeyring(Protocol):
    """Who signs here, and who is trusted."""

    def get_signer(self) -> Signer: ...

    def get_trust_store(self) -> TrustStore: ...

    def check(self) -> None: ...

    def record_command(self, order: ControlCommand, now: float, /) -> RefusalReason | None: ...


@dataclass(frozen=True, slots=True)
class InboxAddress:
    """Where a process is commanded: its `name`, in the application `app`. Whether it has an inbox at all (`open`),
    whether only signed commands count (`signed`), and whether another process will have the name when this one is
    gone (`lasting`)."""

    app: str
    name: str
    is_open: bool = True
    is_signed: bool = True
    is_durable: bool = False

    @property
    def audience(self) -> str:
        """What a command for it must say."""
        return format_audience(self.app, self.name)


class SelfCommandQueue:
    """Posts commands to this very process: through its inbox when its name lasts, so that they outlive it; directly
    when it has no such inbox, or Redis is away."""

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
        """Have this process do it soon. Raises CommandRefused when too many wait already."""
        if self._address.is_open and self._address.is_durable and await self._posted(command, parameters):
            return
        if len(self._waiting) >= OWN:
            raise CommandRefused(
                f"{OWN} commands of this process to itself wait already: {command!r} is dropped"
            )
        self._waiting.append((command, dict(parameters)))
        self._added.set()

    async def take_next(self) -> tuple[str, Mapping[str, Any]]:
        """Return the next command that did not go through the inbox; wait for one."""
        while not self._waiting:
            await self._added.wait()
            self._added = trio.Event()
        return self._waiting.popleft()

    async def _posted(self, command: str, parameters: Mapping[str, Any]) -> bool:
        try:
            command_id, sealed = await trio.to_thread.run_sync(self._sealed, command, parameters)
            return await self._redis.perform(
                trips.send_command(self._keys, self._address.name, command_id, sealed)
            )
        except (BrokerError, CommandRefused, Misconfigured):
            return False

    def _sealed(self, command: str, parameters: Mapping[str, Any]) -> tuple[str, bytes]:
        signer = self._keyring.get_signer() if self._address.is_signed else None
        now = time.time()
        order = ControlCommand(
            id=new_id(),
            audience=self._address.audience,
            issued=now,
            expires=now + MAX_COMMAND_LIFETIME,
            command=command,
            parameters=dict(parameters),
            sender=self._address.name,
        )
        return order.id, sign_command(order, signer)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxIdentity:
    """Who takes the commands of an inbox."""

    # The whole name of the process.
    worker: str
    # Where commands arrive.
    address: InboxAddress
    # Who signs here, and who is trusted.
    keyring: InboxKeyring


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """What became of the commands of a process, kept over its incarnations."""

    # How many commands came, by what became of them.
    command_counts: Counter[str]
    # When each command that was performed expires, by id.
    performed_commands: dict[str, float]


class Inbox:
    """The inbox of one process."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        command_record: CommandRecord,
        inbox_identity: InboxIdentity,
        keys: Keys,
        commands: CommandRegistry,
        self_commands: SelfCommandQueue,
        log: Log,
        on_expired: Callable[[], object] = lambda: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = inbox_identity.keyring
        self._address = inbox_identity.address
        self._commands = commands
        self._own = self_commands
        self._log = log
        self._worker = inbox_identity.worker
        self._slots = trio.Semaphore(TOGETHER)
        self._thread = trio.CapacityLimiter(1)
        self._done = command_record.performed_commands
        self._missed = on_expired
        self._held: set[trio.CancelScope] = set()
        self._leaves = math.inf
        self._may_have_commands = trio.Event()
        self._second = (0, 0)
        self._counts = command_record.command_counts

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [self._keys.inbox(self._address.name)] if self._address.is_open else []

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Read commands: one was sent."""
        self._may_have_commands.set()

    def recheck(self) -> None:
        """Read commands: a message may have been missed while the connection was down."""
        self._may_have_commands.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take commands until cancelled."""
        self._warn()
        task_status.started()
        self._may_have_commands.set()  # some may have been sent while this process did not listen
        self._leaves = math.inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_keys)
            nursery.start_soon(self._take_own_commands, nursery)
            try:
                await self._take_commands(nursery)
            finally:  # what was begun is ended, and answered
                self._leaves = trio.current_time() + STOP_LIMIT
                for each in self._held:
                    each.deadline = min(each.deadline, self._leaves)

    async def _take_own_commands(self, nursery: trio.Nursery) -> None:
        while True:
            command, parameters = await self._own.take_next()
            await self._slots.acquire()
            nursery.start_soon(self._do, command, parameters, None)

    async def _take_commands(self, nursery: trio.Nursery) -> None:
        if not self._address.is_open:
            await trio.sleep_forever()
        while True:
            await self._may_have_commands.wait()
            self._may_have_commands = trio.Event()
            await retry_until_available(partial(self._read, nursery), None, RETRY_DELAY)

    def _warn(self) -> None:
        if not self._address.is_open:
            self._log.event("inbox:disabled", "warning", lost=_LOST)
        elif not self._address.is_signed:
            self._log.event("inbox:signatures-disabled", "warning", lost=_UNSIGNED)

    async def _check_keys(self) -> None:
        """Tell at once of keys with which no command could be checked, not when the first one has come."""
        if not (self._address.is_open and self._address.is_signed):
            return
        try:
            await trio.to_thread.run_sync(self._keyring.check, limiter=self._thread, abandon_on_cancel=True)
        except (Misconfigured, OSError, ValueError) as error:
            self._log.event("inbox:keys-rejected", "warning", why=str(error), lost=_NO_KEYS)

    async def _read(self, nursery: trio.Nursery) -> None:
        """Start all commands in the inbox. Raises BrokerReplied or BrokerUnavailable where a later try may succeed."""
        call = trips.read_commands(self._keys, self._address.name, count=AT_ONCE, max_bytes=MAX_COMMAND_SIZE)
        try:
            while found := await self._redis.perform(call):
                for letter in found:
                    await self._receive(letter, nursery)
                if len(found) == AT_ONCE:
                    await trio.sleep(PAUSE)
        except BrokerReplied as error:
            self._log.event("inbox:read-failed", "warning", why=str(error))
            if is_recoverable(error):
                raise

    async def _receive(self, letter: QueuedCommand, nursery: trio.Nursery) -> None:
        try:
            order = await trio.to_thread.run_sync(self._opened, letter, limiter=self._thread)
        except CommandNotAccepted as error:
            await self._refuse(letter, error, entry=letter.entry)
            return
        await self._slots.acquire()
        begun = False
        try:
            call = trips.take_command(
                self._keys, self._address.name, order.id, letter.entry, worker=self._worker
            )
            # Nothing may come between taking it and doing it: nobody else will.
            with trio.CancelScope(shield=True):
                taken = await self._redis.perform(call)
                if taken == TAKEN_BY_OTHER:
                    return
                refusal = (
                    await self._noted(order) if taken and self._is_first(order) else RefusalReason.REPLAYED
                )
                if refusal is not None:
                    with trio.move_on_after(ANSWER_LIMIT):
                        await self._refuse(letter, CommandNotAccepted(refusal))
                    return
            begun = True
            nursery.start_soon(self._do, order.command, order.parameters, order)
        finally:
            if not begun:
                self._slots.release()

    def _opened(self, letter: QueuedCommand) -> ControlCommand:
        """In a thread: files are read, and the first time libraries are imported."""
        if letter.size > MAX_COMMAND_SIZE:
            raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{letter.size} bytes")
        try:
            trust = self._keyring.get_trust_store() if self._address.is_signed else None
        except (Misconfigured, OSError, ValueError) as error:
            raise CommandNotAccepted(RefusalReason.NO_KEYS, str(error)) from None
        try:
            return verify_command(
                letter.sealed, audience=self._address.audience, trust=trust, now=time.time()
            )
        except CommandNotAccepted:
            raise
        except Exception as error:  # anybody may write here, and what they wrote must not end this process
            raise CommandNotAccepted(
                RefusalReason.MALFORMED, f"{type(error).__name__}: {error}"[:200]
            ) from None

    def _is_first(self, order: ControlCommand) -> bool:
        """Whoever can write to Redis may remove a nonce there: we remember what was done here, too."""
        now = time.time()
        for each in [each for each, expires in self._done.items() if expires <= now]:
            del self._done[each]
        if order.id in self._done:
            return False
        self._done[order.id] = order.expires
        return True

    async def _noted(self, order: ControlCommand) -> RefusalReason | None:
        """Record on the disk that this command is about to be done, for the next process of this name; return the
        reason if it must not be done."""
        if not self._address.is_signed:
            return None  # without signatures anyone who can write to Redis can send commands anyway
        definition = COMMAND_DEFINITIONS.get(order.command)
        if definition is not None and definition.is_idempotent:
            return None
        with trio.move_on_after(NOTE_LIMIT):
            return await trio.to_thread.run_sync(
                self._keyring.record_command, order, time.time(), limiter=self._thread, abandon_on_cancel=True
            )
        return RefusalReason.UNREMEMBERED

    async def _refuse(self, letter: QueuedCommand, error: CommandNotAccepted, *, entry: bytes = b"") -> None:
        self._counts[error.reason.value] += 1
        self._tell_refused(letter, error)
        if error.reason is RefusalReason.EXPIRED:
            self._missed()  # whoever sent it did so in vain: this process may have been busy for too long
        answer = CommandReply(worker=self._worker, ok=False, reason=error.reason, why=str(error))
        document = msgspec.json.encode(answer) if is_command_id(letter.id) else b""
        command_id = letter.id if document else "none"
        replayed = error.reason is RefusalReason.REPLAYED
        call = trips.reply_to_command(
            self._keys, self._address.name, command_id, document, refused_entry=entry, keep_first=replayed
        )
        await self._redis.perform(call)

    def _tell_refused(self, letter: QueuedCommand, error: CommandNotAccepted) -> None:
        second, told = self._second
        now = int(time.monotonic())
        self._second = (now, 1) if now != second else (now, told + 1)
        if self._second[1] > TOLD:
            self._counts["untold"] += 1
            return
        self._log.event(
            "inbox:command-refused",
            "warning",
            reason=error.reason.value,
            why=str(error),
            id=letter.id,
            size=letter.size,
        )

    async def _do(self, command: str, parameters: Mapping[str, Any], order: ControlCommand | None) -> None:
        """Have it done, and answer. Without an order it is our own, and nobody waits for an answer."""
        try:
            answer = CommandReply(worker=self._worker, ok=False, reason="interrupted", why=_ENDED)
            level: Level = "warning"
            with trio.CancelScope(shield=True, deadline=self._leaves) as held:
                self._held.add(held)
                answer, level = await self._answer_to(command, parameters)
            self._held.discard(held)
            self._counts["done" if answer.ok else answer.reason] += 1
            definition = COMMAND_DEFINITIONS.get(command)
            if level == "info" and definition is not None and definition.is_routine:
                level = "debug"
            sender = order.sender if order else self._address.name
            self._log.event(
                "inbox:command-executed", level, command=command, sender=sender, ok=answer.ok, why=answer.why
            )
            if order is not None:
                await self._reply(order, answer)
        finally:
            self._slots.release()

    async def _answer_to(self, command: str, parameters: Mapping[str, Any]) -> tuple[CommandReply, Level]:
        try:
            with trio.fail_after(LIMIT):
                said = await self._commands.perform(command, parameters)
            raw = msgspec.json.encode(said)
        except CommandRefused as error:
            return CommandReply(worker=self._worker, ok=False, reason="refused", why=str(error)), "warning"
        except trio.TooSlowError:
            why = f"it was not done after {LIMIT:g} s"
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why), "error"
        except Exception as error:  # a handler's fault is no reason to end a worker
            why = f"{type(error).__name__}: {error}"
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why[:1000]), "error"
        if len(raw) > MAX_REPLY_SIZE:
            why = f"it was done, and its answer of {len(raw)} bytes is too large"
            return CommandReply(worker=self._worker, ok=False, reason="failed", why=why), "warning"
        return CommandReply(worker=self._worker, ok=True, answer=msgspec.Raw(raw)), "info"

    async def _reply(self, order: ControlCommand, answer: CommandReply) -> None:
        call = trips.reply_to_command(self._keys, self._address.name, order.id, msgspec.json.encode(answer))
        # Also while this process ends: a command to end is answered like others.
        with trio.move_on_after(ANSWER_LIMIT, shield=True):
            try:
                await self._redis.perform(call)
            except BrokerError as error:
                self._log.event("inbox:reply-failed", "warning", id=order.id, why=str(error))


_LOST = (
    "celery5 worker "
    + ", ".join(
        name
        for name, definition in COMMAND_DEFINITIONS.items()
        if definition.recipients >= WORKERS and definition.permission != "internal"
    )
    + " do not reach this worker; what it has to do again (a failed boot step, a check, a lost "
    "log line) does not outlive it"
)
_ENDED = "this worker ended, or began anew, before it was done: it may be done in part"
_NO_KEYS = (
    "every command to this worker is refused, until this is mended: celery5 -A APP keys show, as its user"
)
_UNSIGNED = "whoever can write to this broker can command this worker: stop it, pause it, run tasks on it"
