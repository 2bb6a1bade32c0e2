"""Cluster description: which processes an application should have, parsed and checked.

A description is a TOML table: groups of equal members, such as `[workers.mail]`, and the hosts that they run
on. All errors are reported at once, each with its key.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.cluster.members import KINDS, Kind, Member
from celery5.protocol.cluster.own_broker import (
    SINGLE_HOST_ERROR,
    OwnBroker,
    find_broker_conflicts,
    parse_own_broker,
)
from celery5.protocol.similar_names import did_you_mean
from celery5.protocol.text_values import DURATION, NAMES, SIZE, TextKind

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
"""The numbered flags of each kind of process, by name. Each further member of a group gets the next port."""
WORKER_FLAGS = {
    "concurrency": int,
    "cpu_slots": int,
    "grace_period": float,
    "max_jobs": int,
    "max_memory": "size",
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
    "name": "each member has a name of its own, made of its group's",
    "burst": "members stay until they are stopped",
}
"""Flags that make no sense for a member, with what to do instead."""


class ValueChecker:
    """Checks values by what they mean to members.

    A method returns the error, in words that follow the key; '' for none.

    This class accepts everything.
    """

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """Return the error in a flag of a group's members. The value has the flag's type."""
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """Return the error in a variable of their environment."""
        return ""


STOP_MARGIN = 50.0
"""Seconds beyond the grace period that a member has to end."""
MAX_GROUP_MEMBERS = 10_000
"""The most members of one group."""
KINDS_BY_SECTION: Mapping[str, Kind] = {f"{kind}s": kind for kind in KINDS}
_NAME = re.compile(r"[A-Za-z0-9_.]+(?:-[A-Za-z0-9_.]+)*")
ENVIRONMENT_KEY = "environment"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Another machine that members run on. `~/` is the user's home there."""

    name: str
    ssh: str  # the destination for the user's ssh
    command: str = "celery5"  # the celery5 program there
    directory: str = "~"
    environment: Mapping[str, str] = {}
    environment_file: str = ""  # a file there with more variables


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
        """Return its name in the cluster, such as `worker-default`."""
        return f"{self.kind}-{self.name}"

    @property
    def total(self) -> int:
        """Return the number of its members on all hosts."""
        return self.count * (len(self.hosts) or 1)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster description."""

    platform: str = "auto"  # auto, processes, systemd, or `module:Class`
    restart_limit: int = 10  # deaths within `restart_period` seconds after which a member is given up
    restart_period: float = 300.0
    hung_after: float = 60.0  # seconds without a heartbeat after which a member is replaced; 0: never
    start_limit: float = 90.0  # seconds after its start until a member must be ready
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
        for number in range(1, _on_host(group, place, (scale or {}).get(group.key, group.total)) + 1)
    )


def _on_host(group: Group, place: int, total: int) -> int:
    """Return how many of `total` members run on the host at that `place` in the group's hosts."""
    hosts = len(group.hosts) or 1
    return total // hosts + (place < total % hosts)


def distribute_workers(cluster: Cluster, workers: int) -> dict[str, int]:
    """Distribute a total of worker processes over the groups, in proportion to their counts; return the scale.

    A group with a count has at least one worker, if there are enough.
    """
    groups = [each for each in cluster.groups if each.kind == "worker"]
    weights = {each.key: each.total for each in groups if each.total} or {each.key: 1 for each in groups}
    left = workers
    found = {each.key: 0 for each in groups}
    for key in list(weights)[:left]:
        found[key], left = 1, left - 1
    whole = sum(weights.values()) or 1
    ideal = {key: workers * weight / whole for key, weight in weights.items()}
    for _ in range(left if weights else 0):
        poorest = max(weights, key=lambda key: ideal[key] - found[key])
        found[poorest] += 1
    return found


def _member(
    cluster: Cluster, group: Group, host: str, number: int, environment: dict[str, str], grace: float
) -> Member:
    name = f"{group.key}-{number}" + (f"@{host}" if host else "")
    given = group.flags.get("grace_period", grace) if group.kind == "worker" else grace
    return Member(
        name=name,
        kind=group.kind,
        group=group.name,
        host=host,
        arguments=(group.kind, "start", "--name", name, *_arguments(group.flags, number)),
        environment={**environment, **cluster.environment, **group.environment},
        stop_after=given + STOP_MARGIN,
    )


def _arguments(flags: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield flags as command line arguments."""
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
            description = tomllib.loads(description.decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Misconfigured(f"not TOML: {error}") from None
    reading = _Reading(checker or ValueChecker())
    found = reading.cluster(description)
    if reading.errors:
        raise Misconfigured("; ".join(reading.errors))
    return found


class _Reading:
    """Reads one description and collects its errors."""

    def __init__(self, judge: ValueChecker) -> None:
        self.errors: list[str] = []
        self._judge = judge

    def cluster(self, said: Mapping[str, Any]) -> Cluster:
        known = ("platform", *_NUMBERS, ENVIRONMENT_KEY, "hosts", "broker", *KINDS_BY_SECTION)
        self._strange("", said, known)
        hosts = {name: self._host(name, each) for name, each in self._tables(said, "hosts")}
        groups = [
            self._group(plural, kind, name, each, hosts)
            for plural, kind in KINDS_BY_SECTION.items()
            for name, each in self._tables(said, plural)
        ]
        if not groups:
            self.errors.append(
                "no group of members: write [workers.default], or [routers.NAME], [schedulers.NAME]"
            )
        environment = self._environment(ENVIRONMENT_KEY, said.get(ENVIRONMENT_KEY, {}))
        return Cluster(
            platform=self._typed("platform", said.get("platform", "auto"), str, "auto"),
            environment=environment,
            groups=tuple(groups),
            hosts=hosts,
            broker=self._broker(said.get("broker"), groups, hosts, environment),
            **{name: self._number(name, said[name], *_NUMBERS[name]) for name in _NUMBERS if name in said},
        )

    def _broker(
        self, said: Any, groups: list[Group], hosts: Mapping[str, Host], environment: Mapping[str, str]
    ) -> OwnBroker | None:
        found = parse_own_broker(said, self.errors)
        if found is not None:
            self.errors += [SINGLE_HOST_ERROR] if hosts else []
            self.errors += find_broker_conflicts("", {}, environment)
            for each in groups:
                self.errors += find_broker_conflicts(
                    f"{each.kind}s.{each.name}.", each.flags, each.environment
                )
        return found

    def _host(self, name: str, said: Mapping[str, Any]) -> Host:
        self._strange(f"hosts.{name}.", said, ("ssh", "command", ENVIRONMENT_KEY, *_PATHS))
        if not _NAME.fullmatch(name):
            self.errors.append(f"hosts.{name}: {_WRONG_NAME}")
        ssh = self._typed(f"hosts.{name}.ssh", said.get("ssh", name), str, name)
        if not ssh or ssh.startswith("-") or any(each.isspace() for each in ssh):
            self.errors.append(f"hosts.{name}.ssh: {ssh!r} is no name of a host: write user@host, or host")
        texts = {each: self._text(f"hosts.{name}.{each}", said[each]) for each in _TEXTS if each in said}
        for each in _PATHS:
            if texts.get(each, "/")[:1] not in ("/", "~"):
                self.errors.append(f"hosts.{name}.{each}: {texts[each]!r} does not begin with / or ~/")
        environment = self._environment(f"hosts.{name}.{ENVIRONMENT_KEY}", said.get(ENVIRONMENT_KEY, {}))
        return Host(name=name, ssh=ssh, environment=environment, **texts)

    def _text(self, where: str, value: Any) -> str:
        """Return a text that is valid in a line of a unit file."""
        text: str = self._typed(where, value, str, "~")
        try:
            if text.isprintable() and shlex.split(text):
                return text
            self.errors.append(f"{where}: {text!r} is empty, or has characters that nobody can see")
        except ValueError as error:
            self.errors.append(f"{where}: {text!r} is no command: {error}")
        return "~"

    def _group(
        self, plural: str, kind: Kind, name: str, said: Mapping[str, Any], hosts: Mapping[str, Host]
    ) -> Group:
        where = f"{plural}.{name}."
        if not _NAME.fullmatch(name):
            self.errors.append(f"{plural}.{name}: {_WRONG_NAME}")
        types = FLAG_TYPES[kind]
        self._strange(where, said, ("count", ENVIRONMENT_KEY, "hosts", *types))
        wanted = self._names(f"{where}hosts", said.get("hosts", []))
        for host in wanted:
            if host not in hosts:
                self.errors.append(
                    f"{where}hosts: no host {host!r}{_near(host, hosts)}; write [hosts.{host}]"
                )
        flags = {
            each: self._flag(kind, where, each, said[each], types[each]) for each in types if each in said
        }
        count = said.get("count", 1)
        return Group(
            kind=kind,
            name=name,
            count=int(self._number(f"{where}count", count, int, 0, MAX_GROUP_MEMBERS)),
            flags={each: value for each, value in flags.items() if not _means_nothing(each, value)},
            environment=self._environment(where + ENVIRONMENT_KEY, said.get(ENVIRONMENT_KEY, {})),
            hosts=wanted,
        )

    def _flag(self, kind: Kind, where: str, name: str, said: Any, typed: Any) -> Any:
        before = len(self.errors)
        value = self._flag_of_type(where + name, said, typed)
        if len(self.errors) == before and not _means_nothing(name, value):
            self._judged(where + name, self._judge.check_flag(kind, name, value))
        return value

    def _flag_of_type(self, where: str, value: Any, kind: Any) -> Any:
        if isinstance(kind, tuple):
            choices = cast("tuple[str, ...]", kind)
            if value not in choices:
                near = _near(str(value), choices)
                self.errors.append(f"{where}: {value!r} is none of {', '.join(choices)}{near}")
            return value
        if kind is list:
            return self._names(where, value)
        if kind == "size":
            return self._number(where, self._from_text(where, value or 0, SIZE, 0), int, 0, 2**63)
        if kind in (int, float):
            return self._number(where, value, kind, 0, 10**9)
        return self._typed(where, value, kind, kind())

    def _judged(self, where: str, fault: str) -> None:
        if fault:
            self.errors.append(f"{where} {fault}")

    def _names(self, where: str, value: Any) -> tuple[str, ...]:
        names = self._from_text(where, value, NAMES, ())
        listed = cast("list[Any]", list(names) if isinstance(names, list | tuple) else [None])
        if not all(isinstance(each, str) and each for each in listed):
            self.errors.append(f'{where}: {value!r} is not {NAMES.noun}: write ["one", "other"]')
            return ()
        return tuple(listed)

    def _from_text(self, where: str, value: Any, kind: TextKind[Any], otherwise: Any) -> Any:
        """Return the value that a text stands for, or `otherwise` after an error; what is not a text stays as it is."""
        if not isinstance(value, str):
            return value
        try:
            return kind.parse(value)
        except Misconfigured as error:
            self.errors.append(f"{where}: {error}")
            return otherwise

    def _number(self, where: str, value: Any, kind: Callable[[Any], Any], least: float, most: float) -> Any:
        if kind is float:
            value = self._from_text(where, value, DURATION, least)
        fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not fits or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            self.errors.append(f"{where}: {value!r} is not {what} from {least:g} to {most:g}")
            return kind(least)
        return kind(value)

    def _typed(self, where: str, value: Any, kind: type, instead: Any) -> Any:
        if isinstance(value, kind):
            return value
        self.errors.append(f"{where}: {value!r} is not {_CALLED[kind]}")
        return instead

    def _environment(self, where: str, said: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, value in self._typed(where, said, dict, {}).items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                self.errors.append(f"{where}.{name}: {value!r} is not a text")
            elif not name or "=" in name or "\0" in f"{name}{value}":
                self.errors.append(
                    f"{where}.{name}: no variable of the environment can be called or say that"
                )
            else:
                found[name] = str(value)
                self._judged(f"{where}.{name}", self._judge.check_variable(name, found[name]))
        return found

    def _tables(self, said: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, each in self._typed(key, said.get(key, {}), dict, {}).items():
            if isinstance(each, dict):
                yield name, cast("dict[str, Any]", each)
            else:
                self.errors.append(f"{key}.{name}: {each!r} is not a table: write [{key}.NAME]")

    def _strange(self, where: str, said: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for each in said:
            if each in UNSUPPORTED_FLAGS and where:
                self.errors.append(f"{where}{each}: {UNSUPPORTED_FLAGS[each]}")
            elif each not in known:
                near = _near(each, known) or f"; known: {', '.join(sorted(known))}"
                self.errors.append(f"{where}{each} is not known{near}")


def _near(name: str, known: Any) -> str:
    meant = did_you_mean(name, known)
    return f"; {meant}" if meant else ""


def _means_nothing(name: str, value: Any) -> bool:
    """Return whether a flag has the same effect as its absence."""
    return value == () or value == "" or (name in ("max_jobs", "max_memory") and not value)


_NUMBERS: Mapping[str, tuple[Callable[[Any], Any], float, float]] = {
    "restart_limit": (int, 1, 10**6),
    "restart_period": (float, 1, 10**6),
    "hung_after": (float, 0, 10**6),
    "start_limit": (float, 1, 10**6),
}
_PATHS = ("directory", "environment_file")
_TEXTS = ("command", *_PATHS)
_CALLED = {str: "a text", bool: "true or false", dict: "a table"}
_WRONG_NAME = "use letters, digits, dots, underscores, and dashes between them"
