"""Foreman: keep the members of a cluster running on a platform.

`celery5.protocol.cluster.foreman` decides; this performs. Actions on one member happen in order, actions on several at
the same time, so a host that does not answer holds up no other. At the end the members stop in order: schedulers,
routers, workers, publishers.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import trio
from msgspec.structs import replace

from celery5.errors import PlatformError
from celery5.logs.log import Level, Log
from celery5.platform import Platform
from celery5.protocol.cluster.canary import CanaryWatch
from celery5.protocol.cluster.description import (
    Cluster,
    build_canaries,
    build_members,
    build_spares,
    distribute_workers,
)
from celery5.protocol.cluster.foreman import STOP_ORDER, ClusterState
from celery5.protocol.cluster.members import (
    RECYCLING,
    Action,
    Ended,
    Kill,
    Kind,
    Member,
    MemberEnd,
    MemberEvent,
    MemberState,
    Permit,
    Phase,
    Start,
    Stop,
)
from celery5.protocol.cluster.members_report import make_report
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.protocol.process.missing import MembersReport, format_retry
from celery5.protocol.process.recycling import IS_SPARE, RESTART_EXIT_CODE, SUPERVISED_VARIABLE

DECISION_PERIOD = 1.0
"""Seconds between two decisions when nothing happens."""
RESIGN_LIMIT = 2.0
"""Seconds that giving up the lead may take."""
MAX_ENDS = 100
"""Ends of members that wait to be noted."""
MAX_PERMITS = 100
"""Permits to be recycled that wait to be written; each is repeated from time to time."""
END_MARGIN = 20.0
"""Seconds beyond what all members may take to end after which the Foreman ends without them."""


class LeadershipStatus(Protocol):
    """The part of the leadership that the Foreman needs."""

    @property
    def is_leader(self) -> bool:
        """Return whether this Controller leads, as far as it knows."""
        ...

    @property
    def has_valid_lease(self) -> bool:
        """Return whether this Controller holds a valid lease at this moment."""
        ...

    @property
    def status_line(self) -> str:
        """Return why this Controller does not lead, for people; '' when it does."""
        ...

    def get_epoch_environment(self) -> Mapping[str, str]:
        """Return the variables by which a member knows in which epoch it was started."""
        ...

    async def wait_changed(self) -> None:
        """Wait until this Controller begins or ceases to lead."""
        ...

    async def resign(self) -> None:
        """Let another Controller lead."""
        ...


class BrokerConnectivity(Protocol):
    """Whether Redis can be reached."""

    @property
    def connected(self) -> bool: ...


class CanaryTrial(NamedTuple):
    """A change that is tried with canaries."""

    watch: CanaryWatch
    # The new description; None: all members are restarted.
    cluster: Cluster | None


class Foreman:
    """Keeps the members that the `cluster` description asks for.

    Args:
        member_defaults: what all members get.
        capacity: the setting of that name: Workers with a capacity end before their successors start.
        redis: while it is unreachable members cannot start, and their deaths do not count.
        on_status: called with the state of the cluster, in one line, whenever that changes.
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
        grace_period: float,
        capacity: str | Mapping[str, Any],
        log: Log,
        on_status: Callable[[str], object],
    ) -> None:
        self.cluster = cluster
        self.cluster_state = cluster_state
        self._platform = platform
        self._leads = leader
        self._redis = redis
        self._member_environment = member_environment
        self._grace_period = grace_period
        self._has_capacity = bool(capacity)
        self._log = log
        self._on_status = on_status
        self._send_end, self.member_ends = trio.open_memory_channel[MemberEnd](MAX_ENDS)
        self._send_permit, self.permits = trio.open_memory_channel[Permit](MAX_PERMITS)
        # How the last start of each member failed, until it is up again.
        self._failed_starts: dict[str, str] = {}
        # The last end of each member that was out of order, until it is up again.
        self._ends: dict[str, MemberEnd] = {}
        self._is_acting = False
        self._stamp: Mapping[str, str] = {}
        self._scale: dict[str, int] = {}
        self._trial: CanaryTrial | None = None
        self.rollback_reason = ""
        """Why the last change was taken back; "" if it was not."""
        self._locks: dict[str, trio.Lock] = {}
        self._changed = trio.Event()
        self._last_status = ""
        self._last_adopt_error = ""
        self.all_ready = trio.Event()
        """Set when all members have been up."""
        self._is_running = False
        self._actions: trio.Nursery | None = None
        self.apply_description(cluster)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the members running until cancelled, then stop them in order."""
        self._is_acting = False
        scope = trio.CancelScope()
        self._platform.fence(lambda: self._leads.has_valid_lease)
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._work, scope)
                nursery.start_soon(self._watch_leadership)
                await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
                scope.shield = True  # keep the platform running while the members stop in order
                await self._follow_leadership()
                task_status.started()
                while True:
                    await self._decide_once()
            finally:
                with trio.CancelScope(shield=True):
                    await self._end()
                scope.cancel()

    def apply_description(self, cluster: Cluster) -> None:
        """Apply a new description of the cluster, or another scale of the same."""
        self.cluster = cluster
        known = {group.key for group in cluster.groups}
        self._scale = {key: count for key, count in self._scale.items() if key in known}
        spares = build_spares(
            cluster,
            self._scale,
            environment=self._member_environment,
            grace=self._grace_period,
            has_capacity=self._has_capacity,
        )
        self.cluster_state.set_desired(cluster, self._members(self._scale), spares)
        self._changed.set()

    def start_canaries(self, cluster: Cluster | None = None) -> tuple[str, ...]:
        """Try a change with one worker of each group of Workers that it restarts; return their names.

        The Foreman applies the change when all of them pass. If there is nothing to try, it returns no names, and the
        caller applies the change. A former trial ends, and its change is dropped.

        Args:
            cluster: The new description; None: all members are restarted.
        """
        now = trio.current_time()
        self._trial, self.rollback_reason = None, ""
        self.cluster_state.end_canaries(passed=False)
        description = cluster or self.cluster
        if not (description.canary and self._is_acting):
            return ()
        members = None if cluster is None else self._members(self._scale, cluster)
        canaries = build_canaries(
            description,
            self.cluster_state.find_restarting_groups(members),
            self._scale,
            environment=self._member_environment,
            grace=self._grace_period,
        )
        names = tuple(canary.name for canary in canaries)
        if canaries:
            self._trial = CanaryTrial(CanaryWatch(canaries, description, now), cluster)
            self.cluster_state.start_canaries(canaries)
            self._log.event("canary:started", names=names, seconds=description.canary)
            self._changed.set()
        return names

    def set_worker_count(self, workers: int) -> dict[str, int]:
        """Set the number of workers in all; return the number for each group."""
        self._scale = distribute_workers(self.cluster, workers)
        self.apply_description(self.cluster)
        return self._scale

    def restart(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Restart these members, or all, one of a group at a time; return their names."""
        chosen = self.cluster_state.restart(names)
        self._changed.set()
        return chosen

    async def reload_members(self, names: Iterable[str]) -> None:
        """Reload the configuration of these members, if they are up."""
        for name in names:
            state = self.cluster_state.members.get(name)
            if state is not None and state.phase is Phase.UP:
                async with self._locks.setdefault(name, trio.Lock()):
                    try:
                        await self._platform.reload(name)
                    except PlatformError as error:
                        self._log.event("member:action-failed", "warning", name=name, why=str(error))

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member on its host; None when it does not run or the platform does not know it."""
        return self._platform.pid_of(name)

    @property
    def is_complete(self) -> bool:
        """Whether all members are up, or another Controller leads."""
        return (
            self.cluster_state.is_complete
            if self._is_acting
            else self.cluster_state.is_stopped and not self._leads.is_leader
        )

    @property
    def status_line(self) -> str:
        """Return the state of the cluster, in one line."""
        leadership = self._leads.status_line
        if not leadership or self.cluster_state.is_stopped:
            taken_back = f"; the last change was taken back: {self.rollback_reason}"
            return leadership or self.cluster_state.status_line + (taken_back if self.rollback_reason else "")
        return f"{leadership}; {self.cluster_state.status_line}"

    def conditions(self) -> Mapping[str, str]:
        """Return the problem of the members, if there is one."""
        return {"cluster": self.cluster_state.problem if self._is_acting else ""}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers of members, by phase and desired."""
        states = self.cluster_state.members.values()
        yield make_gauge(
            "celery5_members",
            "Members of the cluster, by phase.",
            *[
                (float(sum(state.shown_phase == phase for state in states)), {"phase": phase})
                for phase in (*[phase.value for phase in Phase], RECYCLING)
            ],
            merge="max",
        )
        yield make_gauge(
            "celery5_members_desired",
            "Members that should run.",
            sum(state.is_wanted and not state.is_successor for state in states),
            merge="max",
        )
        yield make_gauge(
            "celery5_members_missing",
            "Members that were given up or have been down for 30 s, by group.",
            *[
                (float(group.missing), {"kind": group.kind, "group": group.name})
                for group in (self.make_report(0.0).groups if self._is_acting else ())
            ],
            merge="max",
        )

    def make_report(self, at: float) -> MembersReport:
        """Return what is known of the members at this time, in seconds since 1970."""
        now = trio.current_time()
        return make_report(self.cluster_state.members.values(), now, epoch=at - now)

    @property
    def may_report(self) -> bool:
        """Whether this Controller acts on the members: only then does it know how they are."""
        return self._is_acting and self._leads.has_valid_lease and not self.cluster_state.draining

    def _members(self, scale: Mapping[str, int], cluster: Cluster | None = None) -> tuple[Member, ...]:
        return build_members(
            cluster or self.cluster, scale, environment=self._member_environment, grace=self._grace_period
        )

    async def _work(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the platform and all actions on members."""
        with scope:
            try:
                async with trio.open_nursery() as self._actions:
                    await self._actions.start(self._platform.live, self._handle_event)
                    self._is_running = True
                    task_status.started()
            finally:
                self._is_running = False

    async def _watch_leadership(self) -> None:
        """Decide at once when this Controller begins or ceases to lead."""
        while True:
            await self._leads.wait_changed()
            self._changed.set()

    async def _decide_once(self) -> None:
        """Decide once, then wait until there may be something new to decide."""
        self._changed = trio.Event()
        try:
            await self._follow_leadership()
        except PlatformError as error:  # tried again at each turn, and logged once
            if self._last_adopt_error != str(error):
                self._log.event("cluster:adopt-failed", "warning", why=str(error))
            self._last_adopt_error = str(error)
        else:
            self._last_adopt_error = ""
        now = trio.current_time()
        decides = self._leads.has_valid_lease if self._is_acting else not self._leads.is_leader
        if decides and self._is_acting:
            self._follow_trial(now)
        self.cluster_state.end_overdue_recycling(now)  # also while nothing may be started
        for action in self.cluster_state.decide(now) if decides else ():
            if self._actions is not None:
                self._actions.start_soon(self._act, action)
        self._publish_status()
        with trio.move_on_after(
            max(0.0, min(DECISION_PERIOD, self.cluster_state.next_start_at - now))
            if decides
            else DECISION_PERIOD
        ):
            await self._changed.wait()

    def _follow_trial(self, now: float) -> None:
        """Apply or drop the change that is tried, once there is a verdict on its canaries."""
        trial = self._trial
        verdict = trial and trial.watch.judge(self.cluster_state.members, now)
        if trial is None or verdict is None:
            return
        self._trial = None
        self.cluster_state.end_canaries(passed=verdict.passed)
        if not verdict.passed:
            self.rollback_reason = verdict.why
            self._log.event("canary:failed", "error", why=verdict.why, hint=_TAKEN_BACK)
            return
        self._log.event("canary:passed", why=verdict.why)
        if trial.cluster is None:
            self.restart()
        else:
            self.apply_description(trial.cluster)

    async def _follow_leadership(self) -> None:
        """Adopt the cluster when this Controller begins to lead, and release it when it leads no more.

        Members that end with this process are stopped; the others belong to the next leader. Raises PlatformError.
        """
        stamp = self._leads.get_epoch_environment()
        # A changed epoch means that another Controller led between two decisions.
        if self._is_acting and self._leads.is_leader and stamp != self._stamp:
            self._release_members()
            self._is_acting = False
        if self._leads.has_valid_lease and not self._is_acting:
            self.cluster_state.adopt(await self._platform.living(), trio.current_time())
            self._is_acting, self._stamp = True, stamp
            self.cluster_state.resume()
        elif not self._leads.is_leader:
            if self._is_acting:
                self._release_members()
            self._is_acting = False
            self.cluster_state.drain()

    def _release_members(self) -> None:
        if self._trial is not None:  # as every Controller that does not lead, this one has what the file says
            trial, self._trial = self._trial, None
            self.cluster_state.end_canaries(passed=False)
            self.apply_description(trial.cluster or self.cluster)
        self.cluster_state.release([name for name in self.cluster_state.members if self._outlives(name)])
        self._platform.leave()

    def _outlives(self, name: str) -> bool:
        """Return whether a member survives this process, so that another Controller may have adopted it."""
        return self._platform.outlives(name)

    async def _act(self, action: Action) -> None:
        name = action.member.name if isinstance(action, Start) else action.name
        async with self._locks.setdefault(name, trio.Lock()):
            try:
                if not self._leads.has_valid_lease and (isinstance(action, Start) or self._outlives(name)):
                    raise PlatformError(_NOT_OURS)
                await self._perform(action)
            except PlatformError as error:
                is_logged, is_news = False, True
                if isinstance(action, Start):
                    self.cluster_state.mark_start_failed(
                        name, str(error), trio.current_time(), is_excused=self._excused
                    )
                    is_logged = self._log_failed_successor(name)
                    is_news = self._note_failed_start(name, str(error))
                    self._changed.set()
                elif isinstance(action, Stop):
                    self.cluster_state.mark_stop_failed(name, trio.current_time())
                if not is_logged:
                    self._log.event(
                        "member:action-failed", "warning" if is_news else "debug", name=name, why=str(error)
                    )

    async def _perform(self, action: Action) -> None:
        match action:
            case Start(member):
                state = self.cluster_state.members.get(member.name)
                level: Level = "debug" if member.name in self._failed_starts else "info"
                self._log.event("member:start-requested", level, name=member.name, host=member.host)
                environment = {
                    **member.environment,
                    **self._leads.get_epoch_environment(),
                    **({SUPERVISED_VARIABLE: IS_SPARE} if state is not None and state.is_successor else {}),
                }
                await self._platform.start(replace(member, environment=environment))
            case Stop(name):
                self._log.event("member:stop-requested", name=name)
                await self._platform.stop(name)
            case Kill(name, why):
                self._log.event("member:killed", "error", name=name, why=why)
                await self._platform.kill(name)
            case Permit():
                with suppress(trio.WouldBlock):  # it is repeated
                    self._send_permit.send_nowait(action)

    def _handle_event(self, event: MemberEvent) -> None:
        state = self.cluster_state.members.get(event.name)
        before = None if state is None else state.phase
        self.cluster_state.handle_event(event, trio.current_time(), is_excused=self._excused)
        if state is not None and state.phase is not before:
            self._log_change(event, state.phase, is_expected=before is Phase.STOPPING)
        if state is not None:
            self._note_end(event, state)
        self._changed.set()

    def _note_end(self, event: MemberEvent, state: MemberState) -> None:
        """Pass on how a process of a member ended that was up, and later that the member was started again.

        The end of a successor that never came up says nothing of the one that is missed.
        """
        name = event.name
        if isinstance(event, Ended):
            if not state.failures:  # one that ends in order has none
                self._ends.pop(name, None)
                return
            given_up = state.phase is Phase.GIVEN_UP
            then = f"given up: {state.end_reason}" if given_up else "it is started again"
            if state.has_been_up:
                end = MemberEnd(name, event.how, then, state.incarnation)
            elif name in self._ends:
                end = replace(self._ends[name], then=then)
            else:
                return
            self._ends[name] = end
        elif state.phase is Phase.UP and name in self._ends:
            end = replace(self._ends.pop(name), then="started again")
        else:
            return
        with suppress(trio.WouldBlock):  # who reads them is behind: the last ones are lost
            self._send_end.send_nowait(end)

    def _log_change(self, event: MemberEvent, phase: Phase, *, is_expected: bool) -> None:
        if phase in (Phase.GIVEN_UP, Phase.UP):
            self._failed_starts.pop(event.name, None)
        if phase is Phase.GIVEN_UP:
            how = self.cluster_state.members[event.name].end_reason
            kept = [
                state.member.name for state in self.cluster_state.retained if event.name in state.waits_for
            ]
            details = {"kept": kept} if kept else {}
            self._log.event(
                "member:abandoned",
                "error",
                name=event.name,
                why=how,
                hint=format_retry(event.name),
                **details,
            )
        elif isinstance(event, Ended):
            self._log_end(event, is_expected=is_expected)
        elif phase is Phase.UP:
            self._log.event("member:started", name=event.name)

    def _log_end(self, event: Ended, *, is_expected: bool) -> None:
        """Log how a member has ended. A start that fails as the one before did is logged at debug."""
        state = self.cluster_state.members[event.name]
        is_expected = self._log_failed_successor(event.name) or is_expected or state.is_recycling
        level: Level = "info" if is_expected else "warning"
        details: dict[str, float] = {}
        if state.phase is Phase.DOWN and state.failures:
            next_try = max(0.0, state.restart_at - trio.current_time())
            details = {"failures": state.failures, "next_try": round(next_try, 1)}
            if not state.has_been_up and not self._note_failed_start(event.name, event.how):
                level = "debug"
        self._log.event(
            "member:ended",
            level,
            name=event.name,
            how=state.end_reason if event.code == RESTART_EXIT_CODE else event.how,
            code=event.code,
            **details,
        )

    def _note_failed_start(self, name: str, how: str) -> bool:
        """Note how a start has failed. Return whether the one before has not failed in the same way."""
        before, self._failed_starts[name] = self._failed_starts.get(name), how
        return how != before

    def _log_failed_successor(self, name: str) -> bool:
        """Return whether this is a successor that has failed to start, and was dropped; log the first one in a row."""
        state = self.cluster_state.members[name]
        replaced = self.cluster_state.members.get(state.replaces) if state.is_successor else None
        if replaced is None or state.is_wanted or not replaced.successor_failures:
            return False
        if replaced.successor_failures == 1:
            self._log.event(
                "member:successor-failed",
                "warning",
                name=replaced.member.name,
                successor=name,
                why=state.end_reason,
            )
        return True

    @property
    def _excused(self) -> bool:
        return not self._redis.connected

    def _publish_status(self) -> None:
        line = self.status_line
        if self.is_complete:
            self.all_ready.set()
        if line != self._last_status:
            self._last_status = line
            self._on_status(line)

    async def _end(self) -> None:
        """Stop all members in order, while something can stop them.

        Another Controller may lead at once, unless it would adopt the members that stop here.
        """
        self.cluster_state.drain()
        self.cluster_state.release(
            [name for name in self.cluster_state.members if self._platform.stays(name)]
        )
        if not self._leads.has_valid_lease:
            self._release_members()
        if not any(
            self._outlives(name) and not self._platform.stays(name) for name in self.cluster_state.members
        ):
            with trio.move_on_after(RESIGN_LIMIT):
                await self._leads.resign()
        with trio.move_on_after(self.end_limit):
            while self._is_running and not self.cluster_state.is_stopped:
                await self._turn_down()

    async def _turn_down(self) -> None:
        self._changed = trio.Event()
        for action in self.cluster_state.decide(trio.current_time()):
            if self._actions is not None:
                self._actions.start_soon(self._act, action)
        self._publish_status()
        if not self.cluster_state.is_stopped:
            with trio.move_on_after(DECISION_PERIOD):
                await self._changed.wait()

    @property
    def end_limit(self) -> float:
        """Return the seconds that stopping all members may take."""
        return get_end_limit(state.member for state in self.cluster_state.members.values())


def get_end_limit(members: Iterable[Member]) -> float:
    """Return the seconds that stopping all these members, in order, may take."""
    longest: dict[Kind, float] = dict.fromkeys(STOP_ORDER, 0.0)
    for member in members:
        longest[member.kind] = max(longest[member.kind], member.stop_after)
    return sum(longest.values()) + END_MARGIN


class ClusterReady:
    """A boot step that is up once all members have been up: systemd gets READY no earlier."""

    def __init__(self, *, foreman: Foreman) -> None:
        self._foreman = foreman

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for the members, then until cancelled."""
        await self._foreman.all_ready.wait()
        task_status.started()
        await trio.sleep_forever()


_NOT_OURS = "this Controller is not sure that it leads"
_TAKEN_BACK = (
    "the former version goes on: restore its code and description, correct the new version, and try again"
)
