"""Routes: which queue a task's jobs go to, and which broker a queue is on, where there are several brokers.

A queue is on one broker and no other. A route says so by the queue's name, or by that of a task, whose own queue is
meant then; a queue that has a broker's name is there without a word; what nobody routes is on the default broker.

`routes` choose a broker. `queue_routes` choose a queue: they give one to tasks that name none.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from re import fullmatch
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from celery5.errors import BadBrokerURL, Misconfigured
from celery5.protocol.job.names import is_queue_name
from celery5.protocol.masking import mask_passwords
from celery5.protocol.similar_names import did_you_mean

EXPECTED = (
    "redis://[user:password@]host[:port][/database], rediss://... for TLS, or unix:///path/to.sock[?db=0]"
)
SCHEMES = ("redis", "rediss", "unix")
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
OPTIONS = frozenset({"username", "password", "host", "port", "path", "db", *TLS_OPTIONS})
CERTIFICATE_CHECKS = ("none", "optional", "required")
_HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
"""A host name, an IPv4 address, or an IPv6 address. A name may have letters beyond ASCII, and underscores."""
_BAD_HOST = "a host name has only letters, digits, dots, hyphens and underscores, and there is one host"


def check_broker_url(url: str) -> None:
    """Check that a text can be the URL of a broker; nothing is looked up and no file is read.

    Raises:
        BadBrokerURL: one line that says what is wrong and what is expected, with the password masked.
    """
    if "#" in str(url):  # what follows would be dropped: a part of the password, the host, the database
        raise make_url_error(url, "it has a #: write %23 for a # in a password or a path")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except (ValueError, TypeError, AttributeError):
        # The text of the error is dropped: with a badly quoted password it can contain a part of it.
        raise make_url_error(url, "it cannot be understood") from None
    if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise make_url_error(url, "it cannot be understood")
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    _check_options(url, options)
    if parts.scheme == "unix":
        if not (parts.path or options.get("path")):
            raise make_url_error(url, "it names no socket")
        return
    if host and not _HOST.fullmatch(unquote(host)):
        raise make_url_error(url, _BAD_HOST)
    if port == 0:
        raise make_url_error(url, "the port must be a number from 1 to 65535")
    if not re.fullmatch(r"[0-9]*", parts.path.strip("/")):
        raise make_url_error(url, "the database after the slash must be a number")


def make_url_error(url: object, why: str) -> BadBrokerURL:
    """Return the error for a URL that cannot be used."""
    text = str(url)
    if "//" not in text:  # its form is unknown, but a password would be before the @
        text = f"***{text[text.rfind('@') :]}" if "@" in text else text
    return BadBrokerURL(f"broker URL {mask_passwords(text, maybe_url=True)!r}: {why}; expected {EXPECTED}")


def _check_options(url: str, options: dict[str, str]) -> None:
    if unknown := sorted(set(options) - OPTIONS):
        raise make_url_error(
            url, f"unknown option {', '.join(unknown)} (known: {', '.join(sorted(OPTIONS))})"
        )
    if not re.fullmatch(r"-?[0-9]+", options.get("db", "0")):
        raise make_url_error(url, "it cannot be understood")
    if int(options.get("db", 0)) < 0:
        raise make_url_error(url, "the database must be a number, 0 or more")
    if not _HOST.fullmatch(options.get("host", "localhost")):
        raise make_url_error(url, _BAD_HOST)
    port = options.get("port", "1")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise make_url_error(url, "the port must be a number from 1 to 65535")
    # Celery's spelling, CERT_NONE, is understood too.
    if options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_") not in CERTIFICATE_CHECKS:
        raise make_url_error(url, f"ssl_cert_reqs is one of {', '.join(CERTIFICATE_CHECKS)}")


DEFAULT_BROKER = "default"
"""The name of the broker that the setting `broker` says."""


class TaskRoute(msgspec.Struct, frozen=True):
    """What a task says of where its jobs go: the `queue` and the `broker` that it names, if it does."""

    task: str
    queue: str | None = None
    broker: str | None = None


class Routes(msgspec.Struct, frozen=True):
    """Where everything goes: the names of the `brokers`, the `rules` in their order (a name or a glob, and the broker),
    the `default_queue`, and where tasks have put their own queues."""

    brokers: frozenset[str] = frozenset({DEFAULT_BROKER})
    rules: tuple[tuple[str, str], ...] = ()
    default_queue: str = "default"
    queue_brokers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])

    def match_rule(self, name: str) -> str | None:
        """The broker of the first rule that a queue's or a task's name fits."""
        return next((broker for pattern, broker in self.rules if fnmatchcase(name, pattern)), None)

    def get_broker(self, queue: str) -> str:
        """The broker that a queue is on."""
        said = self.match_rule(queue)
        if said is not None:
            return said
        own = queue if queue in self.brokers else DEFAULT_BROKER
        return self.queue_brokers.get(queue, own)

    def get_queue(self, said: TaskRoute) -> str:
        """The queue that a task's jobs go to: its own, else the default one, else the one that is named as the broker
        that it is to go to. Raises Misconfigured when that queue is on another broker."""
        wanted = said.broker or (self.match_rule(said.task) if said.queue is None else None)
        if wanted is None:
            return said.queue or self.default_queue
        if wanted not in self.brokers:
            raise Misconfigured(f"task {said.task}: {format_unknown_broker(wanted, self.brokers)}")
        queue = said.queue or (
            self.default_queue if self.get_broker(self.default_queue) == wanted else wanted
        )
        home = self.get_broker(queue)
        if home != wanted:
            raise Misconfigured(
                f"task {said.task} is to go to broker {wanted!r}, but its queue {queue!r} is on broker {home!r}: "
                f"give it another queue, or route {queue!r} to {wanted!r}"
            )
        return queue


def make_routes(
    brokers: Collection[str], rules: Mapping[str, str], default_queue: str, tasks: Iterable[TaskRoute]
) -> Routes:
    """The routes, with what the `tasks` of an application say of their own queues. Raises Misconfigured with all errors
    at once: a broker that nobody knows, a queue that would be on two."""
    names = frozenset({DEFAULT_BROKER, *brokers})
    routes = Routes(names, tuple(rules.items()), default_queue)
    placed, by, wrong = dict[str, str](), dict[str, str](), list[str]()
    listed = list(tasks)
    for each in listed:
        wanted = each.broker or routes.match_rule(each.task)
        if each.queue is None or wanted not in names or routes.match_rule(each.queue) is not None:
            continue  # a route of the queue's own is believed before that of a task; `queue` compares them
        if placed.setdefault(each.queue, wanted) != wanted:
            wrong.append(
                f"queue {each.queue!r} would be on two brokers: task {by[each.queue]} puts it on "
                f"{placed[each.queue]!r}, task {each.task} on {wanted!r}"
            )
        by.setdefault(each.queue, each.task)
    routes = msgspec.structs.replace(routes, queue_brokers=placed)
    for each in listed:
        try:
            routes.get_queue(each)
        except Misconfigured as error:
            wrong.append(str(error))
    if wrong:
        raise Misconfigured("; ".join(dict.fromkeys(wrong)))
    return routes


def match_queue_route(task: str, queue_routes: Mapping[str, str]) -> str | None:
    """Return the queue of the first route that matches the name of a task; None if none does."""
    return next((queue for pattern, queue in queue_routes.items() if fnmatchcase(task, pattern)), None)


def check_queue_routes(queue_routes: Mapping[str, str]) -> None:
    """Check the setting `queue_routes`. Raises Misconfigured for an empty pattern and for a name that no queue can
    have."""
    for pattern, queue in queue_routes.items():
        if not pattern:
            raise Misconfigured("a pattern is empty")
        if not is_queue_name(queue):
            raise Misconfigured(
                f"{pattern!r}: {queue!r} is not the name of a queue: "
                "use 1 to 200 characters without spaces, commas or braces"
            )


def find_route_errors(brokers: Mapping[str, str], rules: Mapping[str, str]) -> list[str]:
    """What is wrong with the settings `brokers` and `routes`, a line for each."""
    wrong = [f"brokers: {_fault(name, url)}" for name, url in brokers.items() if _fault(name, url)]
    known = {DEFAULT_BROKER, *brokers}
    wrong += [
        f"routes: {each!r}: {format_unknown_broker(to, known)} (routes choose a broker; queue_routes choose a queue)"
        for each, to in rules.items()
        if to not in known
    ]
    wrong += ["routes: a pattern is empty" for rule in rules if not rule]
    return wrong


def format_unknown_broker(broker: str, brokers: Collection[str]) -> str:
    """What is said of a broker that there is not."""
    meant = f"; {did_you_mean(broker, brokers)}".rstrip()
    return f"no broker is named {broker!r}{meant} known: {', '.join(sorted(brokers))}"


def _fault(name: str, url: str) -> str:
    if name == DEFAULT_BROKER:
        return f"{DEFAULT_BROKER!r} is the one that the setting broker says: give it there"
    if not fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        return f"the name {name!r}: use 1 to 40 letters, digits, - and _"
    if url.partition(":")[0].lower() not in ("redis", "rediss", "unix"):
        return f"{name}: give a URL that begins with redis://, rediss:// or unix://"
    return ""
