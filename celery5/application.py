"""Protocols of an application, for code that must not import `celery5.app.App`, which implements them.

They are read-only and name nothing from layers above the code that uses them. Code that needs more, such as
`send_many` for tasks, declares a Protocol of its own that extends one of these.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from celery5.protocol.events.sinks import SinkedTask

if TYPE_CHECKING:
    from celery5.broker.call import Call
    from celery5.broker.keys import Keys, QueueKeys
    from celery5.config.settings import Settings
    from celery5.connections.broker_connections import Connections
    from celery5.connections.brokers import Brokers
    from celery5.protocol.job.history import CallShape
    from celery5.protocol.job.job import Job, Options
    from celery5.protocol.job.retry_policy import RetryPolicy
    from celery5.protocol.limits import DeclaredLimits
    from celery5.protocol.task_kinds import EventLoop

T = TypeVar("T")


class DeclaredTask(SinkedTask, Protocol):
    """A task, for code that only looks it up."""

    send_options: "Options"

    @property
    def queue(self) -> str:
        """The queue that its jobs go to."""
        ...

    @property
    def policy(self) -> "RetryPolicy":
        """How its failed jobs are retried."""
        ...

    @property
    def resources(self) -> Mapping[str, float]:
        """What each job takes of its worker's capacity."""
        ...

    @property
    def kind(self) -> str:
        """Where it runs: `trio`, `asyncio`, `thread` or `boxed`."""
        ...

    @property
    def abandon_on_cancel(self) -> bool:
        """Whether nobody waits for its thread when a job is cancelled."""
        ...

    @property
    def declared_limits(self) -> "DeclaredLimits | None":
        """The limits that it declares."""
        ...

    @property
    def call_shape(self) -> "CallShape":
        """What must be known to show the arguments of its jobs."""
        ...


class Application(Protocol):
    """An application: its name, its settings, and its brokers."""

    @property
    def name(self) -> str:
        """The name, which scopes every key in Redis."""
        ...

    @property
    def module(self) -> str:
        """The module that created it."""
        ...

    @property
    def loop(self) -> "EventLoop":
        """The event loop of each `async def` that declares none."""
        ...

    @property
    def include(self) -> tuple[str, ...]:
        """The modules, and patterns of modules, that it includes."""
        ...

    @property
    def settings(self) -> "Settings":
        """The settings. Raises Misconfigured."""
        ...

    @property
    def keys(self) -> "Keys":
        """Its keys in Redis."""
        ...

    @property
    def connections(self) -> "Connections":
        """The connections to its broker, or to all of them."""
        ...

    @property
    def brokers(self) -> "Brokers":
        """Its brokers, and which of them each queue is on."""
        ...

    @property
    def tasks(self) -> Mapping[str, DeclaredTask]:
        """Its tasks, by name."""
        ...

    def load(self) -> None:
        """Import the included modules. Raises Misconfigured."""
        ...

    def queue(self, name: str) -> "QueueKeys":
        """Return the keys of one of its queues."""
        ...

    def check_message_size(self, message: bytes, what: str) -> bytes:
        """Return the message. Raises MessageTooLarge."""
        ...

    async def aperform(self, call: "Call[T]") -> T:
        """Perform one call on the broker, in any colour."""
        ...

    async def adispatch(self, jobs: "Sequence[Job]") -> Mapping[str, str]:
        """Send jobs, in any colour; return the holder of its key for each job that was not sent, by ids."""
        ...
