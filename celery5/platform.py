"""Platform: what starts and ends the processes of a cluster, and tells what becomes of them.

The Foreman decides and a platform does. celery5 has some: sub-processes of the Controller, systemd, other hosts. Write
your own for whatever else runs processes, and name it in the cluster description: `platform = "module:Class"`. The
class is called with `cluster`, the `Cluster` of the description, and `app`, the name of the application.

A platform may have a method `outlives(name)`: whether this member goes on without the Controller that has started it,
and is found by `living()` of the next one. A Controller that leads no more then leaves it alone.

It may have a method `pid_of(name)`, which gives the id of a member's process on its host, None when it is not known:
`celery5 controller status` shows it.

It may have a method `fence(may)`, too, which is called once: what it does later than it was asked, it does when
`may()` says so, since another Controller may lead by then; and `leave()`: that one looks after its members from now on,
and what has not been done is to be forgotten.

A platform is asked for one thing at a time for each member, and never to start one that has not `Ended`. Anything that
it raises but PlatformError ends the Controller.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Platform(Protocol):
    """Starts and ends members. None of its methods may take long, but for `live`."""

    async def live(
        self,
        heard: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Live until cancelled, and tell what happens through `heard`, in order: a member is `Ready`, it lives (`Beat`,
        several times in `hung_after` seconds), it is `Stopping`, it has `Ended`, or how it is is `Unknown`. `started()`
        when members can be started. Processes need not outlive it: what still runs when it is cancelled is to end."""
        ...

    async def start(self, member: Member) -> None:
        """Begin to start it, and return. Raises PlatformError when that cannot be; then it is tried again later."""
        ...

    async def stop(self, name: str) -> None:
        """Ask it to end in order: SIGTERM, or what is like it. Nothing for one that does not run."""
        ...

    async def kill(self, name: str) -> None:
        """End it at once: SIGKILL, or what is like it. Nothing for one that does not run."""
        ...

    async def reload(self, name: str) -> None:
        """Have it read its configuration again: SIGHUP, or what is like it. Nothing for one that does not run."""
        ...

    async def living(self) -> Mapping[str, State]:
        """What runs already in this cluster's name, by member, when a Controller begins: it is adopted, and spoken of
        through `heard` like all others. Members of which nobody knows how they are count as `starting`."""
        ...
