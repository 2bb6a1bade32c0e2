"""Parse and check cluster descriptions: the processes that an application should have.

A description is a TOML table: groups of equal members, such as `[workers.mail]`, and the hosts that they run
on. All errors are reported at once, each with its key.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.cluster.canary_limit import CANARY_VARIABLE, CanaryBounds, format_bounds
from celery5.protocol.cluster.members import KINDS, MAX_GROUP_MEMBERS, Kind, Member
from celery5.protocol.cluster.own_broker import (
    SINGLE_HOST_ERROR,
    OwnBroker,
    find_broker_conflicts,
    parse_own_broker,
)
from celery5.protocol.text_values import DURATION, NAMES, SIZE, TextKind
from celery5.similar_names import did_you_mean

COMMON_FLAGS = {
    "broker": str,
    "config": str,
    "inbox": bool,
    "inbox_signatures": bool,
    "keys": str,
    "log_format": ("auto", "json", "console", "journal"),
    "log_level": ("debug", "info", "warning", "error"),
    "reload": bool,
    "status_host": str,
    "status_port": int,
}
"""The flags of every kind of process, with their types. Each further member gets the next `status_port`."""
WORKER_FLAGS = {
    "capacity": str,
    "concurrency": int,
    "cpu_slots": int,
    "grace_period": float,
    "max_jobs": int,
    "max_memory": "size",
    "processors": list,
    "queues": list,
}
PUBLISHER_FLAGS = {
    **dict.fromkeys(("backlog", "certificate", "client_ca", "connections", "key", "socket", "tcp"), str),
    "plain": bool,
}
FLAG_TYPES: Mapping[Kind, Mapping[str, Any]] = {
    "worker": {**COMMON_FLAGS, **WORKER_FLAGS},
    "router": COMMON_FLAGS,
    "scheduler": COMMON_FLAGS,
    "publisher": {**COMMON_FLAGS, **PUBLISHER_FLAGS},
}
"""The flags that a group may set, by kind: flags of `celery5 KIND start`, with the type of each."""
UNSUPPORTED_FLAGS = {
    "processes": "each member is one process: say count = N",
    "name": "each member has its own name, made of its group's",
    "burst": "members stay until they are stopped",
}
"""Flags that make no sense for a member, with what to do instead."""
_DASHBOARD = (
    "the dashboard is no member: run `celery5 dashboard start` beside the Controller, or mount it in your web "
    "application (celery5 docs controller)"
)
_SCHEDULERS = "write [schedulers.NAME]: a Scheduler sends the periodic tasks"
NO_MEMBERS = {
    **dict.fromkeys(("dashboards", "dashboard", "web", "flower"), _DASHBOARD),
    **dict.fromkeys(("beat", "beats", "celerybeat", "cron"), _SCHEDULERS),
}
"""Names of sections that are no kind of member, with what to do instead."""


class ValueChecker:
    """Check the values of flags and variables.

    A method returns the error, as text that follows the key; '' for none.

    This class accepts everything.
    """

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """Return the error in a flag of a group's members. The value has the flag's type."""
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """Return the error in a variable of their environment."""
        return ""


CANARY = "canary"
"""What the name of a canary has in place of a number."""
STOP_MARGIN = 50.0
"""Seconds beyond the grace period that a member has to end."""
KINDS_BY_SECTION: Mapping[str, Kind] = {f"{kind}s": kind for kind in KINDS}
_NAME = re.compile(r"[A-Za-z0-9_.]+(?:-[A-Za-z0-9_.]+)*")
ENVIRONMENT_KEY = "environment"
WORKER_GROUP_VARIABLE = "CELERY5_WORKER_GROUP"
"""The setting `worker_group` in the environment of a member."""
CAPACITY_VARIABLE = "CELERY5_CAPACITY"
"""The setting `capacity` there."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A remote machine that members run on. `~/` is the user's home on it."""

    name: str
    ssh: str  # the destination for the user's ssh
    command: str = "celery5"  # the celery5 program on it
    directory: str = "~"
    environment: Mapping[str, str] = {}
    environment_file: str = ""  # a file on it with more variables


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group of equal members."""

    kind: Kind
    name: str = "default"
    count: int = 1  # on each host
    flags: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()  # none: this host

    @property
    def key(self) -> str:
        """Return the group's name in the cluster, such as `worker-default`."""
        return f"{self.kind}-{self.name}"

    @property
    def total(self) -> int:
        """Return the number of its members on all hosts."""
        return self.count * (len(self.hosts) or 1)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster description."""

    platform: str = "auto"  # auto, kubernetes, processes, systemd, or `module:Class`
    restart_limit: int = 10  # deaths within `restart_period` seconds after which a member is given up
    restart_period: float = 300.0
    hung_after: float = 60.0  # seconds without a heartbeat after which a member is replaced; 0: never
    start_limit: float = 90.0  # seconds after its start until a member must be ready
    canary: float = 0.0  # seconds for which one new worker is watched before others are restarted; 0: none is
    canary_attempts: int = 10  # attempts that it must have ended before their failures count
    canary_failures: float = 0.2  # how much greater than that of the others the share of its failures may be
    environment: Mapping[str, str] = {}  # of all members
    groups: tuple[Group, ...] = ()
    hosts: Mapping[str, Host] = {}
    broker: OwnBroker | None = None  # run by the Controller itself


def build_members(
    cluster: Cluster,
    scale: Mapping[str, int] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 30.0,
) -> tuple[Member, ...]:
    """Return all members that should run.

    Args:
        scale: the number of members by the `key` of a group, over all its hosts. None: as the description says.
        environment: variables for every member, where the description has no value.
        grace: the default grace period in seconds.
    """
    return tuple(
        _member(cluster, group, host, number, dict(environment or {}), grace)
        for group in cluster.groups
        for place, host in enumerate(group.hosts or ("",))
        for number in range(1, _count_on_host(group, place, (scale or {}).get(group.key, group.total)) + 1)
    )


SPARES = 2
"""Additional members of a group on each host: the last one may still finish its jobs when another one is needed."""


def build_spares(
    cluster: Cluster,
    scale: Mapping[str, int],
    *,
    environment: Mapping[str, str],
    grace: float,
    has_capacity: bool = False,
) -> tuple[Member, ...]:
    """Return the members that a group may have in addition for a while, on each of its hosts.

    Their numbers follow those of the members that should run. A group of Workers with a capacity may have none: two
    processes must not have the same GPU. See `build_members` for the other parameters.

    Args:
        has_capacity: Whether the setting `capacity` has a value where the description has none.
    """
    return tuple(
        _member(cluster, group, host, number, dict(environment), grace)
        for group in cluster.groups
        if not _has_capacity(cluster, group, environment, default=has_capacity)
        for place, host in enumerate(group.hosts or ("",))
        for count in [_count_on_host(group, place, scale.get(group.key, group.total))]
        for number in range(count + 1, count + 1 + SPARES)
    )


def _has_capacity(cluster: Cluster, group: Group, environment: Mapping[str, str], *, default: bool) -> bool:
    """Return whether the members of a group are Workers with a capacity, as far as the description says."""
    variables = {**environment, **cluster.environment, **group.environment}
    stated = group.flags.get("capacity", variables.get(CAPACITY_VARIABLE))
    return group.kind == "worker" and (default if stated is None else bool(stated))


def build_canaries(
    cluster: Cluster,
    groups: Container[str],
    scale: Mapping[str, int],
    *,
    environment: Mapping[str, str],
    grace: float,
) -> tuple[Member, ...]:
    """Return an additional worker for each of these groups of Workers. See `build_members` for the rest."""
    canaries: list[Member] = []
    bounds = CanaryBounds(cluster.canary_attempts, cluster.canary)
    variables = {**environment, CANARY_VARIABLE: format_bounds(bounds)}
    for group in cluster.groups:
        if group.kind == "worker" and group.name in groups:
            host, number = (
                (group.hosts or ("",))[0],
                _count_on_host(group, 0, scale.get(group.key, group.total)) + 1,
            )
            canaries.append(_member(cluster, group, host, number, variables, grace, label=CANARY))
    return tuple(canaries)


def _count_on_host(group: Group, place: int, total: int) -> int:
    """Return how many of `total` members run on the host at the index `place` of the group's hosts."""
    hosts = len(group.hosts) or 1
    return total // hosts + (place < total % hosts)


def distribute_workers(cluster: Cluster, workers: int) -> dict[str, int]:
    """Distribute a total of worker processes over the groups, in proportion to their counts; return the scale.

    A group with a count has at least one worker, if there are enough.
    """
    groups = [group for group in cluster.groups if group.kind == "worker"]
    weights = {group.key: group.total for group in groups if group.total} or {
        group.key: 1 for group in groups
    }
    remaining = workers
    workers_by_group = {group.key: 0 for group in groups}
    for key in list(weights)[:remaining]:
        workers_by_group[key], remaining = 1, remaining - 1
    total_weight = sum(weights.values()) or 1
    ideal = {key: workers * weight / total_weight for key, weight in weights.items()}
    for _ in range(remaining if weights else 0):
        neediest = max(weights, key=lambda key: ideal[key] - workers_by_group[key])
        workers_by_group[neediest] += 1
    return workers_by_group


def _member(
    cluster: Cluster,
    group: Group,
    host: str,
    number: int,
    environment: dict[str, str],
    grace: float,
    *,
    label: str = "",
) -> Member:
    name = f"{group.key}-{label or number}" + (f"@{host}" if host else "")
    grace_period = group.flags.get("grace_period", grace) if group.kind == "worker" else grace
    # So that health checks of scope `group` are shared by the workers of a group, unless it is set otherwise.
    own_group = {WORKER_GROUP_VARIABLE: group.name} if group.kind == "worker" else {}
    return Member(
        name=name,
        kind=group.kind,
        group=group.name,
        host=host,
        arguments=(group.kind, "start", "--name", name, *format_flags(group.flags, number)),
        environment={**own_group, **environment, **cluster.environment, **group.environment},
        stop_after=grace_period + STOP_MARGIN,
    )


def format_flags(flags: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield the flags of the member with this number in its group as arguments of a command line."""
    for name, value in sorted(flags.items()):
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{flag}"
        elif isinstance(value, tuple):
            yield from (f"--{flag}", ",".join(cast("tuple[str, ...]", value)))
        else:
            yield from (f"--{flag}", str(value + number - 1 if name == "status_port" else value))


def parse_cluster(description: bytes | Mapping[str, Any], checker: ValueChecker | None = None) -> Cluster:
    """Return the cluster in a description, TOML or a table. Raises Misconfigured with all errors at once."""
    if isinstance(description, bytes):
        try:
            description = tomllib.loads(description.decode("utf-8-sig"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Misconfigured(f"not TOML: {error}") from None
    reader = _DescriptionReader(checker or ValueChecker())
    cluster = reader.cluster(description)
    if reader.errors:
        raise Misconfigured("; ".join(reader.errors))
    return cluster


class _DescriptionReader:
    """Reads one description and collects its errors."""

    def __init__(self, judge: ValueChecker) -> None:
        self.errors: list[str] = []
        self._judge = judge

    def cluster(self, table: Mapping[str, Any]) -> Cluster:
        allowed = ("platform", *_NUMBERS, ENVIRONMENT_KEY, "hosts", "broker", *KINDS_BY_SECTION)
        self._check_keys("", table, allowed)
        hosts = {name: self._host(name, host_table) for name, host_table in self._tables(table, "hosts")}
        groups = [
            self._group(plural, kind, name, group_table, hosts)
            for plural, kind in KINDS_BY_SECTION.items()
            for name, group_table in self._tables(table, plural)
        ]
        if not groups:
            self.errors.append(
                "no group of members: write [workers.default], or [routers.NAME], [schedulers.NAME]"
            )
        environment = self._environment(ENVIRONMENT_KEY, table.get(ENVIRONMENT_KEY, {}))
        return Cluster(
            platform=self._read_typed("platform", table.get("platform", "auto"), str, "auto"),
            environment=environment,
            groups=tuple(groups),
            hosts=hosts,
            broker=self._broker(table.get("broker"), groups, hosts, environment),
            **{name: self._number(name, table[name], *_NUMBERS[name]) for name in _NUMBERS if name in table},
        )

    def _broker(
        self, table: Any, groups: list[Group], hosts: Mapping[str, Host], environment: Mapping[str, str]
    ) -> OwnBroker | None:
        broker = parse_own_broker(table, self.errors)
        if broker is not None:
            self.errors += [SINGLE_HOST_ERROR] if hosts and not broker.is_custom else []
            self.errors += find_broker_conflicts("", {}, environment)
            for group in groups:
                self.errors += find_broker_conflicts(
                    f"{group.kind}s.{group.name}.", group.flags, group.environment
                )
        return broker

    def _host(self, name: str, table: Mapping[str, Any]) -> Host:
        self._check_keys(f"hosts.{name}.", table, ("ssh", "command", ENVIRONMENT_KEY, *_PATHS))
        if not _NAME.fullmatch(name):
            self.errors.append(f"hosts.{name}: {_WRONG_NAME}")
        ssh = self._read_typed(f"hosts.{name}.ssh", table.get("ssh", name), str, name)
        if not ssh or ssh.startswith("-") or any(character.isspace() for character in ssh):
            self.errors.append(f"hosts.{name}.ssh: {ssh!r} is no name of a host: write user@host, or host")
        texts = {key: self._text(f"hosts.{name}.{key}", table[key]) for key in _TEXTS if key in table}
        for path in _PATHS:
            if texts.get(path, "/")[:1] not in ("/", "~"):
                self.errors.append(f"hosts.{name}.{path}: {texts[path]!r} does not begin with / or ~/")
        environment = self._environment(f"hosts.{name}.{ENVIRONMENT_KEY}", table.get(ENVIRONMENT_KEY, {}))
        return Host(name=name, ssh=ssh, environment=environment, **texts)

    def _text(self, where: str, value: Any) -> str:
        """Return a text that is valid in a line of a unit file."""
        text: str = self._read_typed(where, value, str, "~")
        try:
            if text.isprintable() and shlex.split(text):
                return text
            self.errors.append(f"{where}: {text!r} is empty, or has characters that nobody can see")
        except ValueError as error:
            self.errors.append(f"{where}: {text!r} is no command: {error}")
        return "~"

    def _group(
        self, plural: str, kind: Kind, name: str, table: Mapping[str, Any], hosts: Mapping[str, Host]
    ) -> Group:
        where = f"{plural}.{name}."
        if not _NAME.fullmatch(name):
            self.errors.append(f"{plural}.{name}: {_WRONG_NAME}")
        types = FLAG_TYPES[kind]
        self._check_keys(where, table, ("count", ENVIRONMENT_KEY, "hosts", *types))
        host_names = self._names(f"{where}hosts", table.get("hosts", []))
        for host in host_names:
            if host not in hosts:
                self.errors.append(
                    f"{where}hosts: no host {host!r}{_suggest(host, hosts)}; write [hosts.{host}]"
                )
        flags = {
            flag: self._flag(kind, where, flag, table[flag], types[flag]) for flag in types if flag in table
        }
        count = table.get("count", 1)
        return Group(
            kind=kind,
            name=name,
            count=int(self._number(f"{where}count", count, int, 0, MAX_GROUP_MEMBERS)),
            flags={flag: value for flag, value in flags.items() if not _has_no_effect(flag, value)},
            environment=self._environment(where + ENVIRONMENT_KEY, table.get(ENVIRONMENT_KEY, {})),
            hosts=host_names,
        )

    def _flag(self, kind: Kind, where: str, name: str, raw: Any, flag_type: Any) -> Any:
        error_count = len(self.errors)
        value = self._flag_of_type(where + name, raw, flag_type)
        if len(self.errors) == error_count and not _has_no_effect(name, value):
            self._judged(where + name, self._judge.check_flag(kind, name, value))
        return value

    def _flag_of_type(self, where: str, value: Any, kind: Any) -> Any:
        if isinstance(kind, tuple):
            choices = cast("tuple[str, ...]", kind)
            if value not in choices:
                suggestion = _suggest(str(value), choices)
                self.errors.append(f"{where}: {value!r} is none of {', '.join(choices)}{suggestion}")
            return value
        if kind is list:
            return self._names(where, value)
        if kind == "size":
            return self._number(where, self._from_text(where, value or 0, SIZE, 0), int, 0, 2**63)
        if kind in (int, float):
            return self._number(where, value, kind, 0, 10**9)
        return self._read_typed(where, value, kind, kind())

    def _judged(self, where: str, error: str) -> None:
        if error:
            self.errors.append(f"{where} {error}")

    def _names(self, where: str, value: Any) -> tuple[str, ...]:
        names = self._from_text(where, value, NAMES, ())
        listed = cast("Sequence[Any]", names if isinstance(names, list | tuple) else [None])
        if not all(isinstance(name, str) and name for name in listed):
            self.errors.append(f'{where}: {value!r} is not {NAMES.noun}: write ["one", "other"]')
            return ()
        return tuple(listed)

    def _from_text(self, where: str, value: Any, kind: TextKind[Any], default: Any) -> Any:
        """Return the parsed text, or `default` after an error; other types are returned unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return kind.parse(value)
        except Misconfigured as error:
            self.errors.append(f"{where}: {error}")
            return default

    def _number(
        self, where: str, value: Any, kind: Callable[[Any], Any], minimum: float, maximum: float
    ) -> Any:
        if kind is float:
            value = self._from_text(where, value, DURATION, minimum)
        fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not fits or not minimum <= value <= maximum:
            what = "a whole number" if kind is int else "a number"
            self.errors.append(f"{where}: {value!r} is not {what} from {minimum:g} to {maximum:g}")
            return kind(minimum)
        return kind(value)

    def _read_typed(self, where: str, value: Any, kind: type, default: Any) -> Any:
        if isinstance(value, kind):
            return value
        self.errors.append(f"{where}: {value!r} is not {_TYPE_NAMES[kind]}")
        return default

    def _environment(self, where: str, table: Any) -> dict[str, str]:
        variables: dict[str, str] = {}
        for name, value in self._read_typed(where, table, dict, {}).items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                self.errors.append(f"{where}.{name}: {value!r} is not a text")
            elif not name or "=" in name or "\0" in f"{name}{value}":
                self.errors.append(
                    f"{where}.{name}: no variable of the environment can be called or say that"
                )
            else:
                variables[name] = str(value)
                self._judged(f"{where}.{name}", self._judge.check_variable(name, variables[name]))
        return variables

    def _tables(self, parent: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, table in self._read_typed(key, parent.get(key, {}), dict, {}).items():
            if isinstance(table, dict):
                yield name, cast("dict[str, Any]", table)
            else:
                self.errors.append(f"{key}.{name}: {table!r} is not a table: write [{key}.NAME]")

    def _check_keys(self, where: str, table: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        for key in table:
            if key in UNSUPPORTED_FLAGS and where:
                self.errors.append(f"{where}{key}: {UNSUPPORTED_FLAGS[key]}")
            elif key in NO_MEMBERS and not where:
                self.errors.append(f"{key}: {NO_MEMBERS[key]}")
            elif key not in allowed:
                suggestion = _suggest(key, allowed) or f"; known: {', '.join(sorted(allowed))}"
                self.errors.append(f"{where}{key} is not known{suggestion}")


def _suggest(name: str, candidates: Any) -> str:
    suggestion = did_you_mean(name, candidates)
    return f"; {suggestion}" if suggestion else ""


def _has_no_effect(name: str, value: Any) -> bool:
    """Return whether a flag has the same effect as its absence."""
    return value == () or value == "" or (name in ("max_jobs", "max_memory") and not value)


_NUMBERS: Mapping[str, tuple[Callable[[Any], Any], float, float]] = {
    "restart_limit": (int, 1, 10**6),
    "restart_period": (float, 1, 10**6),
    "hung_after": (float, 0, 10**6),
    "start_limit": (float, 1, 10**6),
    "canary": (float, 0, 86_400),
    "canary_attempts": (int, 1, 10**6),
    "canary_failures": (float, 0, 1),
}
_PATHS = ("directory", "environment_file")
_TEXTS = ("command", *_PATHS)
_TYPE_NAMES = {str: "a text", bool: "true or false", dict: "a table"}
_WRONG_NAME = "use letters, digits, dots, underscores, and dashes between them"
