"""Route tasks to queues, and queues to brokers.

A queue is on exactly one broker. A route names the queue, or a task, and then means the task's own queue. A queue with
the name of a broker is on that broker without a route. All queues without a route are on the default broker.

`routes` choose a broker. `queue_routes` choose the queue of tasks that name none.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from re import fullmatch
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from celery5.errors import BadBrokerURL, Misconfigured
from celery5.protocol.masking import mask_passwords
from celery5.protocol.names import is_queue_name
from celery5.protocol.shards import get_queue_of_shard
from celery5.similar_names import did_you_mean

EXPECTED = (
    "redis://[user:password@]host[:port][/database], rediss://... for TLS, unix:///path/to.sock[?db=0], "
    "redis+sentinel://[user:password@]host[:port],host[:port],.../service[/database], "
    "or redis+cluster://[user:password@]host[:port],host[:port],..."
)
SCHEMES: Mapping[str, tuple[str, str]] = {
    "redis": ("tcp", "server"),
    "rediss": ("tls", "server"),
    "unix": ("unix", "server"),
    "redis+sentinel": ("tcp", "sentinel"),
    "rediss+sentinel": ("tls", "sentinel"),
    "redis+cluster": ("tcp", "cluster"),
    "rediss+cluster": ("tls", "cluster"),
}
"""The schemes of URLs, with the `kind` and the `topology` of the endpoints that they name."""
DEFAULT_PORTS: Mapping[str, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
"""The port of a host that names none, by topology."""
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
OPTIONS = frozenset({"username", "password", "host", "port", "path", "db", *TLS_OPTIONS})
"""The options of a URL that names one server."""
_SEVERAL = frozenset({"username", "password", "db", *TLS_OPTIONS})
TOPOLOGY_OPTIONS: Mapping[str, frozenset[str]] = {
    "server": OPTIONS,
    "sentinel": _SEVERAL | {"service", "sentinel_username", "sentinel_password"},
    "cluster": _SEVERAL,
}
"""The options of a URL, by topology."""
CERTIFICATE_CHECKS = ("none", "optional", "required")
_HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
"""A host name, an IPv4 address, or an IPv6 address. A name may have letters beyond ASCII, and underscores."""
_BAD_HOST = "a host name has only letters, digits, dots, hyphens and underscores, and there is one host"


def parse_broker_url(url: str) -> dict[str, Any]:
    """Read the URL of a broker, as redis-py does where it says something; nothing is looked up and no file is read.

    Returns:
        The fields of an `Endpoint` that the URL names, with its `kind`.

    Raises:
        BadBrokerURL: one line that says what is wrong and what is expected, with the password masked.
    """
    if "#" in str(url):  # the rest would be dropped: a part of the password, the host, the database
        raise make_url_error(url, "it has a #: write %23 for a # in a password or a path")
    scheme, _, _ = str(url).partition("://")
    if scheme not in SCHEMES or not url.startswith(f"{scheme}://"):
        raise make_url_error(url, "it cannot be understood")
    kind, topology = SCHEMES[scheme]
    try:
        url_of_one, hosts = _split_hosts(url) if topology != "server" else (url, [])
        parts = urlsplit(url_of_one)
        nodes = [_read_node(urlsplit(f"//{host}"), DEFAULT_PORTS[topology]) for host in hosts]
        host, port = _read_node(parts)
    except (ValueError, TypeError, AttributeError):
        # The text of the error is dropped: with a badly quoted password it can contain a part of it.
        raise make_url_error(url, "it cannot be understood") from None
    for node in nodes or [(host, port)]:
        _check_node(url, *node, is_needed=bool(nodes))
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    _check_options(url, options, topology)
    fields: dict[str, Any] = {**options, "kind": kind}
    fields |= {"username": unquote(parts.username)} if parts.username else {}
    fields |= {"password": unquote(parts.password)} if parts.password else {}
    if scheme == "unix":
        fields |= {"path": unquote(parts.path)} if parts.path else {}
        if not fields.get("path"):
            raise make_url_error(url, "it names no socket")
        return fields | _parse_numbers(fields) | _parse_tls(options)
    database = parts.path.strip("/")
    if topology == "server":
        fields |= {"host": host} if host else {}
        fields |= {"port": port} if port else {}
    else:
        fields |= {"topology": topology, "nodes": tuple(nodes)}
        if topology == "sentinel":
            service, _, database = database.partition("/")
            fields = {"service": unquote(service)} | fields if service else fields
            _check_service(url, fields.get("service", ""))
    fields = ({"db": database} if database else {}) | fields
    _check_database(url, fields, topology)
    return fields | _parse_numbers(fields) | _parse_tls(options)


def _check_database(url: str, fields: Mapping[str, Any], topology: str) -> None:
    database = fields.get("db", "0")
    if not re.fullmatch(r"[0-9]+", database):
        raise make_url_error(url, "the database after the slash must be a number")
    if topology == "cluster" and int(database):
        raise make_url_error(url, "a cluster has only the database 0")


def _split_hosts(url: str) -> tuple[str, list[str]]:
    """Return a URL that names several hosts as one without any, and the hosts with their ports."""
    scheme, _, rest = url.partition("://")
    end = min((rest.index(mark) for mark in "/?" if mark in rest), default=len(rest))
    login, at, hosts = rest[:end].rpartition("@")
    return f"{scheme}://{login}{at}{rest[end:]}", hosts.split(",")


def _read_node(parts: SplitResult, default_port: int | None = None) -> tuple[str, int | None]:
    """Return the host and the port of one server. Raises ValueError."""
    port = parts.port
    return unquote(parts.hostname or ""), default_port if port is None else port


def _check_node(url: str, host: str, port: int | None, *, is_needed: bool) -> None:
    if is_needed and not host:
        raise make_url_error(url, "a host is missing: write host:port,host:port")
    if host and not _HOST.fullmatch(host):
        raise make_url_error(url, _BAD_HOST)
    if port == 0:
        raise make_url_error(url, "the port must be a number from 1 to 65535")


def _check_service(url: str, service: str) -> None:
    """Check the name under which sentinels watch a primary: Sentinel itself takes letters, digits, `.`, `-` and `_`."""
    if not service:
        raise make_url_error(
            url, "it names no service: add the name under which the sentinels watch the primary"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", service):
        raise make_url_error(
            url, "the name of the service has only letters, digits, dots, hyphens and underscores"
        )


def _parse_numbers(fields: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(fields[name]) for name in ("port", "db") if name in fields}


def _parse_tls(options: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if checks := options.get("ssl_cert_reqs"):  # Celery's spelling, CERT_NONE, is understood too
        fields["ssl_cert_reqs"] = checks.lower().removeprefix("cert_")
    if name_check := options.get("ssl_check_hostname"):
        fields["ssl_check_hostname"] = name_check.upper() not in ("0", "F", "FALSE", "N", "NO")
    return fields


def make_url_error(url: object, why: str) -> BadBrokerURL:
    """Return the error for a URL that cannot be used."""
    text = str(url)
    if "//" not in text:  # its form is unknown, but a password would be before the @
        text = f"***{text[text.rfind('@') :]}" if "@" in text else text
    return BadBrokerURL(f"broker URL {mask_passwords(text, maybe_url=True)!r}: {why}; expected {EXPECTED}")


def _check_options(url: str, options: dict[str, str], topology: str) -> None:
    known = TOPOLOGY_OPTIONS[topology]
    if unknown := sorted(set(options) - known):
        raise make_url_error(url, f"unknown option {', '.join(unknown)} (known: {', '.join(sorted(known))})")
    if not re.fullmatch(r"-?[0-9]+", options.get("db", "0")):
        raise make_url_error(url, "it cannot be understood")
    if int(options.get("db", 0)) < 0:
        raise make_url_error(url, "the database must be a number, 0 or more")
    if not _HOST.fullmatch(options.get("host", "localhost")):
        raise make_url_error(url, _BAD_HOST)
    port = options.get("port", "1")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise make_url_error(url, "the port must be a number from 1 to 65535")
    if options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_") not in CERTIFICATE_CHECKS:
        raise make_url_error(url, f"ssl_cert_reqs is one of {', '.join(CERTIFICATE_CHECKS)}")


DEFAULT_BROKER = "default"
"""The name of the broker in the setting `broker`."""


class TaskRoute(msgspec.Struct, frozen=True):
    """The `queue` and the `broker` that a task names, if any."""

    task: str
    queue: str | None = None
    broker: str | None = None


class Routes(msgspec.Struct, frozen=True):
    """The routes of an application."""

    brokers: frozenset[str] = frozenset({DEFAULT_BROKER})
    rules: tuple[tuple[str, str], ...] = ()  # a name or a glob, and the broker; the first match counts
    default_queue: str = "default"
    # The brokers of queues that tasks name as their own.
    queue_brokers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])

    def match_rule(self, name: str) -> str | None:
        """Return the broker of the first rule that matches the name of a queue or task; None if none does."""
        return next((broker for pattern, broker in self.rules if fnmatchcase(name, pattern)), None)

    def get_broker(self, queue: str) -> str:
        """Return the broker of a queue and of its shards."""
        queue = get_queue_of_shard(queue)
        broker = self.match_rule(queue)
        if broker is not None:
            return broker
        default = queue if queue in self.brokers else DEFAULT_BROKER
        return self.queue_brokers.get(queue, default)

    def get_queue(self, route: TaskRoute) -> str:
        """Return the queue of a task's jobs: its own, or the default one, or the one with the name of its broker.

        Raises Misconfigured when that queue is not on the task's broker.
        """
        broker = route.broker or (self.match_rule(route.task) if route.queue is None else None)
        if broker is None:
            return route.queue or self.default_queue
        if broker not in self.brokers:
            raise Misconfigured(f"task {route.task}: {format_unknown_broker(broker, self.brokers)}")
        queue = route.queue or (
            self.default_queue if self.get_broker(self.default_queue) == broker else broker
        )
        actual = self.get_broker(queue)
        if actual != broker:
            raise Misconfigured(
                f"task {route.task} is to go to broker {broker!r}, but its queue {queue!r} is on broker {actual!r}: "
                f"give it another queue, or route {queue!r} to {broker!r}"
            )
        return queue


def make_routes(
    brokers: Collection[str], rules: Mapping[str, str], default_queue: str, tasks: Iterable[TaskRoute]
) -> Routes:
    """Return the routes, with the queues that the `tasks` of an application name.

    Raises Misconfigured with all errors at once: unknown brokers, queues that would be on two brokers.
    """
    names = frozenset({DEFAULT_BROKER, *brokers})
    routes = Routes(names, tuple(rules.items()), default_queue)
    queue_brokers, first_tasks, errors = dict[str, str](), dict[str, str](), list[str]()
    routed_tasks = list(tasks)
    for task_route in routed_tasks:
        broker = task_route.broker or routes.match_rule(task_route.task)
        if task_route.queue is None or broker not in names or routes.match_rule(task_route.queue) is not None:
            continue  # a route of the queue overrides that of a task; `get_queue` compares them
        if queue_brokers.setdefault(task_route.queue, broker) != broker:
            errors.append(
                f"queue {task_route.queue!r} would be on two brokers: task {first_tasks[task_route.queue]} puts it on "
                f"{queue_brokers[task_route.queue]!r}, task {task_route.task} on {broker!r}"
            )
        first_tasks.setdefault(task_route.queue, task_route.task)
    routes = msgspec.structs.replace(routes, queue_brokers=queue_brokers)
    for task_route in routed_tasks:
        try:
            routes.get_queue(task_route)
        except Misconfigured as error:
            errors.append(str(error))
    if errors:
        raise Misconfigured("; ".join(dict.fromkeys(errors)))
    return routes


def match_queue_route(task: str, queue_routes: Mapping[str, str]) -> str | None:
    """Return the queue of the first route that matches the name of a task; None if none does."""
    return next((queue for pattern, queue in queue_routes.items() if fnmatchcase(task, pattern)), None)


def find_unused_routes(tasks: Iterable[str], queue_routes: Mapping[str, str]) -> list[str]:
    """Return the patterns of the setting `queue_routes` that match none of these tasks."""
    names = list(tasks)
    return [pattern for pattern in queue_routes if not any(fnmatchcase(name, pattern) for name in names)]


def check_queue_routes(queue_routes: Mapping[str, str]) -> None:
    """Check the setting `queue_routes`. Raises Misconfigured for empty patterns and invalid names."""
    for pattern, queue in queue_routes.items():
        if not pattern:
            raise Misconfigured("a pattern is empty")
        if not is_queue_name(queue):
            raise Misconfigured(
                f"{pattern!r}: {queue!r} is not the name of a queue: "
                "use 1 to 200 characters without spaces, commas, braces or #"
            )


def find_route_errors(brokers: Mapping[str, str], rules: Mapping[str, str]) -> list[str]:
    """Return the errors in the settings `brokers` and `routes`, one line each."""
    errors = [f"brokers: {_fault(name, url)}" for name, url in brokers.items() if _fault(name, url)]
    names = {DEFAULT_BROKER, *brokers}
    errors += [
        f"routes: {pattern!r}: {format_unknown_broker(to, names)} (routes choose a broker; queue_routes choose a queue)"
        for pattern, to in rules.items()
        if to not in names
    ]
    errors += ["routes: a pattern is empty" for rule in rules if not rule]
    return errors


def format_unknown_broker(broker: str, brokers: Collection[str]) -> str:
    """Return the error for an unknown broker."""
    suggestion = f"; {did_you_mean(broker, brokers)}".rstrip()
    return f"no broker is named {broker!r}{suggestion} known: {', '.join(sorted(brokers))}"


def _fault(name: str, url: str) -> str:
    if name == DEFAULT_BROKER:
        return f"{DEFAULT_BROKER!r} is the one that the setting broker says: give it there"
    if not fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        return f"the name {name!r}: use 1 to 40 letters, digits, - and _"
    if url.partition(":")[0].lower() not in SCHEMES:
        return f"{name}: give a URL that begins with {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
    return ""
