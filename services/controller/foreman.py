"""Foreman: keeps the members of a cluster alive over a platform (C89).

What is decided is in `celery5.protocol.foreman`; this performs it. What is done to one member happens in order, what is
done to several at the same time: a host that does not answer holds up nobody else. At the end the members are ended in
order: schedulers, routers, workers, publishers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import trio
from msgspec.structs import replace

from celery5.errors import PlatformError
from celery5.logs.log import Log
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster, build_members, distribute_workers
from celery5.protocol.cluster.foreman import STOP_ORDER, ClusterState
from celery5.protocol.cluster.members import (
    Action,
    Ended,
    Kill,
    Kind,
    Member,
    MemberEvent,
    Phase,
    Start,
    Stop,
)
from celery5.protocol.health.metrics import MetricFamily, make_gauge
from celery5.services.controller import platforms

DECISION_PERIOD = 1.0
"""Seconds between two decisions when nothing happens."""
RESIGN_LIMIT = 2.0
"""Seconds that giving up the lead may take."""
END_MARGIN = 20.0
"""Seconds beyond what all members may take to end after which the Foreman ends without them."""


class LeadershipStatus(Protocol):
    """Says whether this Controller is the one that acts."""

    @property
    def is_leader(self) -> bool:
        """Whether it is, as far as it knows."""
        ...

    @property
    def has_valid_lease(self) -> bool:
        """Whether it is, for certain, at this moment."""
        ...

    @property
    def status_line(self) -> str:
        """Why it does not act, for people; '' when it does."""
        ...

    def get_epoch_environment(self) -> Mapping[str, str]:
        """What each member gets in its environment, to know whose it is."""
        ...

    def add_listener(self, callback: Callable[[], object], /) -> None:
        """Have `tell` called when it begins to be the one, or is it no more."""
        ...

    async def resign(self) -> None:
        """Let another one act."""
        ...


class BrokerConnectivity(Protocol):
    """Knows whether Redis can be reached."""

    @property
    def connected(self) -> bool: ...


class Foreman:
    """Keeps the members that the `cluster` description asks for.

    `surroundings` are what all of them get in their environment, `grace` is their grace period in seconds. While
    `redis` is away members cannot start, and it is not counted against them. `tell` is told the state of the whole,
    in one line, whenever that changes.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        cluster_state: ClusterState,
        platform: Platform,
        leader: LeadershipStatus,
        redis: BrokerConnectivity,
        member_environment: Mapping[str, str],
        grace: float,
        log: Log,
        on_status: Callable[[str], object],
    ) -> None:
        self.cluster = cluster
        self.cluster_state = cluster_state
        self._platform = platform
        self._leads = leader
        self._redis = redis
        self._surroundings = member_environment
        self._grace = grace
        self._log = log
        self._tell = on_status
        self._acts = False
        self._stamp: Mapping[str, str] = {}
        self._scale: dict[str, int] = {}
        self._locks: dict[str, trio.Lock] = {}
        self._changed = trio.Event()
        self._told = ""
        self._unheard = ""
        self.all_ready = trio.Event()
        """Set when all members have been up."""
        self._lives = False
        self._hands: trio.Nursery | None = None
        leader.add_listener(lambda: self._changed.set())  # looked up then: each turn has another event
        platforms.set_fence(platform, lambda: leader.has_valid_lease)
        self.apply_description(cluster)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep them alive until cancelled, then end them in order."""
        self._acts = False
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._work, scope)
                await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
                scope.shield = True  # it is needed to end the members in order
                await self._stand()
                task_status.started()
                while True:
                    await self._turn()
            finally:
                with trio.CancelScope(shield=True):
                    await self._end()
                scope.cancel()

    def apply_description(self, cluster: Cluster) -> None:
        """From now on these are the members that there should be: a new description, or another scale of the same."""
        self.cluster = cluster
        known = {group.key for group in cluster.groups}
        self._scale = {key: count for key, count in self._scale.items() if key in known}
        wanted = self._members(self._scale)
        more = {group.key: self._scale.get(group.key, group.total) + 1 for group in cluster.groups}
        names = {each.name for each in wanted}
        spares = [each for each in self._members(more) if each.name not in names]
        self.cluster_state.set_desired(cluster, wanted, spares)
        self._changed.set()

    def set_worker_count(self, workers: int) -> dict[str, int]:
        """Have so many workers in all. Gives how many there are to be of each group."""
        self._scale = distribute_workers(self.cluster, workers)
        self.apply_description(self.cluster)
        return self._scale

    def restart(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Have these members restarted, or all: one of a group at a time. Gives who will be."""
        chosen = self.cluster_state.restart(names)
        self._changed.set()
        return chosen

    async def reload_members(self, names: Iterable[str]) -> None:
        """Have these members read their configuration again, if they are up."""
        for name in names:
            post = self.cluster_state.members.get(name)
            if post is not None and post.phase is Phase.UP:
                async with self._locks.setdefault(name, trio.Lock()):
                    try:
                        await self._platform.reload(name)
                    except PlatformError as error:
                        self._log.event("member:action-failed", "warning", name=name, why=str(error))

    def pid_of(self, name: str) -> int | None:
        """The process id of a member, on the host that it runs on; None when it does not run or the platform does not
        know it."""
        return platforms.pid_of(self._platform, name)

    @property
    def is_complete(self) -> bool:
        """Whether all members are up, or are another Controller's affair."""
        return (
            self.cluster_state.is_complete
            if self._acts
            else self.cluster_state.is_stopped and not self._leads.is_leader
        )

    @property
    def status_line(self) -> str:
        """How it is, in one line."""
        stands = self._leads.status_line
        if not stands or self.cluster_state.is_stopped:
            return stands or self.cluster_state.status_line
        return f"{stands}; {self.cluster_state.status_line}"

    def conditions(self) -> Mapping[str, str]:
        """Nobody has died, or was given up, and is not back."""
        return {"cluster": self.cluster_state.problem if self._acts else ""}

    def metric_families(self) -> Iterable[MetricFamily]:
        """How many members there are, and how often they were restarted."""
        posts = self.cluster_state.members.values()
        yield make_gauge(
            "celery5_members",
            "Members of the cluster, by how they are.",
            *[(float(sum(post.phase is each for post in posts)), {"phase": each.value}) for each in Phase],
        )
        yield make_gauge(
            "celery5_members_desired", "Members that there should be.", sum(post.is_wanted for post in posts)
        )

    def _members(self, scale: Mapping[str, int]) -> tuple[Member, ...]:
        return build_members(self.cluster, scale, environment=self._surroundings, grace=self._grace)

    async def _work(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """The platform, and all that is done to members."""
        with scope:
            try:
                async with trio.open_nursery() as self._hands:
                    await self._hands.start(self._platform.live, self._heard)
                    self._lives = True
                    task_status.started()
            finally:
                self._lives = False

    async def _turn(self) -> None:
        """Decide once, and wait until there may be something else to decide."""
        self._changed = trio.Event()
        try:
            await self._stand()
        except PlatformError as error:  # it is tried again at each turn, and told of once
            if self._unheard != str(error):
                self._log.event("cluster:adopt-failed", "warning", why=str(error))
            self._unheard = str(error)
        else:
            self._unheard = ""
        now = trio.current_time()
        decides = self._leads.has_valid_lease if self._acts else not self._leads.is_leader
        for action in self.cluster_state.decide(now) if decides else ():
            if self._hands is not None:
                self._hands.start_soon(self._do, action)
        self._show()
        with trio.move_on_after(
            max(0.0, min(DECISION_PERIOD, self.cluster_state.next_start_at - now))
            if decides
            else DECISION_PERIOD
        ):
            await self._changed.wait()

    async def _stand(self) -> None:
        """Take up the cluster when this Controller is the one that acts, and leave it when it is that no more: what
        belongs to this process is ended, what does not is the next one's. Raises PlatformError."""
        stamp = self._leads.get_epoch_environment()
        if self._acts and self._leads.is_leader and stamp != self._stamp:  # another one led between two looks
            self._leave()
            self._acts = False
        if self._leads.has_valid_lease and not self._acts:
            self.cluster_state.adopt(await self._platform.living(), trio.current_time())
            self._acts, self._stamp = True, stamp
            self.cluster_state.resume()
        elif not self._leads.is_leader:
            if self._acts:
                self._leave()
            self._acts = False
            self.cluster_state.drain()

    def _leave(self) -> None:
        self.cluster_state.release([name for name in self.cluster_state.members if self._outlives(name)])
        platforms.release_members(self._platform)

    def _outlives(self, name: str) -> bool:
        """Whether a member goes on without this process, so that another Controller may have adopted it."""
        return platforms.outlives(self._platform, name)

    async def _do(self, action: Action) -> None:
        name = action.member.name if isinstance(action, Start) else action.name
        async with self._locks.setdefault(name, trio.Lock()):
            try:
                if not self._leads.has_valid_lease and (isinstance(action, Start) or self._outlives(name)):
                    raise PlatformError(_NOT_OURS)
                await self._perform(action)
            except PlatformError as error:
                self._log.event("member:action-failed", "warning", name=name, why=str(error))
                if isinstance(action, Start):
                    self.cluster_state.mark_start_failed(
                        name, str(error), trio.current_time(), is_excused=self._excused
                    )
                    self._changed.set()
                elif isinstance(action, Stop):
                    self.cluster_state.mark_stop_failed(name, trio.current_time())

    async def _perform(self, action: Action) -> None:
        match action:
            case Start(member):
                self._log.event("member:starting", name=member.name, host=member.host)
                told = {**member.environment, **self._leads.get_epoch_environment()}
                await self._platform.start(replace(member, environment=told))
            case Stop(name):
                self._log.event("member:stop-requested", name=name)
                await self._platform.stop(name)
            case Kill(name, why):
                self._log.event("member:killed", "error", name=name, why=why)
                await self._platform.kill(name)

    def _heard(self, word: MemberEvent) -> None:
        post = self.cluster_state.members.get(word.name)
        before = None if post is None else post.phase
        self.cluster_state.handle_event(word, trio.current_time(), is_excused=self._excused)
        if post is not None and post.phase is not before:
            self._log_change(word, post.phase, asked=before is Phase.STOPPING)
        self._changed.set()

    def _log_change(self, word: MemberEvent, phase: Phase, *, asked: bool) -> None:
        if phase is Phase.GIVEN_UP:
            how = self.cluster_state.members[word.name].end_reason
            kept = [each.member.name for each in self.cluster_state.retained if word.name in each.waits_for]
            told = {"kept": kept} if kept else {}
            self._log.event("member:abandoned", "error", name=word.name, why=how, hint=_GIVEN_UP, **told)
        elif isinstance(word, Ended):
            self._log.event(
                "member:ended", "info" if asked else "warning", name=word.name, how=word.how, code=word.code
            )
        elif phase is Phase.UP:
            self._log.event("member:up", name=word.name)

    @property
    def _excused(self) -> bool:
        return not self._redis.connected

    def _show(self) -> None:
        line = self.status_line
        if self.is_complete:
            self.all_ready.set()
        if line != self._told:
            self._told = line
            self._tell(line)

    async def _end(self) -> None:
        """End all members, in order, as long as there is somebody who can. Another Controller may begin at once, unless
        it would adopt what is ended here."""
        self.cluster_state.drain()
        if not self._leads.has_valid_lease:
            self._leave()
        if not any(map(self._outlives, self.cluster_state.members)):
            with trio.move_on_after(RESIGN_LIMIT):
                await self._leads.resign()
        with trio.move_on_after(self.end_limit):
            while self._lives and not self.cluster_state.is_stopped:
                await self._turn_down()

    async def _turn_down(self) -> None:
        self._changed = trio.Event()
        for action in self.cluster_state.decide(trio.current_time()):
            if self._hands is not None:
                self._hands.start_soon(self._do, action)
        self._show()
        if not self.cluster_state.is_stopped:
            with trio.move_on_after(DECISION_PERIOD):
                await self._changed.wait()

    @property
    def end_limit(self) -> float:
        """Seconds that the end of all members may take."""
        return get_end_limit(post.member for post in self.cluster_state.members.values())


def get_end_limit(members: Iterable[Member]) -> float:
    """Seconds that the end of all these members, in order, may take."""
    longest: dict[Kind, float] = dict.fromkeys(STOP_ORDER, 0.0)
    for each in members:
        longest[each.kind] = max(longest[each.kind], each.stop_after)
    return sum(longest.values()) + END_MARGIN


_NOT_OURS = "this Controller is not sure that it leads"
_GIVEN_UP = "mend what ends it, then: celery5 controller restart, or reload"
