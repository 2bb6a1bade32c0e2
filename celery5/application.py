"""What the parts of the API need to know of an application. `celery5.app.App` is one; no part imports it.

The Protocols are read-only and name nothing that is above the part that uses them. A part that needs more, such as
`send_many` for tasks, declares a Protocol of its own that extends this one.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from celery5.results.sinks import SinkedTask

if TYPE_CHECKING:
    from celery5.broker.call import Call
    from celery5.broker.keys import Keys, QueueKeys
    from celery5.config.settings import Settings
    from celery5.connections.broker_connections import Connections
    from celery5.connections.brokers import Brokers
    from celery5.protocol.job.job import Job, Options
    from celery5.protocol.job.retry_policy import RetryPolicy

T = TypeVar("T")


class DeclaredTask(SinkedTask, Protocol):
    """A task, as parts know it that only look it up."""

    send_options: "Options"

    @property
    def queue(self) -> str:
        """The queue that its jobs go to."""
        ...

    @property
    def policy(self) -> "RetryPolicy":
        """How its failed jobs are tried again."""
        ...


class Application(Protocol):
    """An application: its name, its settings, and the way to its brokers."""

    @property
    def name(self) -> str:
        """The name, which scopes every key in Redis."""
        ...

    @property
    def module(self) -> str:
        """The module that made it."""
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
        """Which brokers it has, and what is on which."""
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

    def perform(self, call: "Call[T]") -> T:
        """Make one trip to the broker, in plain Python."""
        ...

    async def aperform(self, call: "Call[T]") -> T:
        """`perform`, from Trio or asyncio."""
        ...

    def dispatch(self, jobs: "Sequence[Job]") -> Mapping[str, str]:
        """Send jobs now or by the backlog. Return which job has the key of each that was not sent, by their ids."""
        ...

    async def adispatch(self, jobs: "Sequence[Job]") -> Mapping[str, str]:
        """`dispatch`, from Trio or asyncio."""
        ...
