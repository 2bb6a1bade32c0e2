"""Send control commands to processes: an operation for each command that there is."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from celery5.operations.answers import OTHER_VERSION, has_shape
from celery5.operations.operation import Changed, Effect, NotFound, Operation, Perform
from celery5.operations.parameters import Nothing, Text, about, as_duration
from celery5.operations.replies import (
    CONTROLLER_NAMES,
    TIMEOUT,
    WORKER_NAMES,
    ReadingTimeout,
    ReplyTimeout,
    summarize_replies,
)
from celery5.protocol.commands.definitions import (
    COMMAND_DEFINITIONS,
    CONTROLLERS,
    MEMBERS,
    PAUSE_QUEUE,
    RESTART,
    RESUME_QUEUE,
    REVOKE,
    RUN_TASK,
    SCALE,
    SHUTDOWN,
    STACK,
    CommandDefinition,
    describe_unknown_worker,
    get_inbox_name,
)
from celery5.similar_names import suggest_known

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.scaling import Scaling
    from celery5.commands.control import ProcessNoun, Reply

READING_TIMEOUT = 2.0
"""Seconds to wait for what processes say of themselves: a page waits for it, and they say it within milliseconds."""
EFFECTS: Mapping[str, Effect] = {
    STACK.name: Effect.SEE_CONFIDENTIAL,  # it shows lines of source
    REVOKE.name: Effect.STOP_NAMED,
    SHUTDOWN.name: Effect.END_PROCESSES,
    RESTART.name: Effect.END_PROCESSES,
    SCALE.name: Effect.END_PROCESSES,
}
"""What a command does. Of all others, those that change something act on a process."""
ELSEWHERE = frozenset((RUN_TASK.name, PAUSE_QUEUE.name, RESUME_QUEUE.name))
"""Commands with their own operation."""
LIVE_TIME = 1.0
"""Seconds for which the names of live processes are kept: each look at a worker needs them."""
_LIVE: "WeakKeyDictionary[App, tuple[float, tuple[str, ...], dict[str, tuple[str, ...]]]]" = (
    WeakKeyDictionary()
)
_NOBODY: tuple[float, tuple[str, ...], dict[str, tuple[str, ...]]] = (-math.inf, (), {})
CONTROLLER_VERBS = {MEMBERS.name: "status", SHUTDOWN.name: "stop"}
"""Commands to Controllers that have another verb on the command line."""


class ProcessReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has answered."""

    process: str
    # Whether it has done the command.
    ok: bool
    answer: Any = None
    # Why it has not: in a sentence, and in a word.
    why: str = ""
    reason: str = ""
    # Whether it has to do with what the command is about: false where it does not run the job, say.
    concerned: bool = True


def _extend(definition: CommandDefinition[Any], *, noun: "ProcessNoun") -> type[msgspec.Struct]:
    """Return the parameters of a command with those for its recipients and for how long they have to answer."""
    hints = {field.name: field for field in msgspec.structs.fields(definition.parameters)}
    fields: list[Any] = [
        (name, field.type) if field.required else (name, field.type, _get_default(field))
        for name, field in hints.items()
    ]
    fields += [
        ("to", WORKER_NAMES if noun == "worker" else CONTROLLER_NAMES, []),
        ("timeout", ReadingTimeout, None) if _is_reading(definition) else ("timeout", ReplyTimeout, TIMEOUT),
    ]
    title = "".join(word.capitalize() for word in definition.name.split("-"))
    return msgspec.defstruct(f"{noun.capitalize()}{title}", fields, frozen=True, kw_only=True)


def _is_reading(definition: CommandDefinition[Any]) -> bool:
    return definition.permission == "read"


def _get_default(field: Any) -> Any:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return msgspec.field(default_factory=field.default_factory) if has_factory else field.default


def _make_reading(definition: CommandDefinition[Any], noun: "ProcessNoun") -> Perform:
    async def ask(app: "App", asked: Any) -> list[ProcessReply]:
        unknown = {} if asked.timeout else await _describe_unknown(app, asked.to)
        to = [name for name in asked.to if name not in unknown]
        replies = await _send(app, definition, asked, to, noun) if to or not asked.to else []
        return [
            *(_make_reply(definition.name, reply) for reply in replies),
            *(ProcessReply(process=name, ok=False, why=why) for name, why in unknown.items()),
        ]

    return _complete(ask, definition, noun)


def _make_change(definition: CommandDefinition[Any], noun: "ProcessNoun") -> Perform:
    async def change(app: "App", asked: Any) -> Changed:
        replies = await _send(app, definition, asked, asked.to, noun)
        if not replies:
            raise NotFound(f"no {noun} of {app.name} is running")
        return _summarize(definition.name, _get_parameters(definition, asked), replies)

    return _complete(change, definition, noun)


async def _send(
    app: "App", definition: CommandDefinition[Any], asked: Any, to: list[str], noun: "ProcessNoun"
) -> "list[Reply]":
    timeout = asked.timeout or READING_TIMEOUT
    replies = await app.control.asend(
        definition.name,
        _get_parameters(definition, asked),
        to=await _find_recipients(app, to, noun),
        timeout=timeout,
        noun=noun,
    )
    if noun == "worker":
        return replies
    why = f"this Controller has not answered within {timeout:g} s: it is blocked, or has just ended"
    return [
        msgspec.structs.replace(reply, why=why) if reply.reason == "no-answer" else reply for reply in replies
    ]


def _make_reply(command: str, reply: "Reply") -> ProcessReply:
    """Return what a process has answered. An answer of another version is not what pages can show."""
    fits = has_shape(command, reply)
    return ProcessReply(
        process=reply.worker,
        ok=reply.ok and fits,
        answer=reply.answer,
        why=reply.why if fits else "its answer has the form of another version",
        reason=reply.reason if fits else OTHER_VERSION,
        concerned=reply.concerned,
    )


def _summarize(command: str, parameters: Mapping[str, Any], replies: "list[Reply]") -> Changed:
    """Return what a command has changed: no process, where it has only read."""
    from celery5.commands.control import changes_something

    changed = summarize_replies(command, replies)
    return changed if changes_something(command, parameters) else msgspec.structs.replace(changed, count=0)


def _complete(function: Any, definition: CommandDefinition[Any], noun: "ProcessNoun") -> Perform:
    function.__doc__ = definition.help
    function.__annotations__["asked"] = _extend(definition, noun=noun)
    perform: Perform = function
    return perform


def _get_parameters(definition: CommandDefinition[Any], asked: Any) -> dict[str, Any]:
    """Return the parameters that are given: the process has the defaults of its own version."""
    fields = msgspec.structs.fields(definition.parameters)
    values = {field.name: getattr(asked, field.name) for field in fields}
    return {
        field.name: values[field.name]
        for field in fields
        if field.required or values[field.name] not in (None, field.default)
    }


async def check_recipients(app: "App", names: list[str]) -> None:
    """Raise NotFound for a name that no process has, before anything is sent."""
    unknown = await _describe_unknown(app, names)
    if unknown:
        raise NotFound("; ".join(unknown.values()))


async def _describe_unknown(app: "App", names: list[str]) -> dict[str, str]:
    """Return for each name that no process has why it is not asked: a look writes into no inbox that nobody reads."""
    if not names:
        return {}
    known_since, workers, others = _LIVE.get(app, _NOBODY)
    if time.monotonic() - known_since > LIVE_TIME:
        state = await app.ainfo()
        workers, others = state.workers, {"Routers": state.routers, "Schedulers": state.schedulers}
        others |= {"Controllers": state.controllers, "Publishers": state.publishers}
        _LIVE[app] = time.monotonic(), workers, others
    whole_names = {*workers, *(name for live in others.values() for name in live)}
    whys = {
        name: describe_unknown_worker(name, workers, others)
        for name in dict.fromkeys(names)
        if name not in whole_names
    }
    return {name: why for name, why in whys.items() if why}


async def _find_recipients(app: "App", to: list[str], noun: "ProcessNoun") -> list[str] | None:
    from celery5.broker.calls import cluster

    if noun == "worker":
        return to or None
    names = await app.aperform(cluster.list_live_processes(app.keys, "controller"))
    live = sorted({get_inbox_name(name) for name in names})
    if not names:
        raise NotFound(
            f"no Controller of application {app.name!r} is running; celery5 controller start starts one"
        )
    for name in to:
        if name not in names and name not in live:
            raise NotFound(f"no Controller {name!r} is running; {suggest_known(name, live)}")
    return to or live


def _make_operation(definition: CommandDefinition[Any], noun: "ProcessNoun") -> Operation:
    verb = CONTROLLER_VERBS.get(definition.name, definition.name) if noun == "controller" else definition.name
    is_reading = _is_reading(definition)
    effect = EFFECTS.get(definition.name, Effect.SEE if is_reading else Effect.CONTROL)
    make_perform = _make_reading if is_reading else _make_change
    return Operation(f"{noun}:{verb}", make_perform(definition, noun), effect)


def _make_operations() -> list[Operation]:
    definitions = [
        definition for definition in COMMAND_DEFINITIONS.values() if definition.permission != "internal"
    ]
    for_workers = [
        _make_operation(definition, "worker")
        for definition in definitions
        if definition.recipients != CONTROLLERS and definition.name not in ELSEWHERE
    ]
    for_controllers = [
        _make_operation(definition, "controller")
        for definition in definitions
        if definition.recipients == CONTROLLERS or definition.name in (SHUTDOWN.name, "reload")
    ]
    return [*for_workers, *for_controllers]


class RunOnWorker(msgspec.Struct, frozen=True):
    """A job for one worker."""

    task: Annotated[Text, about("The task.")]
    to: Annotated[Text, about("The worker.", metavar="NAME", is_option=True)]
    args: Annotated[list[Any], about("The task's arguments, as a list: '[2, 3]'.")] = []
    kwargs: Annotated[dict[str, Any], about("Those by name, as an object: '{\"n\": 2}'.")] = {}
    timeout: Annotated[
        float,
        as_duration(at_least=0.01, at_most=60),
        about("How long its answer is waited for.", metavar="SECONDS"),
    ] = TIMEOUT


async def run_on_worker(app: "App", asked: RunOnWorker) -> Changed:
    """Run a job on one worker, now."""
    call = app.signature(asked.task, *asked.args, **asked.kwargs)
    handle = await app.control.arun(call, to=asked.to, timeout=asked.timeout)
    return Changed(summary=f"job {handle.id} runs on {asked.to}", count=1, value={"id": handle.id})


class OwnCommand(msgspec.Struct, frozen=True):
    """A command that the application has declared."""

    command: Annotated[Text, about("The command.")]
    parameters: Annotated[dict[str, Any], about("Its parameters.", is_argument=True)] = {}
    to: WORKER_NAMES = []
    timeout: ReplyTimeout = TIMEOUT


async def tell(app: "App", asked: OwnCommand) -> Changed:
    """Send any command to workers, such as one that the application has declared."""
    replies = await app.control.asend(
        asked.command, asked.parameters, to=asked.to or None, timeout=asked.timeout
    )
    if not replies:
        raise NotFound(f"no worker of {app.name} is running")
    return _summarize(asked.command, asked.parameters, replies)


async def show_scaling(app: "App", _: Nothing) -> "Scaling | None":
    """Show how many workers are wanted, how many there are, and who decided so; nothing where nothing is scaled."""
    from celery5.broker.calls.scaling import get_scaling
    from celery5.config.scaling import is_scaled

    return await app.aperform(get_scaling(app.keys)) if is_scaled(app.settings) else None


PROCESS_OPERATIONS = (
    *_make_operations(),
    Operation("worker:run", run_on_worker, Effect.SEND_JOBS),
    Operation("worker:tell", tell, Effect.CONTROL),
    Operation("autoscale:status", show_scaling, result_module="celery5.broker.calls.scaling"),
)
"""The operations on processes."""
