"""Hosts: the platform of a cluster on several machines: it gives each member to the one that it belongs on (C91)."""

from collections.abc import Callable, Mapping

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.members import Member, MemberEvent, State


def outlives(platform: Platform, name: str) -> bool:
    """Whether this member goes on without the Controller that has started it."""
    tells: Callable[[str], bool] | None = getattr(platform, "outlives", None)
    return tells is not None and tells(name)


def pid_of(platform: Platform, name: str) -> int | None:
    """Return the process id of a member, on the host that it runs on; None when it is not known."""
    tells: Callable[[str], int | None] | None = getattr(platform, "pid_of", None)
    return None if tells is None else tells(name)


def set_fence(platform: Platform, may_act: Callable[[], bool]) -> None:
    """What it does later than it was asked, it does only when this Controller still `may`."""
    fences: Callable[[Callable[[], bool]], None] | None = getattr(platform, "fence", None)
    if fences is not None:
        fences(may_act)


def release_members(platform: Platform) -> None:
    """Another Controller looks after its members from now on."""
    leaves: Callable[[], None] | None = getattr(platform, "leave", None)
    if leaves is not None:
        leaves()


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
        return pid_of(self._where(name), name)

    def outlives(self, name: str) -> bool:
        """Whether it goes on when this process has died."""
        return outlives(self._where(name), name)

    def fence(self, may: Callable[[], bool]) -> None:
        """Each of those that do later what they are asked for asks first whether it still `may`."""
        for each in self._all:
            set_fence(each, may)

    def leave(self) -> None:
        """What outlives this process is another Controller's from now on."""
        for each in self._all:
            release_members(each)

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
