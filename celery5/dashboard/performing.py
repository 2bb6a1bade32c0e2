"""Perform operations for users: check the role, record who did it, and read once for all tabs."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import msgspec
from starlette.requests import HTTPConnection

from celery5.app import App
from celery5.broker.calls.jobs import PING
from celery5.broker.reply_limit import limit_replies
from celery5.dashboard.access import User
from celery5.dashboard.dead_letter_index import DeadLetterIndex
from celery5.dashboard.formats import encode_json
from celery5.dashboard.withholding import withhold
from celery5.errors import (
    BadArguments,
    BrokerUnavailable,
    CeleryError,
    CommandRefused,
    Misconfigured,
    UnknownName,
    UnknownQueue,
    UnknownTask,
)
from celery5.operations.operation import Effect, NotFound, Operation
from celery5.operations.table import OPERATIONS
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_outage_text
from celery5.similar_names import did_you_mean

READ_ONCE = 1.0
"""Seconds for which all who look at the same thing share one look at Redis."""
SHARED_FACTOR, MAX_SHARED_TIME = 20.0, 15.0
"""A look that took long is shared for this many times as long, and at most for this many seconds."""
TIME_LIMIT = 30.0
"""Seconds that an operation may take."""
MAX_SHARED, MAX_SHARED_SIZE = 200, 32 * 1024 * 1024
"""Looks that are kept to be shared, and bytes of all of them, as JSON."""
MAX_SHARED_AGE = 2 * MAX_SHARED_TIME
"""Seconds after which a look is forgotten: nobody would be shown it any more."""

READ_AHEAD_PAUSE = 0.2
"""Seconds between two steps of reading ahead: it takes a fifth of a core at most."""


class KeptReads(Protocol):
    """Performs one operation of an application that reads, and keeps what its next calls need."""

    async def answer(self, asked: Any) -> Any:
        """Perform the operation."""
        ...

    async def read_ahead(self) -> None:
        """Read a part of what the next call needs, for some 50 ms; nothing when it needs nothing."""
        ...


KEPT: Mapping[str, Callable[[App], KeptReads]] = {"dlq:groups": DeadLetterIndex}
"""What performs an operation here, where reading all again at each look would take too long."""


class Forbidden(CeleryError):
    """The role of the user does not allow it."""


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed: the status of HTTP, and one line."""

    status: int
    detail: str


def describe_problem(error: Exception, request: HTTPConnection) -> Problem:
    """Return what to answer when an operation has raised. What nobody expects is noted, for the log."""
    match error:
        case NotFound() | UnknownName() | UnknownQueue() | UnknownTask():
            return Problem(404, str(error))
        case Forbidden():
            return Problem(403, str(error))
        case Misconfigured() | BadArguments() | CommandRefused():
            return Problem(400, str(error))
        case BrokerUnavailable():
            return Problem(503, get_outage_text(str(error)))
        case TimeoutError():
            return Problem(504, f"this took longer than {TIME_LIMIT:g} s and was given up")
        case CeleryError():
            return Problem(409, str(error))
        case _:
            request.scope.setdefault("state", {})["unexpected"] = error
            why = describe_error(error, MAX_ERROR_LENGTH)
            return Problem(500, f"something that is read is not as it should be ({why}): the log has more")


@dataclass(slots=True)
class _SharedRead:
    """One look that several share; whoever has the lock looks."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    # Until when it is shared, and until when it is shared while somebody reads it again.
    until: float = -1e9
    usable_until: float = -1e9
    value: Any = None
    # Bytes of the value, as JSON.
    size: int = 0
    read_at: float = math.inf
    # Why the last look failed, and when: whoever waited for it is told the same, and does not wait once more.
    failure: BrokerUnavailable | None = None
    failed_at: float = -1e9


def _check_role(operation: Operation, user: User, *, by: Operation | None = None) -> None:
    """Raise Forbidden unless a user may perform an operation, or what another one continues `by` it."""
    if not operation.effect.allows(user.role):
        what = operation.name if by is None else f"{by.name} of a {operation.name}"
        raise Forbidden(f"{what} is for {operation.role}s; the role of {user.name} is {user.role}")


async def _require_answer(app: App) -> None:
    """Raise BrokerUnavailable if no broker of an application answers: then a change has not begun."""
    unanswered: BrokerUnavailable | None = None
    for name in app.brokers.names:
        try:
            await (await app.brokers.get(name).get_async_driver()).perform(PING)
            return
        except BrokerUnavailable as error:
            unanswered = unanswered or error
    assert unanswered is not None
    raise unanswered


class Performer:
    """Performs the operations of some applications.

    Args:
        apps: The applications, by name.
    """

    def __init__(self, apps: Mapping[str, App]) -> None:
        self.apps = apps
        self._shared: OrderedDict[tuple[str, str, bytes], _SharedRead] = OrderedDict()
        # What is kept of an application for an operation, by its name and that of the operation.
        self._kept: dict[tuple[str, str], KeptReads] = {}

    def get_operation(self, noun: str, verb: str) -> Operation:
        """Return an operation. Raises NotFound."""
        name = f"{noun}:{verb}"
        if name not in OPERATIONS:
            hint = did_you_mean(name, OPERATIONS)
            raise NotFound(f"there is no operation {name!r}" + (f"; {hint}" if hint else ""))
        return OPERATIONS[name]

    def get_app(self, name: str) -> App:
        """Return an application. Raises NotFound."""
        if name not in self.apps:
            raise NotFound(f"there is no application {name!r} here")
        return self.apps[name]

    async def perform(
        self,
        app_name: str,
        operation: Operation,
        raw: Mapping[str, Any],
        user: User,
        *,
        is_text: bool = False,
    ) -> Any:
        """Return the result of an operation.

        Args:
            app_name: The application.
            operation: What to do.
            raw: Its parameters.
            user: Who asks for it.
            is_text: Whether numbers and truth values are texts, as in a form.

        Raises:
            NotFound: There is no such application or thing.
            Forbidden: The user may not do it.
            Misconfigured: A parameter is wrong.
            CeleryError: It cannot be done.
            TimeoutError: It took too long.
        """
        app = self.get_app(app_name)
        _check_role(operation, user)
        parameters = operation.parse(raw, is_text=is_text)
        with anyio.fail_after(TIME_LIMIT):
            if operation.find_continued is not None:
                continued = await operation.find_continued(app, parameters)
                _check_role(OPERATIONS[continued], user, by=operation)
            if operation.is_change:
                await _require_answer(app)
                # A change that was sent is not given up soon: nobody would know whether it was done.
                with limit_replies(None), app.audit.acting_as(user.name, source="dashboard"):
                    return await self._call(app, operation, parameters)
            value = await self._read(app, operation, parameters)
        return value if Effect.SEE_CONFIDENTIAL.allows(user.role) else withhold(value, operation.result)

    async def _read(self, app: App, operation: Operation, parameters: Any) -> Any:
        key = (app.name, operation.name, msgspec.json.encode(parameters))
        shared = self._shared.setdefault(key, _SharedRead())
        self._shared.move_to_end(key)
        self._forget_old_reads()
        if shared.lock.locked() and anyio.current_time() < shared.usable_until:
            return shared.value
        asked_at = anyio.current_time()
        async with shared.lock:
            began = anyio.current_time()
            if shared.failure is not None and shared.failed_at > asked_at:
                raise BrokerUnavailable(str(shared.failure))
            if began >= shared.until:
                try:
                    shared.value = await self._call(app, operation, parameters)
                except BaseException as error:
                    shared.usable_until = began  # no old result is shown during an outage
                    shared.failure = error if isinstance(error, BrokerUnavailable) else None
                    shared.failed_at = anyio.current_time()
                    raise
                shared.size = len(encode_json(shared.value))
                shared.read_at = ended = anyio.current_time()
                shared_for = max(READ_ONCE, min(SHARED_FACTOR * (ended - began), MAX_SHARED_TIME))
                shared.until, shared.usable_until = ended + shared_for, ended + 2 * shared_for
            return shared.value

    async def _call(self, app: App, operation: Operation, parameters: Any) -> Any:
        if operation.name not in KEPT:
            return await operation.perform(app, parameters)
        key = (app.name, operation.name)
        if key not in self._kept:
            self._kept[key] = KEPT[operation.name](app)
        return await self._kept[key].answer(parameters)

    async def read_ahead(self) -> None:
        """Read what operations need for their next calls, step by step, until cancelled."""
        while True:
            await anyio.sleep(READ_AHEAD_PAUSE)
            self._forget_old_reads()
            for kept in list(self._kept.values()):
                with suppress(Exception):  # whoever looks next is told of it: the server goes on
                    await kept.read_ahead()

    @property
    def shared_size(self) -> int:
        """Bytes of all looks that are kept to be shared, as JSON."""
        return sum(shared.size for shared in self._shared.values())

    def _forget_old_reads(self) -> None:
        """Forget looks that nobody would be shown, and the oldest ones as far as there are too many or too large ones.

        Whoever waits for one that is forgotten still gets it.
        """
        oldest = anyio.current_time() - MAX_SHARED_AGE
        for key in [key for key, shared in self._shared.items() if shared.read_at < oldest]:
            del self._shared[key]
        size = self.shared_size
        while len(self._shared) > MAX_SHARED or (size > MAX_SHARED_SIZE and len(self._shared) > 1):
            _, forgotten = self._shared.popitem(last=False)
            size -= forgotten.size

    def forget_reads(self, app_name: str) -> None:
        """Have the next looks at an application see what was just changed."""
        for key in [key for key in self._shared if key[0] == app_name]:
            del self._shared[key]
