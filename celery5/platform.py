"""Platform: the class that starts and ends the processes of a cluster, and reports their state.

The Foreman decides and a platform acts. celery5 has platforms for sub-processes of the Controller, for systemd and for
other hosts. For anything else that runs processes write a subclass of `Platform`, and name it in the cluster
description: `platform = "module:Class"`. The class is called with `cluster`, the `Cluster` of the description, and
`app`, the name of the application.

The Foreman calls one method at a time for each member, and never starts a member that has not `Ended`. Any exception
but PlatformError ends the Controller.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import trio

from celery5.errors import PlatformError
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

__all__ = [
    "Beat",
    "Cluster",
    "Ended",
    "Group",
    "Host",
    "Kind",
    "Member",
    "MemberEvent",
    "Platform",
    "PlatformError",
    "Ready",
    "State",
    "Stopping",
    "Unknown",
]


class Platform(ABC):
    """Starts and ends members. A subclass defines the six abstract methods; the other four have defaults.

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

    def pid_of(self, _name: str) -> int | None:
        """Return the process id of a member on its host, for `controller status`; None (default) if not known."""
        return None

    def fence(self, may_act: Callable[[], bool]) -> None:  # noqa: B027
        """Call `may_act` before each postponed action, and drop the action if it returns False.

        Called once, before `live`: another Controller may lead when the action is due. Default: nothing is postponed.
        """

    def leave(self) -> None:  # noqa: B027
        """Forget postponed actions: another Controller now keeps the members. Default: nothing is postponed."""
