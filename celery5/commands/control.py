"""Control: tells workers what to do, and gives what each of them answers (C7, C73): `app.control`.

Each worker gets a command of its own, signed for its inbox alone. Whoever does not answer in time is told of like those
who do: a command for a worker that is down waits for its return, for as long as it is good.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from celery5.broker.calls import commands as trips
from celery5.broker.calls import jobs
from celery5.broker.colour import run_in_thread
from celery5.broker.coroutines import (
    AwaitableConnections,
    BlockingConnections,
    BlockingDriverAdapter,
    run_blocking,
)
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter
from celery5.commands.keyring import Keyring, get_key_folder
from celery5.errors import BrokerError, BrokerUnavailable, CommandRefused, Misconfigured, UnknownQueue
from celery5.hints import make_attribute_error
from celery5.protocol.commands.definitions import (
    COMMAND_DEFINITIONS,
    PAUSE_QUEUE,
    PING,
    RESUME_QUEUE,
    RUN_TASK,
    CommandReply,
    find_inbox,
    format_living_workers,
    get_inbox_name,
)
from celery5.protocol.commands.signing import (
    MAX_COMMAND_LIFETIME,
    ControlCommand,
    format_audience,
    sign_command,
)
from celery5.protocol.job.job import new_id
from celery5.results.async_result import AsyncResult
from celery5.results.job_details import read_app_state

if TYPE_CHECKING:
    from celery5.application import Application
    from celery5.tasks.task import Signature

TIMEOUT = 5.0
"""Seconds that answers are waited for."""
To = str | Sequence[str] | None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker says to a command: its `answer` when `ok`, else the `reason` in a word and `why` in a sentence.

    Reasons: `refused` and `failed` by the command itself; `no-answer`; `full`, its inbox; and why a worker does not
    accept a command: `unknown-issuer`, `expired` and the others of the guide.
    """

    worker: str
    ok: bool
    answer: Any = None
    reason: str = ""
    why: str = ""


class Control:
    """The workers of an application: `app.control`.

    `to` is a worker, or several: what `workers` gives, the full name of one that lives, or a name that a worker which
    is down will have again; all that live without it. `timeout` is how long answers are waited for, in seconds,
    `expires` how long the command is good, 60 at most: a minute without it, and `timeout` for `shutdown` and
    `run-task`. Raises Misconfigured for what makes no sense and for keys that cannot sign, BrokerError.
    """

    REACHED_AS: ClassVar[str] = "app.control."

    def __init__(self, app: "Application") -> None:
        self._app = app
        self._keyrings: dict[tuple[str, str], Keyring] = {}

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("control", self, name)

    @property
    def keyring(self) -> Keyring:
        """The keys that this application's commands are signed with on this host."""
        settings = self._app.settings
        said = settings.keys, settings.keys_usage
        if said not in self._keyrings:
            folder = get_key_folder(self._app.name, settings.keys, os.environ)
            self._keyrings[said] = Keyring(folder, owner=self._app.name, usage=settings.keys_usage)
        return self._keyrings[said]

    def workers(self) -> tuple[str, ...]:
        """The processes that live, by the names of their inboxes. For plain Python."""
        return run_blocking(_living(self._app, self._plain()))

    async def aworkers(self) -> tuple[str, ...]:
        """`workers`, from Trio or asyncio."""
        return await _living(self._app, await self._app.connections.get_async_driver())

    def send(
        self,
        command: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        to: To = None,
        timeout: float = TIMEOUT,
        expires: float | None = None,
    ) -> list[Reply]:
        """Send a command to workers; return the reply of each, sorted by name. For plain Python.

        `COMMAND_DEFINITIONS` lists the commands. While no worker lives, `pause-queue` and `resume-queue` take effect
        for workers that start later, and the list is empty; they raise UnknownQueue for a queue that nobody uses.
        """
        request = _make_request(command, parameters, to, timeout, expires)
        return run_blocking(self._send(BlockingConnections(self._app.connections), request))

    async def asend(
        self,
        command: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        to: To = None,
        timeout: float = TIMEOUT,
        expires: float | None = None,
    ) -> list[Reply]:
        """`send`, from Trio or asyncio."""
        return await self._send(
            self._app.connections, _make_request(command, parameters, to, timeout, expires)
        )

    async def _send(self, connections: AwaitableConnections, request: "_Request") -> list[Reply]:
        redis = await connections.get_async_driver()
        inboxes = await _inboxes(self._app, redis, request)
        commands = await run_in_thread(lambda: self._sign_commands(request, inboxes))
        waiter = await connections.get_async_result_waiter()
        return await _sent(self._app, redis, waiter, request, commands)

    def ping(self, *, to: To = None, timeout: float = TIMEOUT) -> list[Reply]:
        """Whether workers answer. For plain Python."""
        return self.send(PING.name, to=to, timeout=timeout, expires=min(timeout, MAX_COMMAND_LIFETIME))

    async def aping(self, *, to: To = None, timeout: float = TIMEOUT) -> list[Reply]:
        """`ping`, from Trio or asyncio."""
        return await self.asend(PING.name, to=to, timeout=timeout, expires=min(timeout, MAX_COMMAND_LIFETIME))

    def run(self, call: "Signature[Any]", *, to: str, timeout: float = TIMEOUT) -> AsyncResult[Any]:
        """Have one worker run a job, like an actor (C7): `app.control.run(resize.s(path), to="web1")`. Its result is
        waited for as always; should it be tried again, it may be elsewhere. Raises CommandRefused when the worker will
        not, or does not answer. For plain Python."""
        order = self._direct(call)
        return self._ran(
            call, order, self.send(RUN_TASK.name, order, to=to, timeout=timeout, expires=timeout)
        )

    async def arun(self, call: "Signature[Any]", *, to: str, timeout: float = TIMEOUT) -> AsyncResult[Any]:
        """`run`, from Trio or asyncio."""
        order = self._direct(call)
        return self._ran(
            call, order, await self.asend(RUN_TASK.name, order, to=to, timeout=timeout, expires=timeout)
        )

    def _direct(self, call: "Signature[Any]") -> dict[str, str]:
        job = call.job()
        if job.at or job.lock:
            raise Misconfigured("a job that runs on one worker at once has neither a countdown nor a key")
        return {"job": job.message.decode(), "queue": job.queue, "id": job.id}

    def _ran(
        self, call: "Signature[Any]", order: Mapping[str, str], replies: list[Reply]
    ) -> AsyncResult[Any]:
        (reply,) = replies
        if not reply.ok:
            raise CommandRefused(f"{reply.worker} does not run it: {reply.why}")
        return AsyncResult(
            self._app, order["id"], queue=order["queue"], task=call.task.name, type=call.task.result_type
        )

    def _sign_commands(self, request: "_Request", inboxes: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Return the id and the bytes of the command for each inbox. Reads files, and makes keys the first time."""
        signer = self.keyring.get_signer() if self._app.settings.inbox_signatures else None
        now, signed = time.time(), dict[str, tuple[str, bytes]]()
        for inbox in inboxes:
            command = ControlCommand(
                id=new_id() + self._end_of(inbox),
                audience=format_audience(self._app.name, inbox),
                issued=now,
                expires=now + request.expires,
                command=request.command,
                parameters=request.parameters,
                sender=_sender(),
            )
            signed[inbox] = (command.id, sign_command(command, signer))
        return signed

    def _end_of(self, inbox: str) -> str:
        """What a command's id ends with, when its inbox is on another broker than the default one: what is about it is
        there, too."""
        _, at, broker = inbox.rpartition("@")
        return f"@{broker}" if at and broker in self._app.brokers.names else ""

    def _plain(self) -> AsyncDriver:
        return BlockingDriverAdapter(self._app.connections.get_blocking_driver())


class _Request(msgspec.Struct, frozen=True):
    """What is to be sent, checked."""

    command: str
    parameters: dict[str, Any]
    to: tuple[str, ...]
    timeout: float
    expires: float


async def _living(app: "Application", redis: AsyncDriver) -> tuple[str, ...]:
    state = await read_app_state(app, redis, None)
    return tuple(sorted({get_inbox_name(each) for each in state.workers}))


async def _inboxes(app: "Application", redis: AsyncDriver, request: "_Request") -> tuple[str, ...]:
    to = request.to
    if not to:
        return await _living(app, redis) or await _set_paused(app, redis, request)
    if not any(":" in each for each in to):
        return to  # no incarnation is among them, so nothing need be asked
    try:
        state = await read_app_state(app, redis, None)
    except BrokerUnavailable:  # one of several: whoever is named as its inbox is found without it
        return to
    living = (*state.workers, *state.routers, *state.schedulers)
    return tuple(dict.fromkeys(find_inbox(each, living) for each in to))


async def _set_paused(app: "Application", redis: AsyncDriver, request: "_Request") -> tuple[str, ...]:
    """Pause or resume a queue in Redis while no worker lives; return the workers that have started meanwhile, which
    may have looked before. Do nothing for other commands."""
    calls = {PAUSE_QUEUE.name: trips.pause_queue, RESUME_QUEUE.name: trips.resume_queue}
    if request.command not in calls or request.parameters.get("here"):
        return ()
    COMMAND_DEFINITIONS[request.command].check_parameters(request.parameters)
    queue = request.parameters.get("queue")
    used, paused = (
        await redis.perform(jobs.list_queues(app.keys)),
        await redis.perform(trips.list_paused_queues(app.keys)),
    )
    queues = {*used, *paused, *(task.queue for task in app.tasks.values())}
    if not isinstance(queue, str) or queue not in queues:
        raise UnknownQueue(str(queue), queues)
    await redis.perform(calls[request.command](app.keys, queue))
    return await _living(app, redis)


async def _sent(
    app: "Application",
    redis: AsyncDriver,
    waiter: AsyncResultWaiter,
    request: _Request,
    commands: Mapping[str, tuple[str, bytes]],
) -> list[Reply]:
    calls = [trips.send_command(app.keys, inbox, *command) for inbox, command in commands.items()]
    accepted = dict(zip(commands, await redis.perform_all(calls) if calls else [], strict=True))
    keys = {
        inbox: app.keys.reply(commands[inbox][0]) for inbox, is_accepted in accepted.items() if is_accepted
    }
    try:
        answers = await waiter.wait(list(keys.values()), timeout=request.timeout) if keys else {}
    except BrokerError as error:
        error.mark_maybe_done()  # the commands are sent: only their answers are missing
        raise
    replies, silent = list[Reply](), list[Reply]()
    for inbox in commands:
        if inbox not in keys:
            replies.append(Reply(worker=inbox, ok=False, reason="full", why=_FULL))
        elif keys[inbox] not in answers:
            why = _SILENT.format(request.timeout) + (
                _OVER if request.expires <= request.timeout else _LATER.format(request.expires)
            )
            silent.append(Reply(worker=inbox, ok=False, reason="no-answer", why=why))
        else:
            replies.append(_read(inbox, answers[keys[inbox]]))
    if silent and request.to:
        silent = await _with_others(app, redis, silent)
    return sorted([*replies, *silent], key=lambda each: each.worker)


async def _with_others(app: "Application", redis: AsyncDriver, silent: list[Reply]) -> list[Reply]:
    """Who was named and has not answered, with whom may have been meant instead."""
    try:
        state = await read_app_state(app, redis, None)
    except BrokerError:
        return silent  # what the others have answered is worth more than this
    beside = {
        "Routers": state.routers,
        "Schedulers": state.schedulers,
        "Controllers": state.controllers,
        "Publishers": state.publishers,
    }
    others = [format_living_workers(each.worker, state.workers, beside) for each in silent]
    return [
        msgspec.structs.replace(each, why=f"{other} ({each.why})" if other else each.why)
        for each, other in zip(silent, others, strict=True)
    ]


def _read(inbox: str, raw: bytes) -> Reply:
    try:
        told = msgspec.json.decode(raw, type=CommandReply)
        answer = msgspec.json.decode(told.answer)
    except (ValueError, RecursionError) as error:
        return Reply(worker=inbox, ok=False, reason="unreadable", why=f"its answer is none of ours: {error}")
    return Reply(worker=inbox, ok=told.ok, answer=answer, reason=told.reason, why=told.why)


def _make_request(
    command: str, parameters: Mapping[str, Any] | None, to: To, timeout: float, expires: float | None
) -> _Request:
    return _Request(command, dict(parameters or {}), _names(to), *_checked(command, timeout, expires))


def _names(to: object) -> tuple[str, ...]:
    if to is None:
        return ()
    names = [to] if isinstance(to, str) else list(cast("Sequence[object]", to))
    if not names or not all(isinstance(each, str) and each for each in names):
        raise Misconfigured(f"to is {to!r}: give the names of workers, or leave it out for all that live")
    return tuple(dict.fromkeys(cast("list[str]", names)))


def _checked(command: str, timeout: object, expires: object) -> tuple[float, float]:
    if expires is None:
        _checked(command, timeout, MAX_COMMAND_LIFETIME)
        expires = (
            min(cast("float", timeout), MAX_COMMAND_LIFETIME)
            if (definition := COMMAND_DEFINITIONS.get(command)) and definition.expires_with_timeout
            else MAX_COMMAND_LIFETIME
        )
    for name, value, most in (("timeout", timeout, 3600.0), ("expires", expires, MAX_COMMAND_LIFETIME)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < cast("float", value) <= most:
            raise Misconfigured(f"{name} is {value!r}: give seconds, more than 0 and at most {most:g}")
    return cast("float", timeout), cast("float", expires)


def _sender() -> str:
    """Who sends, for the worker's log."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


_SILENT = "no answer after {:g} s: it is down, blocked, or has no inbox; "
_LATER = "should it come back within {:g} s of the sending, it does it then"
_OVER = "what it has not begun by now it does not do"
_FULL = "too many commands wait in its inbox: it does not take any"
