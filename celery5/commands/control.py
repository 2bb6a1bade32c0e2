"""Send control commands to workers and return their replies: `app.control`.

Each worker gets its own command, signed for its inbox alone. A worker that does not answer in time has a reply
that states this. A command for a worker that is down waits in its inbox until it expires.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import msgspec

from celery5.audit.actor import get_actor, get_user
from celery5.audit.recording import AuditedAction
from celery5.broker.calls import commands as command_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.colour import blocking, run_in_thread
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter
from celery5.commands.keyring import Keyring
from celery5.config.key_folder import get_key_folder
from celery5.errors import BrokerError, BrokerUnavailable, CommandRefused, Misconfigured, UnknownQueue
from celery5.hints import make_attribute_error
from celery5.protocol.commands.definitions import (
    BUDGET,
    COMMAND_DEFINITIONS,
    MAX_COMMAND_LIFETIME,
    PAUSE_QUEUE,
    PING,
    RESUME_QUEUE,
    RUN_TASK,
    SHUTDOWN,
    STACK,
    CommandReply,
    describe_unknown_worker,
    find_inbox,
    get_inbox_name,
)
from celery5.protocol.commands.signing import ControlCommand, format_audience, sign_command
from celery5.protocol.job.job import new_id
from celery5.protocol.shards import get_queue_of_shard
from celery5.results.async_result import AsyncResult
from celery5.results.job_details import read_app_state
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.application import Application
    from celery5.tasks.task import Signature

TIMEOUT = 5.0
"""Seconds to wait for answers."""
To = str | Sequence[str] | None
ProcessNoun = Literal["worker", "controller"]
"""What the command line calls processes."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of one worker to a command."""

    worker: str
    # Whether the command succeeded.
    ok: bool
    # What the command returned.
    answer: Any = None
    # Why it failed, in a word: `refused` or `failed` by the command itself, `no-answer`, `full` (the inbox), or why the
    # worker does not accept the command, such as `unknown-issuer` or `expired`; the guide lists them.
    reason: str = ""
    # The same in a sentence.
    why: str = ""
    # Whether it has to do with what the command is about: false where it does not read the queue, say.
    concerned: bool = True


def find_failures(replies: Sequence[Reply]) -> list[Reply]:
    """Return the replies that make a command a failure.

    That of a process which has nothing to do with what the command is about is none, once another one has done it.
    """
    is_done = any(reply.ok for reply in replies)
    return [reply for reply in replies if not reply.ok and (reply.concerned or not is_done)]


class Control:
    """The workers of an application: `app.control`.

    Args of its methods:
        to: One worker or several: names that `workers` returns, the full name of a live worker, or the name of a
            worker that is down and will start again. None for all live workers.
        timeout: Seconds to wait for answers.
        expires: Seconds after which the command is void, at most 60. None for 60, or, for `shutdown` and
            `run-task`, for `timeout`.

    Raises:
        Misconfigured: An argument makes no sense, or the keys cannot sign.
        BrokerError: The broker cannot be reached, or refuses.
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
        """The keys that sign this application's commands on this host."""
        settings = self._app.settings
        key = settings.keys, settings.keys_usage
        if key not in self._keyrings:
            folder = get_key_folder(self._app.name, settings.keys, os.environ)
            self._keyrings[key] = Keyring(folder, owner=self._app.name, usage=settings.keys_usage)
        return self._keyrings[key]

    async def aworkers(self) -> tuple[str, ...]:
        """Return the names of the inboxes of all live workers."""
        redis = await self._app.connections.get_async_driver()
        return await _list_live_workers(self._app, redis)

    @blocking(aworkers)
    def workers(self) -> None: ...

    async def asend(
        self,
        command: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        to: To = None,
        timeout: float = TIMEOUT,
        expires: float | None = None,
        noun: ProcessNoun = "worker",
    ) -> list[Reply]:
        """Send a command to workers; return the reply of each, sorted by name.

        `COMMAND_DEFINITIONS` lists the commands. While no worker lives, `pause-queue` and `resume-queue` take effect
        for workers that start later, and the list is empty. They raise UnknownQueue for a queue that nobody uses.

        Args:
            command: Its name.
            parameters: Its parameters.
            to: The processes.
            timeout: Seconds to wait for answers.
            expires: Seconds after which the command is void.
            noun: What the audit trail calls the processes: `worker` or `controller`.
        """
        return await self._send(_make_request(command, parameters, to, timeout, expires, noun))

    @blocking(asend)
    def send(self) -> None: ...

    async def _send(self, request: "_Request") -> list[Reply]:
        redis = await self._app.connections.get_async_driver()
        if not changes_something(request.command, request.parameters):
            return await self._perform(redis, request)
        target = join_names(request.to) or "all workers"
        name, how = _get_action(request), _describe_parameters(request)
        routine = request.command == RUN_TASK.name
        async with AuditedAction(self._app, redis, name, target, how, is_routine=routine) as action:
            replies = await self._perform(redis, request)
            if replies or request.command not in _STORED:  # those change Redis also when no worker lives
                action.set_count(sum(reply.ok for reply in replies))
            if failures := find_failures(replies):
                action.set_failure("; ".join(f"{reply.worker}: {reply.why}" for reply in failures))
            return replies

    async def _perform(self, redis: AsyncDriver, request: "_Request") -> list[Reply]:
        if request.command in _STORED:
            await _check_queue(self._app, redis, request)
        inboxes = await _find_inboxes(self._app, redis, request)
        commands = await run_in_thread(lambda: self._sign_commands(request, inboxes))
        waiter = await self._app.connections.get_async_result_waiter()
        return await _send_and_wait(self._app, redis, waiter, request, commands)

    async def aping(self, *, to: To = None, timeout: float = TIMEOUT) -> list[Reply]:
        """Return a reply of each worker, which shows whether it answers."""
        return await self.asend(PING.name, to=to, timeout=timeout, expires=min(timeout, MAX_COMMAND_LIFETIME))

    @blocking(aping)
    def ping(self) -> None: ...

    async def astack(self, job: str | None = None, *, to: To = None, timeout: float = TIMEOUT) -> list[Reply]:
        """Return where the code of running jobs stands now, and of each worker itself.

        An answer has the stacks in `stacks`, each with `job`, `task`, `kind` and `lines`. No values of variables are in
        them.

        Args:
            job: The id of a job, for its stack alone. A worker that does not run it refuses.
            to: The workers.
            timeout: Seconds to wait for answers.
        """
        return await self.asend(STACK.name, _get_stack_parameters(job), to=to, timeout=timeout)

    @blocking(astack)
    def stack(self) -> None: ...

    async def arun(self, call: "Signature[Any]", *, to: str, timeout: float = TIMEOUT) -> AsyncResult[Any]:
        """Run a job on one worker, like an actor: `app.control.run(resize.s(path), to="web1")`.

        A retry of the job may run on a different worker.

        Returns:
            The handle of the job.

        Raises:
            CommandRefused: The worker refuses the job, or does not answer.
        """
        job = call.job()
        if job.at or job.lock:
            raise Misconfigured("a job that runs on one worker at once has neither a countdown nor a key")
        parameters = {"job": job.message.decode(), "queue": job.queue, "id": job.id}
        (reply,) = await self._send(_make_request(RUN_TASK.name, parameters, to, timeout, timeout))
        if not reply.ok:
            raise CommandRefused(f"{reply.worker} does not run it: {reply.why}")
        task = call.task
        return AsyncResult(self._app, job.id, queue=job.queue, task=task.name, type=task.result_type)

    @blocking(arun)
    def run(self) -> None: ...

    def _sign_commands(self, request: "_Request", inboxes: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Return the id and the bytes of the command for each inbox. Reads files, and makes keys the first time."""
        signer = self.keyring.get_signer() if self._app.settings.inbox_signatures else None
        now, signed = time.time(), dict[str, tuple[str, bytes]]()
        for inbox in inboxes:
            command = ControlCommand(
                id=new_id() + self._get_id_suffix(inbox),
                audience=format_audience(self._app.name, inbox),
                issued=now,
                expires=now + request.expires,
                command=request.command,
                parameters=request.parameters,
                sender=_get_sender(),
            )
            signed[inbox] = (command.id, sign_command(command, signer))
        return signed

    def _get_id_suffix(self, inbox: str) -> str:
        """Return the suffix of the ids of commands for an inbox; '' on the default broker.

        It names the broker of the inbox, since the reply is stored on that broker, too.
        """
        _, at, broker = inbox.rpartition("@")
        return f"@{broker}" if at and broker in self._app.brokers.names else ""


class _Request(msgspec.Struct, frozen=True):
    """A command to be sent, with checked arguments."""

    command: str
    parameters: dict[str, Any]
    to: tuple[str, ...]
    timeout: float
    expires: float
    noun: ProcessNoun = "worker"


CONTROLLER_VERBS = {SHUTDOWN.name: "stop"}
"""Commands to Controllers whose verb of the command line is another one."""


def _get_action(request: _Request) -> str:
    """Return the action of a command: its noun and verb on the command line."""
    if request.noun == "controller":
        return f"controller:{CONTROLLER_VERBS.get(request.command, request.command)}"
    return f"worker:{'run' if request.command == RUN_TASK.name else request.command}"


def changes_something(command: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a command may change something. Those of an application may."""
    definition = COMMAND_DEFINITIONS.get(command)
    if command == BUDGET.name:  # without a new number it only shows the present ones
        return not {"minimum", "maximum"}.isdisjoint(parameters)
    return definition is None or definition.permission != "read"


def _describe_parameters(request: _Request) -> dict[str, object]:
    """Return what the audit trail shows of the parameters: no values of an application's own command, and no job."""
    if request.command not in COMMAND_DEFINITIONS:
        return {"parameters": sorted(request.parameters)}
    hidden = ("job", "messages")
    return {name: value for name, value in request.parameters.items() if name not in hidden}


def _get_stack_parameters(job: str | None) -> dict[str, Any]:
    return {} if job is None else {"job": job}


async def _list_live_workers(app: "Application", redis: AsyncDriver) -> tuple[str, ...]:
    state = await read_app_state(app, redis, None)
    return tuple(sorted({get_inbox_name(worker) for worker in state.workers}))


async def _find_inboxes(app: "Application", redis: AsyncDriver, request: "_Request") -> tuple[str, ...]:
    to = request.to
    if not to:
        return await _list_live_workers(app, redis) or await _set_paused(app, redis, request)
    if not any(":" in name for name in to):
        return to  # none names an incarnation, so nothing need be read
    try:
        state = await read_app_state(app, redis, None)
    except BrokerUnavailable:  # one of several: names of inboxes need no lookup
        return to
    live_names = (*state.workers, *state.routers, *state.schedulers)
    return tuple(dict.fromkeys(find_inbox(name, live_names) for name in to))


_STORED = (PAUSE_QUEUE.name, RESUME_QUEUE.name)


async def _set_paused(app: "Application", redis: AsyncDriver, request: "_Request") -> tuple[str, ...]:
    """Pause or resume a queue in Redis while no worker is live. Do nothing for other commands.

    Returns:
        The workers that have started meanwhile: they may have read the list of paused queues before.
    """
    calls = {PAUSE_QUEUE.name: command_calls.pause_queue, RESUME_QUEUE.name: command_calls.resume_queue}
    if request.command not in calls or request.parameters.get("here"):
        return ()
    await redis.perform(calls[request.command](app.keys, _get_queue(request)))
    return await _list_live_workers(app, redis)


async def _check_queue(app: "Application", redis: AsyncDriver, request: "_Request") -> None:
    """Raise UnknownQueue for a queue that nobody uses: no worker could do anything about it."""
    queue = request.parameters.get("queue")
    if not isinstance(queue, str):
        return  # workers refuse it, and say what is wrong
    used = await redis.perform(queue_calls.list_queues(app.keys))
    paused = await redis.perform(command_calls.list_paused_queues(app.keys))
    queues = {*map(get_queue_of_shard, used), *paused, *(task.queue for task in app.tasks.values())}
    if queue not in queues:
        raise UnknownQueue(queue, queues)


def _get_queue(request: "_Request") -> str:
    """Return the queue that a command pauses or resumes."""
    definition = RESUME_QUEUE if request.command == RESUME_QUEUE.name else PAUSE_QUEUE
    return definition.parse(request.parameters).queue


async def _send_and_wait(
    app: "Application",
    redis: AsyncDriver,
    waiter: AsyncResultWaiter,
    request: _Request,
    commands: Mapping[str, tuple[str, bytes]],
) -> list[Reply]:
    calls = [command_calls.send_command(app.keys, inbox, *command) for inbox, command in commands.items()]
    accepted = dict(zip(commands, await redis.perform_all(calls) if calls else [], strict=True))
    keys = {
        inbox: app.keys.reply(commands[inbox][0]) for inbox, is_accepted in accepted.items() if is_accepted
    }
    try:
        answers = await waiter.wait(list(keys.values()), timeout=request.timeout) if keys else {}
    except BrokerError as error:
        error.mark_maybe_done()  # the commands are sent; only the answers are missing
        raise
    replies, unanswered = list[Reply](), list[Reply]()
    for inbox in commands:
        if inbox not in keys:
            replies.append(Reply(worker=inbox, ok=False, reason="full", why=_FULL))
        elif keys[inbox] not in answers:
            why = _NO_ANSWER.format(request.timeout) + (
                _OVER if request.expires <= request.timeout else _LATER.format(request.expires)
            )
            unanswered.append(Reply(worker=inbox, ok=False, reason="no-answer", why=why))
        else:
            replies.append(_parse_reply(inbox, answers[keys[inbox]]))
    if unanswered and request.to:
        unanswered = await _add_suggestions(app, redis, unanswered)
    return sorted([*replies, *unanswered], key=lambda reply: reply.worker)


async def _add_suggestions(app: "Application", redis: AsyncDriver, unanswered: list[Reply]) -> list[Reply]:
    """Return the replies of workers that have not answered, with the names that may have been meant instead."""
    try:
        state = await read_app_state(app, redis, None)
    except BrokerError:
        return unanswered  # return the replies of the others rather than this error
    other_processes = {
        "Routers": state.routers,
        "Schedulers": state.schedulers,
        "Controllers": state.controllers,
        "Publishers": state.publishers,
    }
    suggestions = [
        describe_unknown_worker(reply.worker, state.workers, other_processes) for reply in unanswered
    ]
    return [
        msgspec.structs.replace(reply, why=f"{suggestion} ({reply.why})" if suggestion else reply.why)
        for reply, suggestion in zip(unanswered, suggestions, strict=True)
    ]


def _parse_reply(inbox: str, raw: bytes) -> Reply:
    try:
        reply = msgspec.json.decode(raw, type=CommandReply)
        answer = msgspec.json.decode(reply.answer)
    except (ValueError, RecursionError) as error:
        return Reply(worker=inbox, ok=False, reason="unreadable", why=f"its answer is none of ours: {error}")
    return Reply(
        worker=inbox,
        ok=reply.ok,
        answer=answer,
        reason=reply.reason,
        why=reply.why,
        concerned=reply.concerned,
    )


def _make_request(
    command: str,
    parameters: Mapping[str, Any] | None,
    to: To,
    timeout: float,
    expires: float | None,
    noun: ProcessNoun = "worker",
) -> _Request:
    times = _check_times(command, timeout, expires)
    return _Request(command, dict(parameters or {}), _parse_recipients(to), *times, noun)


def _parse_recipients(to: object) -> tuple[str, ...]:
    if to is None:
        return ()
    names = [to] if isinstance(to, str) else list(cast("Sequence[object]", to))
    if not names or not all(isinstance(name, str) and name for name in names):
        raise Misconfigured(f"to is {to!r}: give the names of workers, or leave it out for all that live")
    return tuple(dict.fromkeys(cast("list[str]", names)))


def _check_times(command: str, timeout: object, expires: object) -> tuple[float, float]:
    if expires is None:
        _check_times(command, timeout, MAX_COMMAND_LIFETIME)
        expires = (
            min(cast("float", timeout), MAX_COMMAND_LIFETIME)
            if (definition := COMMAND_DEFINITIONS.get(command)) and definition.expires_with_timeout
            else MAX_COMMAND_LIFETIME
        )
    for name, value, maximum in (("timeout", timeout, 3600.0), ("expires", expires, MAX_COMMAND_LIFETIME)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < cast("float", value) <= maximum:
            raise Misconfigured(f"{name} is {value!r}: give seconds, more than 0 and at most {maximum:g}")
    return cast("float", timeout), cast("float", expires)


def _get_sender() -> str:
    """Return the user, the host and the process that send, for the worker's log, and who acts if that is another."""
    sender, who = f"{get_user()}:{os.getpid()}", get_actor().who
    return f"{who}, by {sender}" if who else sender


_NO_ANSWER = "no answer after {:g} s: it is down, blocked, or has no inbox; "
_LATER = "should it come back within {:g} s of the sending, it does it then"
_OVER = "what it has not begun by now it does not do"
_FULL = "too many commands wait in its inbox: it does not take any"
