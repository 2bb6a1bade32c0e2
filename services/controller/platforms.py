"""Platforms: run the members of one cluster on several hosts."""

from collections.abc import Callable, Mapping

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.members import Member, MemberEvent, State


def outlives(platform: Platform, name: str) -> bool:
    """Return whether this member survives the Controller that started it."""
    tells: Callable[[str], bool] | None = getattr(platform, "outlives", None)
    return tells is not None and tells(name)


def pid_of(platform: Platform, name: str) -> int | None:
    """Return the process id of a member on its host; None when it is not known."""
    tells: Callable[[str], int | None] | None = getattr(platform, "pid_of", None)
    return None if tells is None else tells(name)


def set_fence(platform: Platform, may_act: Callable[[], bool]) -> None:
    """Make the platform ask `may_act` before it performs postponed actions."""
    fences: Callable[[Callable[[], bool]], None] | None = getattr(platform, "fence", None)
    if fences is not None:
        fences(may_act)


def release_members(platform: Platform) -> None:
    """Leave the members of this platform to another Controller."""
    leaves: Callable[[], None] | None = getattr(platform, "leave", None)
    if leaves is not None:
        leaves()


class MultiHostPlatform:
    """A platform made of several: the `local` one, and one for each remote host, by its name."""

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
        """Run all platforms together."""
        async with trio.open_nursery() as nursery:
            for each in self._all:
                await nursery.start(each.live, heard)
            task_status.started()

    async def start(self, member: Member) -> None:
        """Start the member on its host, or on this one when it names none."""
        platform = self._there.get(member.host) if member.host else self._here
        if platform is None:
            known = ", ".join(sorted(self._there)) or "none"
            raise PlatformError(
                f"no host {member.host!r} here: known are {known}; a new one needs a new Controller"
            )
        self._of[member.name] = platform
        await platform.start(member)

    async def stop(self, name: str) -> None:
        """Stop the member where it was started."""
        await self._where(name).stop(name)

    async def kill(self, name: str) -> None:
        """Kill the member where it was started."""
        await self._where(name).kill(name)

    async def reload(self, name: str) -> None:
        """Reload the member where it was started."""
        await self._where(name).reload(name)

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member on its host."""
        return pid_of(self._where(name), name)

    def outlives(self, name: str) -> bool:
        """Return whether this member survives this process."""
        return outlives(self._where(name), name)

    def fence(self, may: Callable[[], bool]) -> None:
        """Make each platform ask `may` before it performs postponed actions."""
        for each in self._all:
            set_fence(each, may)

    def leave(self) -> None:
        """Leave the members that survive this process to another Controller."""
        for each in self._all:
            release_members(each)

    async def living(self) -> Mapping[str, State]:
        """Return what runs on all hosts. All are asked at once, so unreachable hosts are waited for together."""
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
