"""Define each control command once, with its parameters, its reply and the reasons to refuse it.

The inbox, the handlers, `app.control`, the command line and the guide all read it here.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw

from celery5.errors import CommandRefused
from celery5.protocol.cluster.members import MAX_GROUP_MEMBERS
from celery5.protocol.scaling.autoscale import MAX_CONCURRENCY_FACTOR, MAX_PREFETCH_FACTOR
from celery5.protocol.scaling.prioritisation import (
    MAX_PREFERENCE_SECONDS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Preference,
    is_number,
)
from celery5.similar_names import find_similar, join_names

ProcessKind = Literal["worker", "router", "scheduler", "publisher", "controller"]
Permission = Literal["read", "change", "internal"]

ALL_PROCESSES: frozenset[ProcessKind] = frozenset(
    ("worker", "router", "scheduler", "publisher", "controller")
)
WORKERS: frozenset[ProcessKind] = frozenset(("worker",))
CONTROLLERS: frozenset[ProcessKind] = frozenset(("controller",))


MAX_SHOWN_VALUE = 200
"""The most characters of a wrong value in an error."""


class NoParameters(msgspec.Struct, frozen=True):
    """The parameters of a command that takes none."""


Text = Annotated[str, Meta(min_length=1, description="a text")]
# The description that is nearest to a type completes the error for a wrong value: `give ...`. One around it is the help
# of the parameter; its `extra` says how a command takes it, as `about` of `operations/parameters.py` does.
_IS_ARGUMENT = {"is_argument": True}
P = TypeVar("P", bound=msgspec.Struct, covariant=True)


class CommandDefinition(msgspec.Struct, Generic[P], frozen=True, kw_only=True):
    """What is true of a control command, wherever it is sent from."""

    name: str
    # One line, imperative: the CLI and the guide show it.
    help: str
    # A field for each parameter.
    parameters: type[P]
    recipients: frozenset[ProcessKind] = WORKERS
    # `read`: changes nothing; `change`: changes the process or its jobs; `internal`: sent by processes, not by people.
    # Each needs a signature that the recipient trusts, unless it takes unsigned commands.
    permission: Permission = "change"
    # Doing it twice does no harm, so it is not recorded on the disk against replays.
    is_idempotent: bool = False
    # Logged at level debug when it succeeds.
    is_routine: bool = False
    # Good only for as long as its sender waits, unless the sender says more: done later, it would reach a worker that
    # nobody meant, for example the next one of the same name.
    expires_with_timeout: bool = False
    # An application's `@app.command` may not have this name: workers take the command.
    is_reserved: bool = True
    # How it is given to `celery5`; without it, `worker tell` sends it.
    cli_usage: str = ""

    @property
    def required_by_name(self) -> dict[str, bool]:
        """Return for each parameter, by name, whether the command needs it."""
        return {parameter.name: parameter.required for parameter in msgspec.structs.fields(self.parameters)}

    def parse(self, parameters: Mapping[str, object]) -> P:
        """Return the parameters, checked. Raises CommandRefused for one that is unknown, missing or wrong."""
        required_by_name = self.required_by_name
        unknown = [name for name in parameters if name not in required_by_name]
        if unknown:
            takes = " and ".join(", ".join(required_by_name).rsplit(", ", 1)) or "no parameters"
            raise CommandRefused(f"{self.name} does not take {unknown[0]!r}: it takes {takes}")
        values: dict[str, Any] = {}
        for name, hint in get_type_hints(self.parameters, include_extras=True).items():
            if name in parameters or required_by_name[name]:
                value = parameters.get(name)
                try:
                    values[name] = msgspec.convert(value, hint)
                except msgspec.ValidationError:
                    shown = repr(value)[:MAX_SHOWN_VALUE]
                    raise CommandRefused(f"{self.name}: {name} is {shown}: give {_describe(hint)}") from None
        return self.parameters(**values)


def _describe(hint: Any) -> str:
    return next(_iterate_descriptions(hint))


def _iterate_descriptions(hint: Any) -> Iterator[str]:
    """Yield the descriptions of a type, the innermost first."""
    for part in get_args(hint):
        yield from _iterate_descriptions(part)
    yield from (meta.description for meta in getattr(hint, "__metadata__", ()) if meta.description)


class QueueParameters(msgspec.Struct, frozen=True):
    """The parameters of `pause-queue` and `resume-queue`."""

    queue: Text
    # For the worker that gets the command alone.
    here: Annotated[bool, Meta(description="true or false")] = False


class RevokeParameters(msgspec.Struct, frozen=True):
    """The parameters of `revoke`."""

    id: Annotated[Text, Meta(description="The id of the job.")]


class StackParameters(msgspec.Struct, frozen=True):
    """The parameters of `stack`."""

    job: Annotated[
        Text | None,
        Meta(
            description="Of this job alone. Unless workers are named, the one that runs it is found.",
            extra={"metavar": "ID"},
        ),
    ] = None


class RunTaskParameters(msgspec.Struct, frozen=True):
    """The parameters of `run-task`."""

    # The message of the job.
    job: Text
    # None for the worker's default queue.
    queue: Text | None = None
    # The id of the job, for whoever reads the command: the message has it, too.
    id: Text | None = None


class ShutdownParameters(msgspec.Struct, frozen=True):
    """The parameters of `shutdown`."""

    how: Annotated[
        Literal["warm", "cold"],
        Meta(description="warm (what runs may finish) or cold (it is given back now)"),
        Meta(
            description="Warm: what runs may finish. Cold: it is given back now, by a worker; others stop warm."
        ),
    ] = "warm"


class BootStepParameters(msgspec.Struct, frozen=True):
    """The parameters of `retry-boot-step`."""

    step: Annotated[Text, Meta(description="The name of the boot step.")]


class LogLevelParameters(msgspec.Struct, frozen=True):
    """The parameters of `set-log-level`."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="one of debug, info, warning, error"),
        Meta(description="The lowest level that is logged."),
    ]


_SLOTS = Annotated[int, Meta(ge=1, description="a whole number, 1 or more")]


class BudgetParameters(msgspec.Struct, frozen=True):
    """The parameters of `budget`."""

    kind: Annotated[Text | None, Meta(description="A kind of task; default: all.")] = None
    minimum: Annotated[
        Annotated[int, Meta(ge=0, description="a whole number, 0 or more")] | None,
        Meta(description="Slots that there always are; of a task: kept for it.", extra={"metavar": "N"}),
    ] = None
    maximum: Annotated[
        Annotated[int, Meta(ge=1, description="a whole number, 1 or more")] | None,
        Meta(description="Slots that there are at most.", extra={"metavar": "N"}),
    ] = None
    task: Annotated[Text | None, Meta(description="A task that has its own budget, instead of a kind.")] = (
        None
    )


MAX_FACTOR_SECONDS = 3600.0
"""The most seconds for which a factor can be set."""
_FACTOR_SECONDS = Annotated[
    float,
    Meta(ge=0.01, le=MAX_FACTOR_SECONDS, description=f"a number from 0.01 to {MAX_FACTOR_SECONDS:g}"),
]


_FOR_SECONDS = Annotated[
    _FACTOR_SECONDS | None,
    Meta(
        description="For how long: 90 (seconds), 15m, 1h; default: until the worker ends.",
        extra={"metavar": "SPAN", "widget": "duration"},
    ),
]


class PrefetchParameters(msgspec.Struct, frozen=True):
    """The parameters of `prefetch`."""

    factor: Annotated[
        Annotated[
            float,
            Meta(ge=1.0, le=MAX_PREFETCH_FACTOR, description=f"a number from 1 to {MAX_PREFETCH_FACTOR:g}"),
        ]
        | None,
        Meta(description="How many times as far ahead as usual; default: show it.", extra=_IS_ARGUMENT),
    ] = None
    seconds: _FOR_SECONDS = None


class ConcurrencyParameters(msgspec.Struct, frozen=True):
    """The parameters of `concurrency`."""

    factor: Annotated[
        Annotated[
            float,
            Meta(
                ge=1.0,
                le=MAX_CONCURRENCY_FACTOR,
                description=f"a number from 1 to {MAX_CONCURRENCY_FACTOR:g}",
            ),
        ]
        | None,
        Meta(description="How many times as many slots as usual; default: show it.", extra=_IS_ARGUMENT),
    ] = None
    seconds: _FOR_SECONDS = None


_WEIGHTS = Annotated[dict[str, Any], Meta(description="weights by name")]


class PreferParameters(msgspec.Struct, frozen=True):
    """The parameters of `prefer`."""

    # Weights by name: more than 0, at most 1.
    tasks: _WEIGHTS = {}
    queues: _WEIGHTS = {}
    seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=MAX_PREFERENCE_SECONDS,
            description=f"more than 0 and at most {MAX_PREFERENCE_SECONDS:g}",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        for parameter, weights in (("tasks", self.tasks), ("queues", self.queues)):
            for name, weight in weights.items():
                if not is_number(weight) or not 0 < weight <= MAX_WEIGHT:
                    raise CommandRefused(
                        f"{parameter}: the weight of {name!r} is {weight!r}: give more than 0 and at most 1"
                    )

    @property
    def preference(self) -> Preference:
        """Return the preference; no weight is less than `MIN_WEIGHT`."""
        tasks, queues = (
            {name: max(MIN_WEIGHT, float(weight)) for name, weight in weights.items()}
            for weights in (self.tasks, self.queues)
        )
        return Preference(tasks, queues)


class CheckExpiredParameters(msgspec.Struct, frozen=True):
    """The parameters of `check-expired`: one check, or several."""

    check: Text | None = None
    # Those that the worker does not have are ignored.
    checks: Annotated[list[str], Meta(description="a list of names")] | None = None


class LogAgainParameters(msgspec.Struct, frozen=True):
    """The parameters of `log-again`."""

    messages: Annotated[list[dict[str, Any]], Meta(description="a list of log messages")]


class RestartParameters(msgspec.Struct, frozen=True):
    """The parameters of `restart`."""

    members: Annotated[
        Annotated[list[str], Meta(min_length=1, description="a list of their names")] | None,
        Meta(description="Members, by name; default: all.", extra={"metavar": "MEMBER", **_IS_ARGUMENT}),
    ] = None


_WORKERS = Annotated[
    int,
    Meta(ge=0, le=MAX_GROUP_MEMBERS, description=f"a number from 0 to {MAX_GROUP_MEMBERS}"),
]


class ScaleParameters(msgspec.Struct, frozen=True):
    """The parameters of `scale`."""

    workers: Annotated[
        _WORKERS | None, Meta(description="Workers of each Controller, as its share.", extra={"metavar": "N"})
    ] = None
    of: Annotated[
        _WORKERS | None,
        Meta(description="Workers of all hosts. It counts, where both are given.", extra={"metavar": "N"}),
    ] = None

    def __post_init__(self) -> None:
        if self.workers is None and self.of is None:
            raise CommandRefused(f"scale: workers is None: give a number from 0 to {MAX_GROUP_MEMBERS}")

    @property
    def target(self) -> int:
        """Return the number of workers that is wanted."""
        return (self.workers or 0) if self.of is None else self.of


PING = CommandDefinition(
    name="ping",
    help="Answer: who it is, and for how long.",
    parameters=NoParameters,
    recipients=ALL_PROCESSES,
    permission="read",
    is_idempotent=True,
    is_routine=True,
    cli_usage="worker ping",
)
STATS = CommandDefinition(
    name="stats",
    help="Show jobs by outcome, limits, slots, queues, timers, boot steps, commands, memory, lag of the event loop.",
    parameters=NoParameters,
    recipients=ALL_PROCESSES,
    permission="read",
    is_idempotent=True,
    is_routine=True,
    cli_usage="worker stats",
)
ACTIVE = CommandDefinition(
    name="active",
    help="Show which jobs run, with shortened arguments, and for how long.",
    parameters=NoParameters,
    permission="read",
    is_idempotent=True,
    is_routine=True,
    cli_usage="worker active",
)
STACK = CommandDefinition(
    name="stack",
    help="Show where the code of running jobs, or of one, stands now: files, lines and functions, no values.",
    parameters=StackParameters,
    permission="read",
    is_idempotent=True,
    is_routine=True,
    cli_usage="worker stack [--job ID]",
)
HEALTH = CommandDefinition(
    name="health",
    help="Show all health checks and circuit breakers.",
    parameters=NoParameters,
    permission="read",
    is_idempotent=True,
    is_routine=True,
    cli_usage="worker health",
)
PAUSE_QUEUE = CommandDefinition(
    name="pause-queue",
    help="Stop reading a queue, in all workers or in those that are named; jobs that were read are run.",
    parameters=QueueParameters,
    cli_usage="queue pause QUEUE",
)
RESUME_QUEUE = CommandDefinition(
    name="resume-queue",
    help="Read a paused queue again, in all workers or in those that are named.",
    parameters=QueueParameters,
    cli_usage="queue resume QUEUE",
)
REVOKE = CommandDefinition(
    name="revoke",
    help="Stop a job that this worker has; `celery5 task revoke` finds it wherever it is.",
    parameters=RevokeParameters,
    cli_usage="worker revoke ID",
)
RUN_TASK = CommandDefinition(
    name="run-task",
    help="Run a job in this worker, now. A later attempt may run in another worker.",
    parameters=RunTaskParameters,
    expires_with_timeout=True,
    cli_usage="worker run TASK --args JSON --to NAME",
)
SHUTDOWN = CommandDefinition(
    name="shutdown",
    help="Stop as at a signal; `cold` returns running jobs now. A fleet does not replace the process.",
    parameters=ShutdownParameters,
    recipients=ALL_PROCESSES,
    expires_with_timeout=True,
    cli_usage="worker shutdown [--cold]",
)
RELOAD = CommandDefinition(
    name="reload",
    help="Read the configuration again.",
    parameters=NoParameters,
    recipients=ALL_PROCESSES,
    cli_usage="worker reload",
)
RETRY_BOOT_STEP = CommandDefinition(
    name="retry-boot-step",
    help="Try an optional boot step that failed again.",
    parameters=BootStepParameters,
    recipients=ALL_PROCESSES,
    cli_usage="worker retry-boot-step STEP",
)
SET_LOG_LEVEL = CommandDefinition(
    name="set-log-level",
    help="Log events of this level and above, until the process ends.",
    parameters=LogLevelParameters,
    recipients=ALL_PROCESSES,
    cli_usage="worker set-log-level LEVEL",
)
BUDGET = CommandDefinition(
    name="budget",
    help="Show or set how many jobs of a kind of task, or of the task that is named, run at once.",
    parameters=BudgetParameters,
    cli_usage="worker budget [KIND] [--minimum N] [--maximum N]",
)
PREFETCH = CommandDefinition(
    name="prefetch",
    help="Read `factor` times as far ahead as usual, for `seconds` or until the worker ends.",
    parameters=PrefetchParameters,
    is_routine=True,  # not idempotent: without `seconds` it holds for as long as the worker lives
    cli_usage="worker prefetch [FACTOR] [--seconds SPAN]",
)
CONCURRENCY = CommandDefinition(
    name="concurrency",
    help="Allow `factor` times as many I/O-bound jobs at once as usual, for `seconds` or until the worker ends.",
    parameters=ConcurrencyParameters,
    is_routine=True,  # not idempotent, as `prefetch`
    cli_usage="worker concurrency [FACTOR] [--seconds SPAN]",
)
PREFER = CommandDefinition(
    name="prefer",
    help="Weight waiting jobs by task and queue for `seconds`.",
    parameters=PreferParameters,
    permission="internal",
    is_idempotent=True,
    is_routine=True,
)
CHECK_EXPIRED = CommandDefinition(
    name="check-expired",
    help="Run health checks whose period has passed.",
    parameters=CheckExpiredParameters,
    permission="internal",
    is_idempotent=True,
    is_routine=True,
)
LOG_AGAIN = CommandDefinition(
    name="log-again",
    help="Log messages that this process could not write before.",
    parameters=LogAgainParameters,
    recipients=ALL_PROCESSES,
    permission="internal",
    is_routine=True,
)
MEMBERS = CommandDefinition(
    name="members",
    help="Show the members of the cluster and their state.",
    parameters=NoParameters,
    recipients=CONTROLLERS,
    permission="read",
    is_routine=True,
    is_reserved=False,
)
RESTART = CommandDefinition(
    name="restart",
    help="Restart members of the cluster, all or those listed.",
    parameters=RestartParameters,
    recipients=CONTROLLERS,
    is_reserved=False,
)
SCALE = CommandDefinition(
    name="scale",
    help="Set the number of workers here, as this Controller's share or `of` all.",
    parameters=ScaleParameters,
    recipients=CONTROLLERS,
    is_reserved=False,
)

COMMAND_DEFINITIONS: Mapping[str, CommandDefinition[msgspec.Struct]] = {
    definition.name: definition
    for definition in (
        *(PING, STATS, ACTIVE, STACK, HEALTH, PAUSE_QUEUE, RESUME_QUEUE, REVOKE, RUN_TASK, SHUTDOWN, RELOAD),
        *(RETRY_BOOT_STEP, SET_LOG_LEVEL, BUDGET, PREFETCH, CONCURRENCY, PREFER, CHECK_EXPIRED, LOG_AGAIN),
        *(MEMBERS, RESTART, SCALE),
    )
}
"""Every control command of celery5, by name."""


def list_commands(recipient: ProcessKind) -> frozenset[str]:
    """Return the names of the commands that a kind of process takes."""
    return frozenset(
        name for name, definition in COMMAND_DEFINITIONS.items() if recipient in definition.recipients
    )


MAX_REPLY_SIZE = 1024 * 1024
"""Bytes of an answer, at most."""
NULL = Raw(b"null")


class CommandReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a command, on the wire."""

    v: Literal[1] = 1
    # The process that did it, or did not.
    worker: str
    ok: bool
    answer: Raw = NULL
    # Why it was not done: in a word, and in a sentence.
    reason: str = ""
    why: str = ""
    # Whether it has to do with what the command is about: false where it does not read the queue, say.
    concerned: bool = True


MAX_COMMAND_LIFETIME = 60.0
"""Seconds between issue and expiry, at most."""
MAX_COMMAND_SIZE = 64 * 1024
"""Bytes of a signed command, at most."""


class RefusalReason(StrEnum):
    """Why a command is not accepted."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    UNSIGNED = "unsigned"
    UNKNOWN_ISSUER = "unknown-issuer"
    REVOKED = "revoked"
    BAD_SIGNATURE = "bad-signature"
    WRONG_AUDIENCE = "wrong-audience"
    EXPIRED = "expired"
    TOO_LONG_LIVED = "too-long-lived"
    NOT_YET = "not-yet"
    REPLAYED = "replayed"
    UNREMEMBERED = "unremembered"
    WRONG_USAGE = "wrong-usage"
    NO_KEYS = "no-keys"


REFUSAL_MESSAGES: dict[RefusalReason, str] = {
    RefusalReason.OVERSIZED: f"it is larger than {MAX_COMMAND_SIZE} bytes",
    RefusalReason.MALFORMED: "it is no command of ours",
    RefusalReason.UNSIGNED: "it is not signed, and this worker takes signed commands only",
    RefusalReason.UNKNOWN_ISSUER: "no authority that this worker trusts has signed the certificate of the sender: "
    "celery5 keys trust, on the worker's host",
    RefusalReason.REVOKED: "the sender's key, or that of an authority in its certificate chain, is "
    "on this worker's denylist",
    RefusalReason.BAD_SIGNATURE: "the signature does not fit: it was changed on the way, or signed with another key",
    RefusalReason.WRONG_AUDIENCE: "it was signed for another inbox",
    RefusalReason.EXPIRED: "its time is over",
    RefusalReason.TOO_LONG_LIVED: f"it is good for longer than {MAX_COMMAND_LIFETIME:g} s",
    RefusalReason.NOT_YET: "it is from the future: the clocks of sender and worker differ",
    RefusalReason.REPLAYED: "it came before: a command is done once",
    RefusalReason.UNREMEMBERED: "it is not known here whether it was done before: send it again",
    RefusalReason.WRONG_USAGE: "the sender's certificate is not for signing commands",
    RefusalReason.NO_KEYS: "this worker cannot read its keys",
}
"""The message that the sender of a refused command gets."""


class CommandNotAccepted(CommandRefused):
    """A command was not accepted. `reason` is why."""

    def __init__(self, reason: RefusalReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{REFUSAL_MESSAGES[reason]}{f' ({detail})' if detail else ''}")


def get_inbox_name(worker: str) -> str:
    """Return the name of a worker's inbox: its own without the word that each of its incarnations adds.

    So a process that starts again, or a different one of the same name, has the same inbox.
    """
    return worker.rpartition(":")[0] or worker


def find_inbox(name: str, live_workers: Collection[str]) -> str:
    """Return the inbox that `name` stands for: that of a live worker whose full name it is, else `name` itself.

    A name that only looks like the full name of a worker stays: `host:4711` is no incarnation of `host`.
    """
    inboxes = {get_inbox_name(worker) for worker in live_workers}
    return get_inbox_name(name) if name in live_workers and name not in inboxes else name


def describe_unknown_worker(
    name: str, live_workers: Collection[str], other_processes: Mapping[str, Collection[str]]
) -> str:
    """Return the error for a name that no process has, with the name that may be meant; '' when a process has it.

    Args:
        other_processes: The names of other live processes, by their kind.
    """
    kinds = {get_inbox_name(process): kind for kind, names in other_processes.items() for process in names}
    inboxes = sorted({get_inbox_name(worker) for worker in live_workers})
    if name in kinds or name in inboxes:
        return ""
    same_inbox = [inbox for inbox in inboxes if inbox == get_inbox_name(name)]
    if similar := next(iter(same_inbox), "") or find_similar(name, [*inboxes, *kinds]):
        return f"no worker {name!r} lives: did you mean {similar!r}?"
    others = "".join(
        f"; {kind}: {join_names(sorted(set(map(get_inbox_name, names))), 10)}"
        for kind, names in other_processes.items()
        if names
    )
    return f"no worker {name!r} lives; those that do: {join_names(inboxes, 10) or 'none'}{others}"
