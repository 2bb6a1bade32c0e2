"""Settings: every knob of celery5 with its type, its bounds, its default and one line of explanation.

Floor: domain. Reads: the environment that it is handed. Writes: nothing.

Order: what is said in code or as a flag, then `CELERY5_*` in the environment, then the configuration, then the default.
Services never see this page: wiring hands them values.
"""

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.protocol.autoscale_words import autoscale_in
from celery5.protocol.budget_words import budgets_in
from celery5.protocol.prioritisation import strategy_in
from celery5.protocol.retry import LONGEST
from celery5.protocol.sharing import levels_in, order_in
from celery5.spellings import hint

PREFIX = "CELERY5_"


def _cores() -> int:
    return min(os.cpu_count() or 1, 10)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one application. Times are seconds, sizes bytes."""

    broker: Annotated[str, Meta(description="URL of Redis or Valkey: redis://, rediss:// or unix://")] = (
        "redis://127.0.0.1:6379/0"
    )
    default_queue: Annotated[
        str, Meta(description="queue of tasks that name none", pattern=r"^[^\s{},]{1,200}\Z")
    ] = "default"
    results_ttl: Annotated[
        float, Meta(description="how long a result is kept; a minute at least", ge=0.001, le=LONGEST)
    ] = 3600.0
    message_limit: Annotated[int, Meta(description="largest message or result", ge=1024)] = 1024 * 1024
    concurrency: Annotated[int, Meta(description="async jobs that one worker process runs at once", ge=1)] = (
        100
    )
    cpu_slots: Annotated[
        int, Meta(description="jobs in threads that one worker process runs at once", ge=1)
    ] = msgspec.field(default_factory=_cores)
    box_slots: Annotated[
        int, Meta(description="jobs in boxes, and boxes, that one worker process has at once", ge=1)
    ] = 4
    budgets: Annotated[
        str, Meta(description="slots that grow and shrink, by kind of task: thread=2..8 trio=10..500")
    ] = ""
    autoscale: Annotated[
        str | dict[str, Any],
        Meta(description="workers that come and go with the load: minimum=1 maximum=10; see the guide"),
    ] = ""
    prioritise: Annotated[
        str, Meta(description="tasks that go first: shortest, longest, rarest, saturation or module:function")
    ] = ""
    box_jobs: Annotated[int, Meta(description="jobs after which a box is ended and made anew", ge=1)] = 1000
    box_idle: Annotated[float, Meta(description="how long a box without jobs is kept", gt=0, le=LONGEST)] = (
        60.0
    )
    grace_period: Annotated[
        float, Meta(description="how long running jobs may go on after a stop", ge=0, le=LONGEST)
    ] = 30.0
    lease: Annotated[
        float, Meta(description="how long a worker that is silent counts as alive", ge=0.2, le=LONGEST)
    ] = 10.0
    max_deliveries: Annotated[
        int, Meta(description="workers a job may take down before it is buried", ge=1)
    ] = 3
    ignore_result: Annotated[bool, Meta(description="keep no results, unless a task says otherwise")] = False
    time_limit: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        Meta(description="how long an attempt may run, unless its task says otherwise"),
    ] = None
    soft_time_limit: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        Meta(description="after how long SoftTimeLimitExceeded is raised inside it"),
    ] = None
    recent_jobs: Annotated[
        int, Meta(description="jobs that one worker process remembers, to discard what comes twice", ge=0)
    ] = 1000
    backlog: Annotated[
        int, Meta(description="jobs a producer keeps while Redis is away; 0 raises instead", ge=0)
    ] = 0
    replicas: Annotated[
        int, Meta(description="replicas that must have a job before sending it returns", ge=0)
    ] = 0
    when_unpublishable: Annotated[
        Literal["backlog", "local", "abandon"],
        Meta(description="a retry while Redis is away: keep it, run it in the same worker, or give up"),
    ] = "backlog"
    health_store: Annotated[
        Literal["broker", "none"],
        Meta(description="where states of global health checks are kept; with none these checks are off"),
    ] = "broker"
    own_checks: Annotated[
        bool, Meta(description="workers look after themselves: broker, event loop, memory, disk")
    ] = True
    inbox: Annotated[bool, Meta(description="whether worker processes take commands")] = True
    inbox_signatures: Annotated[
        bool, Meta(description="whether commands are signed, and only signed ones are taken")
    ] = True
    keys: Annotated[
        str, Meta(description="folder of the keys that commands are signed with; default: the user's state")
    ] = ""
    priorities: Annotated[
        str, Meta(description="how priorities share a queue: strict, or 4:2:1, mail=4:2:1 for one queue")
    ] = "strict"
    queue_order: Annotated[
        str,
        Meta(
            description="which queues come first: urgent > mail > bulk, or urgent=4 mail=2; none: all alike"
        ),
    ] = ""
    timezone: Annotated[str, Meta(description="time zone of schedules that name none", min_length=1)] = "UTC"
    schedules: Annotated[
        dict[str, dict[str, Any]], Meta(description="periodic tasks, by name: see the guide")
    ] = msgspec.field(default_factory=dict[str, dict[str, Any]])
    schedules_version: Annotated[
        int, Meta(description="version of the code that declares schedules: the higher one is believed", ge=0)
    ] = 0
    event_retention: Annotated[
        float, Meta(description="how long an event is kept that nobody subscribes to", ge=0, le=LONGEST)
    ] = 86400.0
    event_catch_up: Annotated[
        bool, Meta(description="whether a new subscription gets the events that were kept")
    ] = True
    subscription_ttl: Annotated[
        float,
        Meta(description="how long a subscription counts that no worker declares any more", ge=1, le=LONGEST),
    ] = 604800.0
    breaker_suspends: Annotated[
        bool,
        Meta(description="a task whose breaker opens on one worker is suspended on all of them meanwhile"),
    ] = False
    read_block: Annotated[float, Meta(description="how long one read waits for a job", gt=0, le=30)] = 5.0
    status_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="port for /livez, /readyz and /metrics; each further process takes the next one"),
    ] = None
    status_host: Annotated[
        str, Meta(description="address that the status port is opened on", min_length=1)
    ] = "127.0.0.1"


_TYPES = get_type_hints(Settings, include_extras=True)
_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "budgets": budgets_in,
    "autoscale": autoscale_in,
    "prioritise": strategy_in,
    "priorities": levels_in,
    "queue_order": order_in,
}


class Found(msgspec.Struct, frozen=True):
    """What a configuration says, and where it is."""

    where: str
    values: Mapping[str, Any]


def read_settings(
    said: Mapping[str, Any], environ: Mapping[str, str], found: Found | None = None
) -> Settings:
    """The settings, from what was said in code, the environment and what a configuration says.

    Raises Misconfigured with every error at once, each with its origin.
    """
    values: dict[str, Any] = {}
    configured: Mapping[str, Any] = {} if found is None else found.values
    known = ", ".join(sorted(_TYPES))
    errors = [
        f"setting {name!r} {place}is not known{hint('setting', name)}; known: {known}"
        for each, place in ((said, ""), (configured, f"in {found.where} " if found else ""))
        for name in each
        if name not in _TYPES
    ]
    errors += [f"{name} is no setting: did you mean {near}?" for name, near in _misspelt(environ)]
    for name, kind in _TYPES.items():
        if said.get(name) is not None:
            origin, raw = f"setting {name}", said[name]
        elif environ.get(PREFIX + name.upper()):
            origin, raw = PREFIX + name.upper(), environ[PREFIX + name.upper()]
        elif found is not None and configured.get(name) is not None:
            origin, raw = f"{name} in {found.where}", configured[name]
        else:
            continue
        try:
            values[name] = msgspec.convert(_table(raw) if name == "schedules" else raw, kind, strict=False)
            if name in _CHECKS:
                _CHECKS[name](values[name])
        except (msgspec.ValidationError, Misconfigured) as error:
            errors.append(f"{origin}={raw!r}: {error}")
    if errors:
        raise Misconfigured("; ".join(errors))
    return Settings(**values)


def _table(raw: object) -> object:
    """A table; where there is only text, as in the environment, that is JSON."""
    if not isinstance(raw, str):
        return raw
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(f"not JSON: {error}") from None


def differing(one: Settings, other: Settings) -> tuple[str, ...]:
    """The names of the settings in which the two differ."""
    return tuple(name for name in _TYPES if getattr(one, name) != getattr(other, name))


def _misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like ours and are not, with what was probably meant."""
    known = [PREFIX + name.upper() for name in _TYPES]
    ours = [name for name in sorted(environ) if name.startswith(PREFIX) and name not in known]
    near = [(name, get_close_matches(name, known, n=1, cutoff=0.9)) for name in ours]
    return [(name, found[0]) for name, found in near if found]


def descriptions() -> dict[str, str]:
    """Each setting's one-line explanation, for the documentation and `--help`."""
    found: dict[str, str] = {}
    for name, kind in _TYPES.items():
        meta = next(each for each in kind.__metadata__ if isinstance(each, Meta))
        found[name] = meta.description or ""
    return found
