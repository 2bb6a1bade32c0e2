"""Let something else run the processes of a cluster, or its message broker: subclass `Platform` or `MessageBroker`.

The Foreman decides and a platform acts. celery5 has platforms for sub-processes of the Controller, for systemd and for
other hosts. For anything else that runs processes write a subclass of `Platform`, and name it in the cluster
description: `platform = "module:Class"`. The class is called with `cluster`, the `Cluster` of the description, and
`app`, the name of the application.

The Foreman calls one method at a time for each member, and never starts a member that has not `Ended`. Any exception
but PlatformError ends the Controller.

A Controller may also run the broker. `[broker] server = "module:Class"` names a subclass of `MessageBroker`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import trio

from celery5.errors import BrokerUnavailable, PlatformError
from celery5.protocol.cluster.description import Cluster, Group, Host
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Kind,
    Member,
    MemberEvent,
    Ready,
    State,
    Stopping,
    Unknown,
)
from celery5.protocol.cluster.own_broker import OwnBroker

__all__ = [
    "Beat",
    "BrokerUnavailable",
    "Cluster",
    "Ended",
    "Group",
    "Host",
    "Kind",
    "Member",
    "MemberEvent",
    "MessageBroker",
    "OwnBroker",
    "Platform",
    "PlatformError",
    "Ready",
    "State",
    "Stopping",
    "Unknown",
]


class Platform(ABC):
    """Starts and ends members. A subclass defines the six abstract methods; the other five have defaults.

    No method may take long, except `live`.
    """

    @abstractmethod
    async def live(
        self,
        report: Callable[[MemberEvent], None],
        /,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled, and call `report` with each event, in order.

        A member is `Ready`, it works (`Beat`, several times in `hung_after` seconds), it is `Stopping`, it has `Ended`,
        or its state is `Unknown`. Call `task_status.started()` when members can be started. Members need not survive
        this method: those that still run when it is cancelled are meant to end.
        """

    @abstractmethod
    async def start(self, member: Member) -> None:
        """Begin to start a member, and return. Raises PlatformError if that fails: it is tried again later."""

    @abstractmethod
    async def stop(self, name: str) -> None:
        """Ask a member to end in order, by SIGTERM or its equivalent. Do nothing if it does not run."""

    @abstractmethod
    async def kill(self, name: str) -> None:
        """End a member at once, by SIGKILL or its equivalent. Do nothing if it does not run."""

    @abstractmethod
    async def reload(self, name: str) -> None:
        """Make a member read its configuration again, by SIGHUP or its equivalent. Do nothing if it does not run."""

    @abstractmethod
    async def living(self) -> Mapping[str, State]:
        """Return the members of this cluster that run already, with their states, when a Controller begins to lead.

        The Controller adopts them, and `live` reports their events like those of all others. A member whose state
        cannot be found out counts as `starting`.
        """

    def outlives(self, _name: str) -> bool:
        """Return whether a member survives the Controller that started it, so that `living` of the next one finds it.

        A Controller that leads no more does not stop such members. Default: none survives.
        """
        return False

    def stays(self, _name: str) -> bool:
        """Return whether a member goes on when its Controller is asked to end. Default: it is stopped, too."""
        return False

    def pid_of(self, _name: str) -> int | None:
        """Return the process id of a member on its host, for `controller status`; None (default) if not known."""
        return None

    def fence(self, may_act: Callable[[], bool]) -> None:  # noqa: B027
        """Call `may_act` before each postponed action, and drop the action if it returns False.

        Called once, before `live`: another Controller may lead when the action is due. Default: nothing is postponed.
        """

    def leave(self) -> None:  # noqa: B027
        """Forget postponed actions: another Controller now keeps the members. Default: nothing is postponed."""


class MessageBroker(ABC):
    """A message broker that a Controller starts before the first member, watches, and ends after the last one.

    The class is called with `settings`, the table `[broker]` of the cluster description, and `app`, the name of the
    application. Its methods may block: they are called in a thread, one at a time. If a method raises anything but
    BrokerUnavailable or OSError, the Controller ends.
    """

    pid: int = 0
    """Its process id, for the log; 0 when it has none here."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL of the broker, which members get as CELERY5_BROKER. It is known before the start."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Return whether it runs, as far as that is known without waiting: asked ten times a second."""

    @abstractmethod
    def start(self, is_cancelled: Callable[[], bool], /) -> object:
        """Start it with its data, unless it runs, and return when it accepts connections.

        Return early when `is_cancelled()`: call it several times a second. Called again after the broker has died.

        Raises:
            BrokerUnavailable: It does not start. At the start of the Controller this ends it; later it is tried again.
        """

    @abstractmethod
    def is_responding(self) -> bool:
        """Return whether it answers, even if only that it still loads its data: asked every five seconds."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once: it has not answered for `hung_after` seconds. It is started again."""

    @abstractmethod
    def stop(self) -> None:
        """End it in order, so that it keeps its data. The last call; the broker may not be running any more."""
