"""The brokers of an application, and which of them each queue is on: `app.brokers`."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
from celery5.broker.routing.broker_router import AsyncBrokerRouter, BrokerMap, BrokerRouter
from celery5.broker.routing.unreachable import skip_unreachable
from celery5.connections.broker_connections import Connections
from celery5.errors import BrokerError, Misconfigured
from celery5.protocol.brokers import (
    DEFAULT_BROKER,
    Routes,
    TaskRoute,
    format_unknown_broker,
    make_routes,
    match_queue_route,
)
from celery5.protocol.job.job import Job, Options
from celery5.protocol.shards import find_shards, get_queue_of_shard, parse_shards
from celery5.runners.context import LOG_EVENT
from celery5.similar_names import find_similar

if TYPE_CHECKING:
    from celery5.config.settings import Settings


SIMILARITY_CUTOFF = 0.75
"""Similarity of two queue names, from 0 to 1, from which one may be a misspelt form of the other."""
MAX_CHECKED_NAMES = 100
"""The most undeclared queue names that are checked: an application may make any number of names."""


def find_meant_queue(queue: str, named: Iterable[str]) -> str:
    """Return the queue of these of which `queue` may be a misspelt form; '' for none.

    Names that differ only in digits, as those of tenants or shards, are no mistakes.
    """
    similar = find_similar(queue, named, cutoff=SIMILARITY_CUTOFF)
    return similar if _without_digits(similar) != _without_digits(queue) else ""


class BrokersTask(Protocol):
    """The properties of a task that decide which queue and broker its jobs go to."""

    send_options: Options

    @property
    def name(self) -> str:
        """Its name."""
        ...


class BrokersApplication(Protocol):
    """The application that has the brokers."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def settings(self) -> "Settings":
        """Its settings, which name the brokers."""
        ...

    @property
    def tasks(self) -> Mapping[str, BrokersTask]:
        """Its tasks, by name."""
        ...

    @property
    def connections(self) -> Connections:
        """The connections to all of its brokers."""
        ...


class Brokers:
    """The brokers of one application. With a single broker the methods cost almost nothing."""

    def __init__(self, app: "BrokersApplication") -> None:
        self._app = app
        self._routes: Routes | None = None
        self._known: object = None
        self._homes: dict[str, str] = {}
        self._used: frozenset[str] = frozenset()
        self._used_key: object = None
        self._doubted: set[str] = set()
        self._shards: Mapping[str, int] = {}
        self._shards_of: object = None

    def __repr__(self) -> str:
        return f"<Brokers {', '.join(self.names)}>"

    @property
    def app_name(self) -> str:
        """The name of the application."""
        return self._app.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the brokers, `default` first."""
        return (DEFAULT_BROKER, *self._app.settings.brokers)

    @property
    def is_multi_broker(self) -> bool:
        """Whether there is more than one broker."""
        return bool(self._app.settings.brokers)

    def reachable(self) -> AbstractContextManager[Mapping[str, BrokerError]]:
        """Leave out brokers that cannot be reached, within this block.

        Without it a call to all brokers raises BrokerError when one of them is unreachable:

            with app.brokers.reachable() as unreachable:
                state = app.info()

        Inside the block such a call raises it only when all of them are unreachable. A call about one queue or job
        on an unreachable broker raises it in any case.

        Returns:
            A context manager. It yields the errors of the unreachable brokers by name; the mapping grows when more
            fail.
        """
        return skip_unreachable()

    def broker_of_queue(self, queue: str) -> str:
        """Return the name of the broker that a queue is on. Raises Misconfigured for contradictory routes."""
        if not self._app.settings.brokers:
            return DEFAULT_BROKER
        routes = self.get_routes()
        broker = self._homes.get(queue)
        if broker is None:
            broker = self._homes[queue] = routes.get_broker(queue)
        return broker

    def get(self, name: str) -> Connections:
        """Return the connections to the broker of this name. Raises Misconfigured when there is none."""
        return self._app.connections.get(name)

    def queue_of_task(self, task: str, options: Options) -> str:
        """Return the queue for jobs with these options.

        It is the queue that the options name, else that of the first entry of the setting `queue_routes` that
        matches the task, else the default queue.

        Raises:
            Misconfigured: The queue is on a different broker than the options name.
        """
        settings = self._app.settings
        if not settings.brokers and options.broker is None:
            return options.queue or match_queue_route(task, settings.queue_routes) or settings.default_queue
        return self.get_routes().get_queue(self._declared(task, options))

    @property
    def shards(self) -> Mapping[str, int]:
        """The numbers of shards of the queues that the setting names. One may be 1: it had more before."""
        settings = self._app.settings
        if self._shards_of is not settings:
            self._shards, self._shards_of = parse_shards(settings.shards), settings
        return self._shards

    def is_sharded(self, queue: str) -> bool:
        """Return whether a queue has more than one shard."""
        return self.shards.get(queue, 1) > 1

    def list_shards(self, queue: str, names: Iterable[str] = ()) -> list[str]:
        """Return the names of a queue's shards, then those in `names` from an earlier, larger number.

        For a queue without shards, returns its own name; for the name of one shard, that name.
        """
        if get_queue_of_shard(queue) != queue:
            return [queue]
        return find_shards(queue, self.shards.get(queue, 1), names)

    def used_queues(self) -> frozenset[str]:
        """Return the queues that the tasks, the queue routes and the default queue name."""
        settings, tasks = self._app.settings, self._app.tasks
        if self._used_key != (settings, len(tasks)):
            named_queues = (task.send_options.queue for task in tasks.values() if task.send_options.queue)
            self._used = frozenset({settings.default_queue, *settings.queue_routes.values(), *named_queues})
            self._used_key = (settings, len(tasks))
        return self._used

    def warn_if_misspelled(self, task: str, queue: str) -> None:
        """Warn, once for each queue, when a job goes to an undeclared queue with a name similar to a declared one.

        Any name is a queue, also one that only the `--queues` of some workers name, so nothing is refused. No broker
        is read: `queue list` and `doctor` show whether a worker reads a queue.
        """
        used = self.used_queues()
        if queue in used or queue in self._doubted or len(self._doubted) >= MAX_CHECKED_NAMES:
            return
        self._doubted.add(queue)
        if similar := find_meant_queue(queue, used):
            hint = (
                f"no task, queue route or default queue of application {self._app.name!r} names it; "
                f"did you mean {similar!r}? The job waits until a worker reads that queue"
            )
            LOG_EVENT.get()("queue:not-declared", "warning", task=task, queue=queue, hint=hint)

    def get_routes(self) -> Routes:
        """Return the routes of all tasks and queues. Raises Misconfigured with all contradictions."""
        settings, tasks = self._app.settings, self._app.tasks
        routes_key = (settings, len(tasks))
        if self._routes is None or self._known != routes_key:
            declared = [self._declared(task.name, task.send_options) for task in tasks.values()]
            self._homes = {}
            self._routes = make_routes(settings.brokers, settings.routes, settings.default_queue, declared)
            self._known = routes_key
        return self._routes

    def _declared(self, task: str, options: Options) -> TaskRoute:
        """Return a task's declared queue and broker. A queue from `queue_routes` counts as one that the task names."""
        queue = options.queue or match_queue_route(task, self._app.settings.queue_routes)
        return TaskRoute(task, queue, options.broker)

    def check(self) -> None:
        """Raise BadBrokerURL for an invalid URL, and Misconfigured for contradictory routes."""
        for name in self.names:
            _ = self.get(name).endpoint
        if self.is_multi_broker:
            _ = self.get_routes()

    def split_by_broker(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Return the jobs grouped by broker, in their order."""
        if not self._app.settings.brokers or len(jobs) < 2:
            return [jobs]
        parts: dict[str, list[Job]] = {}
        for job in jobs:
            parts.setdefault(self.broker_of_queue(job.queue), []).append(job)
        return list(parts.values())

    def connect(self, url: str) -> Connections:
        """Return connections to all brokers, with the default one at `url`."""
        if not self._app.settings.brokers:
            return Connections(url)
        return MultiBrokerConnections(url, self)

    def get_urls(self) -> dict[str, str]:
        """Return the URLs of the brokers besides the default one."""
        return dict(self._app.settings.brokers)


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())


class MultiBrokerConnections(Connections):
    """The connections of one application to several brokers. `endpoint` is that of the default one."""

    def __init__(self, url: str, brokers: Brokers) -> None:
        super().__init__(url)
        self._each = {DEFAULT_BROKER: Connections(url)}
        self._each |= {name: Connections(broker_url) for name, broker_url in brokers.get_urls().items()}
        self._map = BrokerMap(tuple(self._each), brokers.broker_of_queue, brokers.app_name)

    def get(self, name: str) -> Connections:
        """Return the connections to one broker. Raises Misconfigured."""
        if name not in self._each:
            raise Misconfigured(format_unknown_broker(name, self._each))
        return self._each[name]

    @property
    def masked_url(self) -> str:
        """The URLs without their passwords."""
        named_urls = [
            f"{name}: {connections.masked_url}"
            for name, connections in self._each.items()
            if name != DEFAULT_BROKER
        ]
        return ", ".join([self._each[DEFAULT_BROKER].masked_url, *named_urls])

    def _get_driver_without_loop(self) -> BlockingDriver:
        """Return a driver for plain Python that sends each call to the broker of its queue."""
        drivers = {name: connections.get_blocking_driver() for name, connections in self._each.items()}
        return BrokerRouter(self._map, drivers.__getitem__)

    def get_result_waiter(self) -> ResultWaiter:
        """Return a waiter in plain Python for results on all brokers."""
        from celery5.broker.routing.routed_results import RoutedResultWaiter

        return RoutedResultWaiter(self._map, lambda name: self._each[name].get_result_waiter())

    async def _get_driver_of_loop(self) -> AsyncDriver:
        """Return a driver for the running event loop that sends each call to the broker of its queue."""
        return AsyncBrokerRouter(self._map, lambda name: self._each[name].get_async_driver())

    async def _get_result_waiter_of_loop(self) -> AsyncResultWaiter:
        """Return a waiter in the running event loop for results on all brokers."""
        from celery5.broker.routing.routed_results import AsyncRoutedResultWaiter

        return AsyncRoutedResultWaiter(self._map, lambda name: self._each[name].get_async_result_waiter())

    def close(self) -> None:
        """Close the connections of plain Python."""
        with ExitStack() as stack:
            for connections in self._each.values():
                stack.callback(connections.close)
