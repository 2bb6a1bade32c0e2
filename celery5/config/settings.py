"""Define every setting with its type, its bounds, its default and a line of description.

The order of precedence: code or a flag, then `CELERY5_*` in the environment, then the configuration, then the default.
Services do not read settings: wiring passes them values.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.hints import find_hint, find_variable_hint
from celery5.protocol.brokers import check_queue_routes, find_route_errors
from celery5.protocol.job.retry_policy import LONGEST
from celery5.protocol.limits import parse_kind_rates
from celery5.protocol.masking import MASK, mask_passwords
from celery5.protocol.observability.alert_messages import check_webhook_url, parse_webhook_secret
from celery5.protocol.observability.alert_rules import parse_rules
from celery5.protocol.observability.statsd import parse_optional_statsd_address
from celery5.protocol.publisher.address import parse_connections, parse_optional_address
from celery5.protocol.scaling.autoscale import parse_autoscale
from celery5.protocol.scaling.budget import DEFAULT_MAXIMUM, parse_budgets
from celery5.protocol.scaling.prioritisation import parse_strategy
from celery5.protocol.scaling.read_order import parse_priorities, parse_queue_order
from celery5.protocol.scaling.resource_budget import parse_capacity
from celery5.protocol.scheduling.zones import check_zone
from celery5.protocol.shards import parse_shards
from celery5.protocol.text_values import DURATION, HOST_AND_PORT, SIZE, TextKind, parse_json_object
from celery5.similar_names import did_you_mean, find_similar

PREFIX = "CELERY5_"


def count_cores() -> int:
    """Return how many jobs may always run in threads: as many as there are cores, up to ten."""
    return min(os.cpu_count() or 1, 10)


_DAY = 86400
_SECONDS: dict[str, Any] = {"unit": DURATION}
"""Mark of a number that may be a duration, too: `5m`, and `timedelta(minutes=5)` in Python."""
_BYTES: dict[str, Any] = {"unit": SIZE}
"""Mark of a number that may be written as a size, too: `64 MiB`."""
_IN_HASH: dict[str, Any] = {"in_hash": True}
"""Mark of a setting that the hash in Redis may set: no address, no file, no name of code, nothing about trust."""


def _up_to(limit: float) -> dict[str, Any]:
    """Mark a number that the hash in Redis may set, with its largest value there.

    Somebody who can write to Redis must not make every worker use all memory or start ten thousand threads.
    """
    return {"in_hash": True, "most": limit}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one application. Times are seconds, sizes bytes.

    A line each: all else follows from it, also `SettingOptions` (`python -m tests.house.setting_options`). A table is
    a `dict`. In `extra` are the marks above, and `check`, a function that raises Misconfigured for a bad value.
    """

    broker: Annotated[
        str, Meta(description="URL of Redis or Valkey: redis://, rediss://, unix:// or redis+sentinel://")
    ] = "redis://127.0.0.1:6379/0"
    brokers: Annotated[
        dict[str, str], Meta(description="further brokers, by name; broker is the one named default")
    ] = msgspec.field(default_factory=dict[str, str])
    routes: Annotated[
        dict[str, str],
        Meta(description="which broker a queue or a task goes to: names or globs, the first that fits"),
    ] = msgspec.field(default_factory=dict[str, str])
    queue_routes: Annotated[
        dict[str, str],
        Meta(
            description="queues of tasks that name none, by task name or glob; the first match counts",
            extra=_IN_HASH | {"check": check_queue_routes},
        ),
    ] = msgspec.field(default_factory=dict[str, str])
    default_queue: Annotated[
        str, Meta(description="queue of tasks that name none", extra=_IN_HASH, pattern=r"^[^\s{},#]{1,200}\Z")
    ] = "default"
    shards: Annotated[
        str | dict[str, Any],
        Meta(
            description="shards of queues, which are spread over a Redis Cluster: mails=8 reports=4",
            extra=_IN_HASH | {"check": parse_shards},
        ),
    ] = ""
    results_ttl: Annotated[
        float,
        Meta(
            description="how long a result is kept; a minute at least",
            extra=_up_to(30 * _DAY) | _SECONDS,
            ge=0.001,
            le=LONGEST,
        ),
    ] = 3600.0
    message_limit: Annotated[
        int, Meta(description="largest message or result", extra=_up_to(64 * 1024 * 1024) | _BYTES, ge=1024)
    ] = 1024 * 1024
    workflow_nesting_limit: Annotated[
        int,
        Meta(
            description="workflows that dynamic tasks return, inside each other; one more fails",
            extra=_up_to(100_000),
            ge=1,
        ),
    ] = 1000
    processes: Annotated[
        int,
        Meta(
            description="processes of `worker start`; a member of a cluster is always one",
            extra=_up_to(256),
            ge=1,
        ),
    ] = 1
    concurrency: Annotated[
        int, Meta(description="async jobs that one worker process runs at once", extra=_up_to(10_000), ge=1)
    ] = 100
    cpu_slots: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        Meta(
            description="jobs in threads that one worker process runs at once; auto: from the number of cores to "
            "concurrency, by how much they compute",
            extra=_up_to(512),
        ),
    ] = "auto"
    box_slots: Annotated[
        int,
        Meta(
            description="jobs in boxes, and boxes, that one worker process has at once",
            extra=_up_to(256),
            ge=1,
        ),
    ] = 4
    budgets: Annotated[
        str,
        Meta(
            description="slots that grow and shrink, by kind of task or task: thread=2..8 shop.resize=1..2",
            extra=_IN_HASH | {"check": parse_budgets},
        ),
    ] = ""
    capacity: Annotated[
        str | dict[str, Any],
        Meta(
            description="what `worker start` has for tasks with resources=, shared by its processes: "
            "gpu=2 vram_gb=auto; auto alone: all that it finds",
            extra={"check": parse_capacity},
        ),
    ] = ""
    rate_limits: Annotated[
        str,
        Meta(
            description="jobs that may begin in a period, by kind of task, on all workers: thread=200/m",
            extra=_IN_HASH | {"check": parse_kind_rates},
        ),
    ] = ""
    autoscale: Annotated[
        str | dict[str, Any],
        Meta(
            description="workers that come and go with the load: minimum=1 maximum=10; see celery5 docs autoscaling",
            extra=_IN_HASH | {"check": parse_autoscale},
        ),
    ] = ""
    prioritise: Annotated[
        str,
        Meta(
            description="tasks that go first: shortest, longest, rarest, saturation or module:function",
            extra=_IN_HASH | {"check": parse_strategy},
        ),
    ] = ""
    box_jobs: Annotated[
        int, Meta(description="jobs after which a box is ended and made again", extra=_up_to(1_000_000), ge=1)
    ] = 1000
    box_idle: Annotated[
        float,
        Meta(
            description="how long a box without jobs is kept", extra=_up_to(_DAY) | _SECONDS, gt=0, le=LONGEST
        ),
    ] = 60.0
    max_jobs: Annotated[
        int,
        Meta(
            description="jobs after which a worker process is recycled; 0: never",
            extra=_up_to(1_000_000_000),
            ge=0,
        ),
    ] = 0
    max_memory: Annotated[
        str,
        Meta(
            description="memory with which a worker process is recycled: 500 MiB; none: never",
            extra=_IN_HASH | {"check": SIZE.parse_optional},
        ),
    ] = ""
    grace_period: Annotated[
        float,
        Meta(
            description="how long running jobs may go on after a stop",
            extra=_up_to(_DAY) | _SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 30.0
    lease: Annotated[
        float,
        Meta(
            description="how long a worker that is silent counts as alive",
            extra=_up_to(3600) | _SECONDS,
            ge=0.2,
            le=LONGEST,
        ),
    ] = 10.0
    max_deliveries: Annotated[
        int,
        Meta(
            description="workers that may die with a job before it is a dead letter", extra=_up_to(1000), ge=1
        ),
    ] = 3
    unknown_task_grace: Annotated[
        float,
        Meta(
            description="how long a job waits for a worker whose code knows its task and arguments before it is "
            "given up: longer than a restart of all workers takes",
            extra=_up_to(_DAY) | _SECONDS,
            ge=0,
        ),
    ] = 300.0
    unknown_record_grace: Annotated[
        float,
        Meta(
            description="how long a record of a stream, and those after it, wait for a worker whose code can read it",
            extra=_up_to(_DAY) | _SECONDS,
            ge=0,
        ),
    ] = 10.0
    ignore_result: Annotated[
        bool, Meta(description="keep no results, unless a task says otherwise", extra=_IN_HASH)
    ] = False
    time_limit: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        Meta(
            description="how long an attempt may run, unless its task says otherwise",
            extra=_up_to(30 * _DAY) | _SECONDS,
        ),
    ] = None
    soft_time_limit: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        Meta(
            description="after how long SoftTimeLimitExceeded is raised inside it",
            extra=_up_to(30 * _DAY) | _SECONDS,
        ),
    ] = None
    recent_jobs: Annotated[
        int,
        Meta(
            description="jobs that one worker process remembers, to discard what comes twice",
            extra=_up_to(1_000_000),
            ge=0,
        ),
    ] = 1000
    backlog: Annotated[
        int,
        Meta(
            description="jobs a producer keeps while Redis is unreachable; 0 raises instead",
            extra=_up_to(1_000_000),
            ge=0,
        ),
    ] = 10_000
    backlog_bytes: Annotated[
        int,
        Meta(
            description="most bytes of the jobs that it keeps in memory",
            extra=_up_to(16 * 1024 * 1024 * 1024) | _BYTES,
            ge=1024,
        ),
    ] = 64 * 1024 * 1024
    replicas: Annotated[
        int,
        Meta(description="replicas that must have a job before sending it returns", extra=_up_to(100), ge=0),
    ] = 0
    publisher: Annotated[
        str,
        Meta(
            description="Publisher daemon that gets the jobs: unix://PATH, unix:// or tls://HOST:PORT",
            extra={"check": parse_optional_address},
        ),
    ] = ""
    publisher_socket: Annotated[
        str, Meta(description="unix socket that a Publisher opens; default: in the user's folder for these")
    ] = ""
    publisher_tcp: Annotated[
        str,
        Meta(
            description="HOST:PORT that a Publisher listens on, besides",
            extra={"check": HOST_AND_PORT.parse_optional},
        ),
    ] = ""
    publisher_certificate: Annotated[
        str, Meta(description="file of its certificate, and maybe its key: then TCP speaks TLS")
    ] = ""
    publisher_key: Annotated[str, Meta(description="file of that key")] = ""
    publisher_client_ca: Annotated[
        str, Meta(description="file of the authority that must have signed its TCP clients' certificates")
    ] = ""
    publisher_plain: Annotated[bool, Meta(description="whether TCP beyond this host may go without TLS")] = (
        False
    )
    publisher_backlog: Annotated[
        str, Meta(description="what a Publisher keeps in: sqlite, memory, a folder, or module:name")
    ] = "sqlite"
    publisher_backlog_messages: Annotated[
        int, Meta(description="messages that it keeps for a broker, at most", ge=1)
    ] = 100_000
    publisher_backlog_bytes: Annotated[
        int, Meta(description="bytes of messages that it keeps for a broker, at most", extra=_BYTES, ge=1024)
    ] = 1024 * 1024 * 1024
    publisher_connections: Annotated[
        str | int | list[int],
        Meta(
            description="connections of a Publisher to a broker: 1, or 1..4 to have more under pressure",
            extra={"check": parse_connections},
        ),
    ] = "1"
    when_unpublishable: Annotated[
        Literal["backlog", "local", "abandon"],
        Meta(
            description="a retry while Redis is unreachable: keep it, run it in this worker, or give up",
            extra=_IN_HASH,
        ),
    ] = "backlog"
    health_store: Annotated[
        Literal["broker", "none"],
        Meta(
            description="where states of shared health checks are kept; with none these checks are off",
            extra=_IN_HASH,
        ),
    ] = "broker"
    worker_group: Annotated[
        str,
        Meta(
            description="the group of workers whose health checks of scope group this one shares",
            pattern=r"^[^\s{}]{0,100}\Z",
        ),
    ] = ""
    log_format: Annotated[
        Literal["auto", "json", "console", "journal"],
        Meta(description="how the log is written; auto: detected", extra=_IN_HASH),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="the lowest level that is logged, when a process starts", extra=_IN_HASH),
    ] = "info"
    retry_tracebacks: Annotated[
        bool,
        Meta(
            description="whether the log has the traceback of each retry, not only of the last attempt",
            extra=_IN_HASH,
        ),
    ] = False
    opentelemetry: Annotated[
        Literal["off", "traces", "metrics", "all"],
        Meta(description="what is given to OpenTelemetry: spans of jobs, metrics, or both", extra=_IN_HASH),
    ] = "off"
    trace_relation: Annotated[
        Literal["link", "parent"],
        Meta(
            description="how the span of a job belongs to who sent it: by a link, or as its child",
            extra=_IN_HASH,
        ),
    ] = "link"
    sentry: Annotated[
        bool,
        Meta(description="whether jobs, and the errors of dead ones, are reported to Sentry", extra=_IN_HASH),
    ] = False
    loop_block_warning: Annotated[
        float,
        Meta(
            description="how long a job may block the event loop before a warning; 0: no warning",
            extra=_up_to(3600) | _SECONDS,
            ge=0,
        ),
    ] = 0.5
    own_checks: Annotated[
        bool, Meta(description="workers check themselves: broker, event loop, memory, disk", extra=_IN_HASH)
    ] = True
    inbox: Annotated[bool, Meta(description="whether worker processes take commands")] = True
    inbox_signatures: Annotated[
        bool, Meta(description="whether commands are signed, and only signed ones are taken")
    ] = True
    keys: Annotated[
        str, Meta(description="folder of the keys that commands are signed with; default: the user's state")
    ] = ""
    keys_usage: Annotated[
        str,
        Meta(
            description="extended key usage, an OID, that a sender's certificate must have; none: not checked",
            pattern=r"^([0-9]+(\.[0-9]+)+)?\Z",
            max_length=200,
        ),
    ] = ""
    priorities: Annotated[
        str,
        Meta(
            description="how priorities share a queue: strict, or 4:2:1, mail=4:2:1 for one queue",
            extra=_IN_HASH | {"check": parse_priorities},
        ),
    ] = "strict"
    queue_order: Annotated[
        str,
        Meta(
            description="which queues come first: urgent > mail > bulk, or urgent=4 mail=2; none: all equal",
            extra=_IN_HASH | {"check": parse_queue_order},
        ),
    ] = ""
    timezone: Annotated[
        str,
        Meta(
            description="time zone of schedules that name none",
            extra=_IN_HASH | {"check": check_zone},
            min_length=1,
        ),
    ] = "UTC"
    schedules: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="periodic tasks, by name: see celery5 docs periodic", extra=_IN_HASH),
    ] = msgspec.field(default_factory=dict[str, dict[str, Any]])
    schedules_version: Annotated[
        int,
        Meta(
            description="version of the code that declares schedules: the higher one wins",
            extra=_up_to(1_000_000_000_000),
            ge=0,
        ),
    ] = 0
    event_retention: Annotated[
        float,
        Meta(
            description="how long an event is kept that nobody subscribes to",
            extra=_up_to(30 * _DAY) | _SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 86400.0
    event_catch_up: Annotated[
        bool, Meta(description="whether a new subscription gets the events that were kept", extra=_IN_HASH)
    ] = True
    subscription_ttl: Annotated[
        float,
        Meta(
            description="how long a subscription counts that no worker declares any more",
            extra=_up_to(365 * _DAY) | _SECONDS,
            ge=1,
            le=LONGEST,
        ),
    ] = 604800.0
    breaker_suspends: Annotated[
        bool,
        Meta(
            description="a task whose breaker opens on one worker is suspended on all of them meanwhile",
            extra=_IN_HASH,
        ),
    ] = False
    read_block: Annotated[
        float, Meta(description="how long one read waits for a job", extra=_up_to(30) | _SECONDS, gt=0, le=30)
    ] = 5.0
    status_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="port for /livez, /readyz and /metrics; each further process takes the next one"),
    ] = None
    status_host: Annotated[
        str, Meta(description="address that the status port is opened on", min_length=1)
    ] = "127.0.0.1"

    metrics_interval: Annotated[
        float,
        Meta(
            description="seconds between the reports of a process on its metrics; 0 stores none",
            extra=_SECONDS,
            ge=0,
            le=300,
        ),
    ] = 15.0
    job_history: Annotated[
        int,
        Meta(
            description="failed jobs that the history keeps, and as many others; 0: none",
            ge=0,
            le=1_000_000,
        ),
    ] = 10_000
    show_raw_values: Annotated[
        bool,
        Meta(
            description="whether commands and pages show arguments, results, records and errors with the passwords "
            "in them"
        ),
    ] = False
    statsd: Annotated[
        str,
        Meta(
            description="udp://host:port of a StatsD that gets all metrics; empty: none",
            extra={"check": parse_optional_statsd_address},
        ),
    ] = ""
    alerts: Annotated[
        dict[str, str],
        Meta(
            description="further rules of alerts, by name: oldest queue=mail above=5m for=2m; see celery5 docs alerts",
            extra={"check": parse_rules},
        ),
    ] = msgspec.field(default_factory=dict[str, str])
    alert_oldest: Annotated[
        float,
        Meta(
            description="age of the oldest job of a queue that alerts; 0: none",
            extra=_SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 300.0
    alert_failures: Annotated[
        float, Meta(description="share of a task's attempts that fail which alerts; 0: none", ge=0, lt=1)
    ] = 0.25
    alert_no_workers: Annotated[
        float,
        Meta(
            description="how long jobs may wait on a queue without workers before that alerts; 0: no alert",
            extra=_SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 60.0
    alert_dead: Annotated[
        int, Meta(description="new dead letters of a queue within 10 minutes that alert; 0: none", ge=0)
    ] = 10
    alert_worker_deaths: Annotated[
        int,
        Meta(
            description="workers that the jobs of a task take down within 10 minutes that alert; 0: none",
            ge=0,
        ),
    ] = 1
    alert_worker_lost: Annotated[
        float,
        Meta(
            description="how long a worker that was lost alerts; 0: not at all", extra=_SECONDS, ge=0, le=3600
        ),
    ] = 600.0
    alert_member_missing: Annotated[
        float,
        Meta(
            description="how long a member of the cluster may be missing before that alerts; 0: no alert",
            extra=_SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 60.0
    alert_undo: Annotated[
        float,
        Meta(
            description="how long a run of a workflow may stop or be undone before that alerts; 0: none",
            extra=_SECONDS,
            ge=0,
            le=3600,
        ),
    ] = 300.0
    alert_stream_lag: Annotated[
        float,
        Meta(
            description="how far a group of a stream is behind that alerts; 0: none",
            extra=_SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 300.0
    alert_loop_lag: Annotated[
        float,
        Meta(
            description="how late an event loop wakes up that alerts; 0: none",
            extra=_SECONDS,
            ge=0,
            le=LONGEST,
        ),
    ] = 1.0
    alert_memory: Annotated[
        float,
        Meta(
            description="share of the memory of a broker's server that alerts when used; 0: none", ge=0, lt=1
        ),
    ] = 0.9
    alert_webhook: Annotated[
        str,
        Meta(
            description="URL that notifications of alerts are posted to; empty: none",
            extra={"check": check_webhook_url},
        ),
    ] = ""
    alert_webhook_secret: Annotated[
        str,
        Meta(
            description="secret by which they are signed: whsec_ and base64",
            extra={"check": parse_webhook_secret},
        ),
    ] = ""

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={mask_setting(name, getattr(self, name))!r}" for name in self.__struct_fields__
        )
        return f"Settings({fields})"


_TYPES = get_type_hints(Settings, include_extras=True)
_NO_SETTING = "is no setting: did you mean {}?"


class InvalidSettings(Misconfigured):
    """Settings that cannot be used, each with its origin. `in_code` is true if code or a flag set one of them."""

    def __init__(self, errors: Sequence[str], *, in_code: bool) -> None:
        self.in_code = in_code
        super().__init__("; ".join(errors))


class LoadedConfiguration(msgspec.Struct, frozen=True):
    """The settings of a configuration, and its name in errors."""

    where: str
    values: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"LoadedConfiguration({self.where!r}, {mask_passwords(self.values)!r})"


class ExplicitSettings(dict[str, Any]):
    """Settings from code and flags. `flags` are the names of those that a command's flags set last."""

    flags: frozenset[str] = frozenset()

    def add_flags(self, flags: Mapping[str, Any]) -> None:
        """Replace settings by those of flags. A value of None means that the flag is not set."""
        new = {name: value for name, value in flags.items() if value is not None}
        self.update(new)
        self.flags = self.flags | new.keys()

    def __repr__(self) -> str:
        return repr(mask_passwords(self))


class SettingSource(msgspec.Struct, frozen=True):
    """Where one setting is set, and to what."""

    # `explicit` (in code or by a flag), `environment` or `configuration`.
    kind: str
    # The name of the place in errors.
    where: str
    raw: Any

    def __repr__(self) -> str:
        return f"SettingSource({self.kind!r}, {self.where!r}, {mask_setting(self.where, self.raw)!r})"


def find_source(
    name: str, explicit: Mapping[str, Any], environ: Mapping[str, str], loaded: LoadedConfiguration | None
) -> SettingSource | None:
    """Return where a setting is set, by the order of precedence; None where its default holds."""
    variable = PREFIX + name.upper()
    if explicit.get(name) is not None:
        return SettingSource("explicit", f"setting {name}", explicit[name])
    if environ.get(variable):
        return SettingSource("environment", variable, environ[variable])
    if loaded is not None and loaded.values.get(name) is not None:
        return SettingSource("configuration", f"{name} in {loaded.where}", loaded.values[name])
    return None


def _suggest_setting(name: str) -> str:
    """Return the setting with a similar name, or else where all settings are, as the end of a message."""
    return "; " + did_you_mean(name, _TYPES, otherwise="all settings: celery5 docs settings")


def read_settings(
    explicit: Mapping[str, Any], environ: Mapping[str, str], loaded: LoadedConfiguration | None = None
) -> Settings:
    """Return the settings from code, the environment and a configuration.

    Raises InvalidSettings with all errors at once, each with its origin.
    """
    values: dict[str, Any] = {}
    configured: Mapping[str, Any] = {} if loaded is None else loaded.values
    errors = [
        f"setting {name!r} {place}is not known{find_hint('setting', name) or _suggest_setting(name)}"
        for settings, place in ((explicit, ""), (configured, f"in {loaded.where} " if loaded else ""))
        for name in settings
        if name not in _TYPES
    ]
    in_code = any(name not in _TYPES for name in explicit)
    errors += [
        f"{name} {_NO_SETTING.format(similar)}"
        for name in sorted(environ)
        if (similar := suggest_variable(name))
    ]
    for name in _TYPES:
        source = find_source(name, explicit, environ, loaded)
        if source is None:
            continue
        try:
            values[name] = parse_value(name, source.raw)
        except Misconfigured as error:
            errors.append(f"{source.where}={format_value(mask_setting(name, source.raw))}: {error}")
            in_code |= source.kind == "explicit"
    errors += find_route_errors(values.get("brokers", {}), values.get("routes", {}))
    if errors:
        raise InvalidSettings(errors, in_code=in_code)
    return Settings(**values)


def parse_value(name: str, raw: object) -> Any:
    """Return `raw` converted to the type of the setting `name`. Raises Misconfigured."""
    unit: TextKind[Any] | None = _get_marks(name).get("unit")
    if unit is DURATION and isinstance(raw, timedelta):
        raw = raw.total_seconds()
    try:
        value: Any = msgspec.convert(_parse_text(name, raw), _TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        remedy = "" if unit is None or ", got " not in str(error) else f"; write {unit.examples}"
        raise Misconfigured(f"{error}{remedy}") from None
    if check := _get_marks(name).get("check"):
        check(value)
    return value


def find_hash_fault(name: str, raw: object) -> str:
    """Return why the hash in Redis may not set a setting to `raw`; '' when it may, and for an unknown setting.

    Anyone who can write to Redis can write there, so only what is marked is allowed. The hash never names code: a
    strategy `module:function` is allowed only in code, in a file or in the environment.
    """
    if name not in _TYPES:
        return ""
    marks = _get_marks(name)
    if "in_hash" not in marks:
        return f"{name} cannot be set in the broker"
    if name in ("prioritise", "autoscale") and ":" in str(raw):
        return f"{name} cannot name code in the broker"
    try:
        bound = _find_bound(name, parse_value(name, raw), marks)
    except Misconfigured:
        return ""  # reported with all other errors
    return f"{name} is {format_value(raw)}: in the broker {bound} at most" if bound else ""


_SLOTS_IN_HASH = {"trio": 10_000, "asyncio": 10_000, "thread": 512, "boxed": 256}
"""The most slots of a budget that the hash may set, by kind of task."""
_WORKERS_IN_HASH = 1000
"""The most worker processes that the hash may let autoscaling start."""


def _find_bound(name: str, value: Any, marks: Mapping[str, Any]) -> str:
    """Return the bound that a value of the hash exceeds; '' when it exceeds none."""
    if name == "budgets":
        for kind, budget in parse_budgets(value).items():
            largest = max(bound for bound in (budget.minimum, budget.maximum) if isinstance(bound, int))
            if largest > (limit := _SLOTS_IN_HASH.get(kind, DEFAULT_MAXIMUM)):
                return f"{kind} has {limit} slots"
    if name == "autoscale":
        scaled = parse_autoscale(value)
        return f"maximum is {_WORKERS_IN_HASH}" if scaled and scaled.maximum > _WORKERS_IN_HASH else ""
    if "most" in marks and isinstance(value, int | float) and not value <= marks["most"]:
        return f"it is {marks['most']:.0f}"
    return ""


def _get_marks(name: str) -> Mapping[str, Any]:
    return next(meta.extra or {} for meta in _TYPES[name].__metadata__ if isinstance(meta, Meta))


def get_hash_limits() -> dict[str, str]:
    """Return for each setting whether the hash in Redis may set it, for the documentation."""
    marks_by_name = {name: _get_marks(name) for name in _TYPES}
    return {
        name: "no" if "in_hash" not in marks else f"up to {marks['most']:.0f}" if "most" in marks else "yes"
        for name, marks in marks_by_name.items()
    }


def mask_setting(name: str, value: object) -> Any:
    """Return the value of a setting without passwords and secrets: also the path of a webhook is one."""
    masked = mask_passwords({name: value})[name]
    if name.endswith("alert_webhook") and isinstance(masked, str) and masked.count("/") > 2:
        return f"{'/'.join(masked.split('/')[:3])}/{MASK}"
    return masked


def format_value(raw: object) -> str:
    """Return a value as text, without passwords."""
    return str(mask_passwords(repr(raw), maybe_url=True))


def find_variable_fault(name: str, value: str) -> str:
    """Return what is wrong with a variable of the environment; '' if nothing is, or if it is not celery5's."""
    setting = name.removeprefix(PREFIX).lower()
    if not name.startswith(PREFIX) or setting not in _TYPES or name != PREFIX + setting.upper():
        similar = suggest_variable(name)
        return _NO_SETTING.format(similar) if similar else ""
    try:
        if value:
            parse_value(setting, value)
    except Misconfigured as error:
        return f"is {format_value(value)}: {error}"
    return ""


def _parse_text(name: str, raw: object) -> object:
    """Return a text parsed for the setting `name`; what is not a text, or needs no parsing, is returned as it is.

    Tables are JSON where only text is possible, as in the environment. Raises Misconfigured.
    """
    if not isinstance(raw, str):
        return raw
    if get_origin(get_args(_TYPES[name])[0]) is dict:
        return parse_json_object(raw, name)
    unit: TextKind[Any] | None = _get_marks(name).get("unit")
    return raw if unit is None else unit.parse_unit(raw)


def find_changed_settings(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the names of the settings whose values differ."""
    return tuple(name for name in _TYPES if getattr(old, name) != getattr(new, name))


def suggest_variable(name: str) -> str:
    """Return a variable similar to a misspelt one; '' if the name is valid, or nothing is similar."""
    variables = [PREFIX + setting.upper() for setting in (*_TYPES, "app", "app_name", "config")]
    if not name.startswith(PREFIX) or name in variables:
        return ""
    return find_similar(name, variables, cutoff=0.9)


def get_descriptions() -> dict[str, str]:
    """Return the description of each setting, for the documentation and `--help`."""
    descriptions: dict[str, str] = {}
    for name, annotation in _TYPES.items():
        meta = next(item for item in annotation.__metadata__ if isinstance(item, Meta))
        descriptions[name] = meta.description or ""
    return descriptions


_OTHER_VARIABLES = ("APP", "CLUSTER", "CONFIG", "CONTROLLER", "JOB", "JOURNAL", "TEST")
"""The beginnings, after PREFIX, of variables that are no settings."""


class SettingOrigin(msgspec.Struct, frozen=True):
    """One setting with its value and its origin."""

    setting: str
    # With passwords masked.
    value: Any
    # `flag --concurrency`, `code`, `CELERY5_CONCURRENCY`, `file celery5.toml`, or `default`.
    origin: str


class ConfiguredApplication(Protocol):
    """The application whose settings are listed."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    @property
    def explicit_settings(self) -> ExplicitSettings:
        """The settings from code and flags."""
        ...

    def read_configuration(self) -> LoadedConfiguration | None:
        """Return the current content of the configuration, None without one. Raises Misconfigured."""


def get_origins(app: ConfiguredApplication) -> list[SettingOrigin]:
    """Return all settings of an application, in the order of the guide. Raises Misconfigured."""
    configuration, settings = app.read_configuration(), app.settings
    return [
        SettingOrigin(name, mask_setting(name, getattr(settings, name)), _origin(name, app, configuration))
        for name in Settings.__struct_fields__
    ]


def find_warnings(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that is allowed, but probably a mistake."""
    warnings: list[str] = []
    hard, soft = settings.time_limit, settings.soft_time_limit
    if hard is not None and soft is not None and soft >= hard:
        warnings.append(f"soft_time_limit={soft:g} never comes: time_limit={hard:g} is not longer")
    if settings.inbox and not settings.inbox_signatures:
        warnings.append("inbox_signatures=False: whoever can write to Redis commands the workers")
    if settings.status_port and settings.status_host not in ("127.0.0.1", "::1", "localhost"):
        warnings.append(f"status_host={settings.status_host}: the status port asks nobody who they are")
    warnings += [
        f"{name} is in the environment, and is no setting{find_hint('setting', name.removeprefix(PREFIX).lower())}"
        for name in find_unknown_variables(environ)
    ]
    return warnings + [
        f"{name} is in the environment, and is not read; {hint}"
        for name in sorted(environ)
        if (hint := find_variable_hint(name, _TYPES))
    ]


def find_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that begin with PREFIX and mean nothing."""
    settings = {PREFIX + name.upper() for name in Settings.__struct_fields__}
    other_prefixes = tuple(PREFIX + name for name in _OTHER_VARIABLES)
    names = sorted(
        name for name in environ if name.startswith(PREFIX) and not name.startswith(other_prefixes)
    )
    return [name for name in names if name not in settings]


def _origin(name: str, app: ConfiguredApplication, configuration: LoadedConfiguration | None) -> str:
    source = find_source(name, app.explicit_settings, os.environ, configuration)
    if source is None:
        return "default"
    if source.kind == "explicit":
        return f"flag --{name.replace('_', '-')}" if name in app.explicit_settings.flags else "code"
    return (
        configuration.where if configuration is not None and source.kind == "configuration" else source.where
    )
