"""Inbox: takes signed commands to this process, has them done, and answers (C73, C74, C75).

Floor: services. Reads: its inbox, and its channel, which says that something is there; the keys. Writes: nonces and
answers; what it posts to itself.

Nothing is polled: it looks when it is woken, when it begins, and when the listening connection was made anew. A command
is done once at most. What is refused is answered, too, counted, and never done.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from celery5.broker import inbox as trips
from celery5.broker.call import Call
from celery5.broker.inbox import ELSEWHERE, Letter
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable, CommandRefused, Misconfigured
from celery5.log import Level, Log
from celery5.protocol.job import new_id
from celery5.protocol.orders import LARGEST_ANSWER, Answer
from celery5.protocol.signing import (
    LARGEST,
    LONGEST_LIFE,
    NotAccepted,
    Order,
    Refusal,
    Signer,
    Trust,
    audience_of,
    is_id,
    seal,
    unseal,
)
from celery5.services.commands import HARMLESS_TO_REPEAT, ROUTINE, Commands
from celery5.services.passing import passes

AT_ONCE = 32
"""Commands read in one trip."""
PAUSE = 0.05
"""Seconds between two full trips: a flood gets no more than a part of the loop's time."""
AGAIN = 1.0
"""Seconds until another look, when Redis does not serve."""
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


class Redis(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[T], /) -> T: ...


class Keyring(Protocol):
    """Who signs here, and who is trusted."""

    def signer(self) -> Signer: ...

    def trust(self) -> Trust: ...

    def check(self) -> None: ...

    def remember(self, order: Order, now: float, /) -> Refusal | None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process is commanded: its `name`, in the application `app`. Whether it has an inbox at all (`open`),
    whether only signed commands count (`signed`), and whether another process will have the name when this one is
    gone (`lasting`)."""

    app: str
    name: str
    open: bool = True
    signed: bool = True
    lasting: bool = False

    @property
    def audience(self) -> str:
        """What a command for it must say."""
        return audience_of(self.app, self.name)


class OwnPost:
    """Posts commands to this very process: through its inbox when its name lasts, so that they outlive it; directly
    when it has no such inbox, or Redis is away."""

    def __init__(self, *, redis: Redis, keys: Keys, keyring: Keyring, address: Address) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = keyring
        self._address = address
        self._waiting: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._news = trio.Event()

    async def post(self, command: str, parameters: Mapping[str, Any], /) -> None:
        """Have this process do it soon. Raises CommandRefused when too many wait already."""
        if self._address.open and self._address.lasting and await self._posted(command, parameters):
            return
        if len(self._waiting) >= OWN:
            raise CommandRefused(
                f"{OWN} commands of this process to itself wait already: {command!r} is dropped"
            )
        self._waiting.append((command, dict(parameters)))
        self._news.set()

    def taken(self) -> tuple[str, Mapping[str, Any]] | None:
        """The next one that was posted directly."""
        return self._waiting.popleft() if self._waiting else None

    async def news(self) -> None:
        """Wait until one was posted directly, or somebody has rung."""
        await self._news.wait()
        self._news = trio.Event()

    def ring(self) -> None:
        """There may be something to do."""
        self._news.set()

    async def _posted(self, command: str, parameters: Mapping[str, Any]) -> bool:
        try:
            command_id, sealed = await trio.to_thread.run_sync(self._sealed, command, parameters)
            return await self._redis.perform(trips.post(self._keys, self._address.name, command_id, sealed))
        except (BrokerError, CommandRefused, Misconfigured):
            return False

    def _sealed(self, command: str, parameters: Mapping[str, Any]) -> tuple[str, bytes]:
        signer = self._keyring.signer() if self._address.signed else None
        now = time.time()
        order = Order(
            id=new_id(),
            audience=self._address.audience,
            issued=now,
            expires=now + LONGEST_LIFE,
            command=command,
            parameters=dict(parameters),
            sender=self._address.name,
        )
        return order.id, seal(order, signer)


class Inbox:
    """The inbox of one process."""

    def __init__(
        self,
        *,
        redis: Redis,
        keys: Keys,
        keyring: Keyring,
        address: Address,
        commands: Commands,
        posts: OwnPost,
        log: Log,
        worker: str,
        inbox_counts: Counter[str],
        commanded: dict[str, float],
        missed: Callable[[], object] = lambda: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = keyring
        self._address = address
        self._commands = commands
        self._own = posts
        self._log = log
        self._worker = worker
        self._slots = trio.Semaphore(TOGETHER)
        self._thread = trio.CapacityLimiter(1)
        self._done = commanded
        self._missed = missed
        self._held: set[trio.CancelScope] = set()
        self._leaves = math.inf
        self._second = (0, 0)
        self._counts = inbox_counts

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [self._keys.inbox(self._address.name)] if self._address.open else []

    def hear(self, _channel: bytes, _payload: bytes) -> None:
        """Something was posted."""
        self._own.ring()

    def look_again(self) -> None:
        """The listening connection was made anew: something may have been missed."""
        self._own.ring()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take commands until cancelled."""
        self._warn()
        task_status.started()
        self._own.ring()  # what was posted while nobody listened
        self._leaves = math.inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_keys)
            try:
                await self._take(nursery)
            finally:  # what was begun is ended, and answered
                self._leaves = trio.current_time() + STOP_LIMIT
                for each in self._held:
                    each.deadline = min(each.deadline, self._leaves)

    async def _take(self, nursery: trio.Nursery) -> None:
        while True:
            await self._own.news()
            while (own := self._own.taken()) is not None:
                await self._slots.acquire()
                nursery.start_soon(self._do, *own, None)
            if self._address.open and not await self._read(nursery):
                nursery.start_soon(self._ring_later)

    def _warn(self) -> None:
        if not self._address.open:
            self._log.event("inbox:off", "warning", lost=_LOST)
        elif not self._address.signed:
            self._log.event("inbox:unsigned", "warning", lost=_UNSIGNED)

    async def _check_keys(self) -> None:
        """Tell at once of keys with which no command could be checked, not when the first one has come."""
        if not (self._address.open and self._address.signed):
            return
        try:
            await trio.to_thread.run_sync(self._keyring.check, limiter=self._thread, abandon_on_cancel=True)
        except (Misconfigured, OSError, ValueError) as error:
            self._log.event("inbox:no-keys", "warning", why=str(error), lost=_NO_KEYS)

    async def _ring_later(self) -> None:
        await trio.sleep(AGAIN)
        self._own.ring()

    async def _read(self, nursery: trio.Nursery) -> bool:
        """Take what is there; False when Redis does not serve just now."""
        call = trips.letters(self._keys, self._address.name, count=AT_ONCE, largest=LARGEST)
        try:
            while found := await self._redis.perform(call):
                for letter in found:
                    await self._receive(letter, nursery)
                if len(found) == AT_ONCE:
                    await trio.sleep(PAUSE)
        except BrokerUnavailable:
            return False
        except BrokerReplied as error:
            self._log.event("inbox:unreadable", "warning", why=str(error))
            return not passes(error)
        return True

    async def _receive(self, letter: Letter, nursery: trio.Nursery) -> None:
        try:
            order = await trio.to_thread.run_sync(self._opened, letter, limiter=self._thread)
        except NotAccepted as error:
            await self._refuse(letter, error, entry=letter.entry)
            return
        await self._slots.acquire()
        begun = False
        try:
            call = trips.take(self._keys, self._address.name, order.id, letter.entry, worker=self._worker)
            # Nothing may come between taking it and doing it: nobody else will.
            with trio.CancelScope(shield=True):
                taken = await self._redis.perform(call)
                if taken == ELSEWHERE:
                    return
                refusal = await self._noted(order) if taken and self._is_first(order) else Refusal.REPLAYED
                if refusal is not None:
                    with trio.move_on_after(ANSWER_LIMIT):
                        await self._refuse(letter, NotAccepted(refusal))
                    return
            begun = True
            nursery.start_soon(self._do, order.command, order.parameters, order)
        finally:
            if not begun:
                self._slots.release()

    def _opened(self, letter: Letter) -> Order:
        """In a thread: files are read, and the first time libraries are imported."""
        if letter.size > LARGEST:
            raise NotAccepted(Refusal.OVERSIZED, f"{letter.size} bytes")
        try:
            trust = self._keyring.trust() if self._address.signed else None
        except (Misconfigured, OSError, ValueError) as error:
            raise NotAccepted(Refusal.NO_KEYS, str(error)) from None
        try:
            return unseal(letter.sealed, audience=self._address.audience, trust=trust, now=time.time())
        except NotAccepted:
            raise
        except Exception as error:  # anybody may write here, and what they wrote must not end this process
            raise NotAccepted(Refusal.MALFORMED, f"{type(error).__name__}: {error}"[:200]) from None

    def _is_first(self, order: Order) -> bool:
        """Whoever can write to Redis may remove a nonce there: we remember what was done here, too."""
        now = time.time()
        for each in [each for each, expires in self._done.items() if expires <= now]:
            del self._done[each]
        if order.id in self._done:
            return False
        self._done[order.id] = order.expires
        return True

    async def _noted(self, order: Order) -> Refusal | None:
        """Record on the disk that this command is about to be done, for the next process of this name; return the
        reason if it must not be done."""
        if not self._address.signed:
            return None  # without signatures anyone who can write to Redis can send commands anyway
        if order.command in HARMLESS_TO_REPEAT:
            return None
        with trio.move_on_after(NOTE_LIMIT):
            return await trio.to_thread.run_sync(
                self._keyring.remember, order, time.time(), limiter=self._thread, abandon_on_cancel=True
            )
        return Refusal.UNREMEMBERED

    async def _refuse(self, letter: Letter, error: NotAccepted, *, entry: bytes = b"") -> None:
        self._counts[error.reason.value] += 1
        self._tell_refused(letter, error)
        if error.reason is Refusal.EXPIRED:
            self._missed()  # whoever sent it did so in vain: this process may have been busy for too long
        answer = Answer(worker=self._worker, ok=False, reason=error.reason, why=str(error))
        document = msgspec.json.encode(answer) if is_id(letter.id) else b""
        command_id = letter.id if document else "none"
        replayed = error.reason is Refusal.REPLAYED
        call = trips.answer(
            self._keys, self._address.name, command_id, document, refused=entry, first=replayed
        )
        await self._redis.perform(call)

    def _tell_refused(self, letter: Letter, error: NotAccepted) -> None:
        second, told = self._second
        now = int(time.monotonic())
        self._second = (now, 1) if now != second else (now, told + 1)
        if self._second[1] > TOLD:
            self._counts["untold"] += 1
            return
        self._log.event(
            "inbox:refused",
            "warning",
            reason=error.reason.value,
            why=str(error),
            id=letter.id,
            size=letter.size,
        )

    async def _do(self, command: str, parameters: Mapping[str, Any], order: Order | None) -> None:
        """Have it done, and answer. Without an order it is our own, and nobody waits for an answer."""
        try:
            answer = Answer(worker=self._worker, ok=False, reason="interrupted", why=_ENDED)
            level: Level = "warning"
            with trio.CancelScope(shield=True, deadline=self._leaves) as held:
                self._held.add(held)
                answer, level = await self._answer_to(command, parameters)
            self._held.discard(held)
            self._counts["done" if answer.ok else answer.reason] += 1
            if level == "info" and command in ROUTINE:
                level = "debug"
            sender = order.sender if order else self._address.name
            self._log.event("inbox:done", level, command=command, sender=sender, ok=answer.ok, why=answer.why)
            if order is not None:
                await self._reply(order, answer)
        finally:
            self._slots.release()

    async def _answer_to(self, command: str, parameters: Mapping[str, Any]) -> tuple[Answer, Level]:
        try:
            with trio.fail_after(LIMIT):
                said = await self._commands.perform(command, parameters)
            raw = msgspec.json.encode(said)
        except CommandRefused as error:
            return Answer(worker=self._worker, ok=False, reason="refused", why=str(error)), "warning"
        except trio.TooSlowError:
            why = f"it was not done after {LIMIT:g} s"
            return Answer(worker=self._worker, ok=False, reason="failed", why=why), "error"
        except Exception as error:  # a handler's fault is no reason to end a worker
            why = f"{type(error).__name__}: {error}"
            return Answer(worker=self._worker, ok=False, reason="failed", why=why[:1000]), "error"
        if len(raw) > LARGEST_ANSWER:
            why = f"it was done, and its answer of {len(raw)} bytes is too large"
            return Answer(worker=self._worker, ok=False, reason="failed", why=why), "warning"
        return Answer(worker=self._worker, ok=True, answer=msgspec.Raw(raw)), "info"

    async def _reply(self, order: Order, answer: Answer) -> None:
        call = trips.answer(self._keys, self._address.name, order.id, msgspec.json.encode(answer))
        # Also while this process ends: a command to end is answered like others.
        with trio.move_on_after(ANSWER_LIMIT, shield=True):
            try:
                await self._redis.perform(call)
            except BrokerError as error:
                self._log.event("inbox:unanswered", "warning", id=order.id, why=str(error))


_LOST = (
    "celery5 worker ping, stats, active, pause-queue, resume-queue, revoke, shutdown, reload, retry-boot-step, "
    "budget, run and tell (health, set-log-level) do not reach this worker; what it has to do again (a failed boot "
    "step, a check, a lost log line) does not outlive it"
)
_ENDED = "this worker ended, or began anew, before it was done: it may be done in part"
_NO_KEYS = (
    "every command to this worker is refused, until this is mended: celery5 -A APP keys show, as its user"
)
_UNSIGNED = "whoever can write to this broker can command this worker: stop it, pause it, run tasks on it"
