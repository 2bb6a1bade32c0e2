"""Routes: which queue a task's jobs go to, and which broker a queue is on, where there are several brokers.

Floor: protocol. Pure. Reads: nothing. Writes: nothing.

A queue is on one broker and no other. A route says so by the queue's name, or by that of a task, whose own queue is
meant then; a queue that has a broker's name is there without a word; what nobody routes is on the default broker.

`routes` choose a broker. `queue_routes` choose a queue: they give one to tasks that name none.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from re import fullmatch

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.names import is_queue_name

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
    routes = msgspec.structs.replace(routes, placed=placed)
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
    wrong += ["routes: a pattern is empty" for each in rules if not each]
    return wrong


def format_unknown_broker(broker: str, brokers: Collection[str]) -> str:
    """What is said of a broker that there is not."""
    near = get_close_matches(broker, brokers, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return f"no broker is named {broker!r}{meant} known: {', '.join(sorted(brokers))}"


def _fault(name: str, url: str) -> str:
    if name == DEFAULT_BROKER:
        return f"{DEFAULT_BROKER!r} is the one that the setting broker says: give it there"
    if not fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        return f"the name {name!r}: use 1 to 40 letters, digits, - and _"
    if url.partition(":")[0].lower() not in ("redis", "rediss", "unix"):
        return f"{name}: give a URL that begins with redis://, rediss:// or unix://"
    return ""
