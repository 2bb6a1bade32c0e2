"""Multi-host platform: run the members of one cluster on several hosts."""

from collections.abc import Callable, Mapping

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.members import Member, MemberEvent, State


class MultiHostPlatform(Platform):
    """A platform made of several: the `local` one, and one for each remote host, by its name."""

    def __init__(self, *, local: Platform, remote: Mapping[str, Platform]) -> None:
        self._local = local
        self._remote = dict(remote)
        self._platforms = (local, *remote.values())
        self._by_member: dict[str, Platform] = {}

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run all platforms together."""
        async with trio.open_nursery() as nursery:
            for platform in self._platforms:
                await nursery.start(platform.live, report)
            task_status.started()

    async def start(self, member: Member) -> None:
        """Start the member on its host, or on the local one when it names none."""
        platform = self._remote.get(member.host) if member.host else self._local
        if platform is None:
            hosts = ", ".join(sorted(self._remote)) or "none"
            raise PlatformError(
                f"no host {member.host!r} here: known are {hosts}; a new one needs a new Controller"
            )
        self._by_member[member.name] = platform
        await platform.start(member)

    async def stop(self, name: str) -> None:
        """Stop the member where it was started."""
        await self._get_platform(name).stop(name)

    async def kill(self, name: str) -> None:
        """Kill the member where it was started."""
        await self._get_platform(name).kill(name)

    async def reload(self, name: str) -> None:
        """Reload the member where it was started."""
        await self._get_platform(name).reload(name)

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member on its host."""
        return self._get_platform(name).pid_of(name)

    def outlives(self, name: str) -> bool:
        """Return whether this member survives this process."""
        return self._get_platform(name).outlives(name)

    def stays(self, name: str) -> bool:
        """Return whether this member goes on when its Controller is asked to end."""
        return self._get_platform(name).stays(name)

    def fence(self, may_act: Callable[[], bool]) -> None:
        """Make each platform ask `may_act` before it performs postponed actions."""
        for platform in self._platforms:
            platform.fence(may_act)

    def leave(self) -> None:
        """Leave the members that survive this process to another Controller."""
        for platform in self._platforms:
            platform.leave()

    async def living(self) -> Mapping[str, State]:
        """Return what runs on all hosts. All are queried at once, so unreachable hosts are waited for together."""
        states: dict[str, State] = {}

        async def find_members(platform: Platform) -> None:
            for name, state in (await platform.living()).items():
                states[name] = state
                self._by_member[name] = platform

        async with trio.open_nursery() as nursery:
            for platform in self._platforms:
                nursery.start_soon(find_members, platform)
        return states

    def _get_platform(self, name: str) -> Platform:
        return self._by_member.get(name, self._local)
