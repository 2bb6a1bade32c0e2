"""Hosts: the platform of a cluster on several machines: it gives each member to the one that it belongs on (C91).

Floor: services. Reads: nothing. Writes: nothing; the platforms of the machines do.
"""

from collections.abc import Callable, Mapping

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.members import Member, MemberEvent, State
from celery5.services import succession


class MultiHostPlatform:
    """A Platform made of several: `here`, and one for each host, by its name."""

    def __init__(self, *, local: Platform, remote: Mapping[str, Platform]) -> None:
        self._here = local
        self._there = dict(remote)
        self._all = (local, *remote.values())
        self._of: dict[str, Platform] = {}

    async def live(
        self,
        heard: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """All of them, together."""
        async with trio.open_nursery() as nursery:
            for each in self._all:
                await nursery.start(each.live, heard)
            task_status.started()

    async def start(self, member: Member) -> None:
        """On its host, or here when it has none."""
        platform = self._there.get(member.host) if member.host else self._here
        if platform is None:
            known = ", ".join(sorted(self._there)) or "none"
            raise PlatformError(
                f"no host {member.host!r} here: known are {known}; a new one needs a new Controller"
            )
        self._of[member.name] = platform
        await platform.start(member)

    async def stop(self, name: str) -> None:
        """Where it was started."""
        await self._where(name).stop(name)

    async def kill(self, name: str) -> None:
        """Where it was started."""
        await self._where(name).kill(name)

    async def reload(self, name: str) -> None:
        """Where it was started."""
        await self._where(name).reload(name)

    def pid_of(self, name: str) -> int | None:
        """The process id of a member, on the host that it runs on."""
        return succession.pid_of(self._where(name), name)

    def outlives(self, name: str) -> bool:
        """Whether it goes on when this process has died."""
        return succession.outlives(self._where(name), name)

    def fence(self, may: Callable[[], bool]) -> None:
        """Each of those that do later what they are asked for asks first whether it still `may`."""
        for each in self._all:
            succession.set_fence(each, may)

    def leave(self) -> None:
        """What outlives this process is another Controller's from now on."""
        for each in self._all:
            succession.release_members(each)

    async def living(self) -> Mapping[str, State]:
        """What runs anywhere. All are asked at once: one that is away is waited for, not one after the other."""
        found: dict[str, State] = {}

        async def ask(platform: Platform) -> None:
            for name, state in (await platform.living()).items():
                found[name] = state
                self._of[name] = platform

        async with trio.open_nursery() as nursery:
            for each in self._all:
                nursery.start_soon(ask, each)
        return found

    def _where(self, name: str) -> Platform:
        return self._of.get(name, self._here)
