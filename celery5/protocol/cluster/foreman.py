"""Decide which members of a cluster to start, stop and kill, from the events that their platform reports.

`ClusterState.decide` compares what runs with what should run, and returns the difference as actions. No action is
returned twice: a member is started only when its former process has ended, asked to stop once, and killed when that
takes too long.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import inf

from celery5.errors import EXIT_ALREADY_IN_USE
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    TRANSITIONS,
    Action,
    Beat,
    Ended,
    Kill,
    Kind,
    Member,
    MemberEvent,
    MemberState,
    Permit,
    Phase,
    Ready,
    Start,
    State,
    Stop,
    Unknown,
)
from celery5.protocol.counts import format_count
from celery5.protocol.health.worker_status import parse_worker_status
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.process.liveness import get_silence_limit
from celery5.protocol.process.recycling import RESTART_EXIT_CODE

STOP_ORDER: Sequence[Kind] = ("scheduler", "router", "worker", "publisher")
"""The order of shutdown: first what makes jobs, then what runs them, last what accepts them for others."""
OVERLAPPING_KINDS: frozenset[Kind] = frozenset({"worker", "router", "scheduler"})
"""Kinds whose successor starts before they stop: so there is no pause, and what a new version cannot run goes on in the
old one. Any number of Schedulers may run, without a leader. Two publishers would want one socket.
"""
RESTART_DELAY = 0.05
MAX_RESTART_DELAY = 10.0
"""Seconds: the longest wait after the first death, doubled with each further one, and its cap."""
KILL_RETRY_DELAY = 5.0
"""Seconds after which a process that survived a kill is killed again."""
STALL_LIMIT = 5.0
"""Seconds without a decision after which this process counts as frozen: silent members are not blamed then."""
PERMIT_INTERVAL = 5.0
"""Seconds after which a member is told again whether it may be recycled: a message may be lost."""
SUCCESSOR_WAIT = 60.0
"""The most seconds that a member waits for a successor while that of another member of its group is up: its memory may
keep growing, while a successor is at work as long as the jobs of the other member take."""
MAX_SUCCESSOR_DELAY = 60.0
"""Seconds: the longest wait after a successor that did not start, doubled from two with each further one."""
DISMISSAL_LIMIT = 30.0
"""Seconds until a successor that is needed no more must have begun to end; after that it is asked to stop."""

UNKNOWN_LIMIT = "it has reached a limit"
"""The reason of a recycled member that has not reported one, or whose report was lost."""
ASKED_TOO_EARLY = "it asked to be started again before it was ready"
"""How a process ended that exited with RESTART_EXIT_CODE before it was up."""


class ClusterState:
    """The state of all members of a cluster. `random` returns numbers from 0 up to 1."""

    def __init__(self, cluster: Cluster, *, random: Callable[[], float]) -> None:
        self._cluster = cluster
        self._random = random
        self._states: dict[str, MemberState] = {}
        self._spares: Mapping[tuple[Kind, str], Sequence[Member]] = {}
        self._decided_at = -inf
        self._to_restart: set[str] = set()
        self._change = 0
        self.draining = False

    @property
    def members(self) -> Mapping[str, MemberState]:
        """Return the members by name."""
        return self._states

    def begin_change(self) -> int:
        """Return the number of a change that begins: a member that was given up in a former one says nothing of it."""
        self._change += 1
        return self._change

    def set_desired(self, cluster: Cluster, members: Iterable[Member], spares: Iterable[Member] = ()) -> None:
        """Set the members that should run.

        Members that differ from how they were started are restarted, one of a group at a time. One of the `spares` of
        their group runs beside them meanwhile, and tries the new version first; and one runs in place of any worker
        that is recycled. Members that are no longer wanted stop when the changed ones are up: should those fail, they
        stay. A member that was given up is tried again when it has changed.
        """
        self._cluster = cluster
        wanted = {member.name: member for member in members}
        spares = list(spares)
        new = [member for name, member in wanted.items() if name not in self._states or self._differs(member)]
        by_group = defaultdict[tuple[Kind, str], list[Member]](list)
        for spare in spares:
            by_group[spare.kind, spare.group].append(spare)
        self._spares = dict(by_group)
        for name, state in self._states.items():
            state.is_spare = state.is_spare and name not in wanted
            state.is_successor = state.is_successor and state.is_spare
            has_purpose = state.is_canary or state.is_successor or self._is_trying(state, spares)
            state.is_wanted = name in wanted or (has_purpose and state.is_wanted)
            state.has_passed = False
        for name, member in wanted.items():
            state = self._states.setdefault(name, MemberState(member))
            if state.member != member:
                state.member = member
                _reset_failures(state)
        for state in self._states.values():
            before = {member.name for member in new if _follows(member, state)} | state.waits_for
            state.waits_for = frozenset() if state.is_wanted else frozenset(before & wanted.keys())

    def _is_trying(self, state: MemberState, spares: Sequence[Member]) -> bool:
        """Return whether a spare runs what is wanted now: it has passed as a canary, or only the scale changes."""
        return state.has_passed or (state.is_spare and state.phase.is_running and state.member in spares)

    def adopt(self, running: Mapping[str, State], now: float) -> None:
        """Take over members that run already, as if started with this description; unwanted ones will stop."""
        for name, reported in running.items():
            state = self._states.get(name)
            if state is None:
                kind: Kind = "worker"
                for prefix in STOP_ORDER:
                    kind = prefix if name.startswith(prefix) else kind
                spare = next((s for spares in self._spares.values() for s in spares if s.name == name), None)
                state = self._states[name] = MemberState(
                    spare or Member(name=name, kind=kind, arguments=()),
                    is_wanted=False,
                    is_spare=spare is not None,
                    is_successor=spare is not None,
                )
            _forget_successor(state)
            state.phase, state.started_as, state.missing_since = Phase(reported), state.member, None
            state.incarnation, state.has_been_up = "", state.phase is not Phase.STARTING
            state.phase_since = state.last_heard_at = now
            state.stop_requested = state.stopping_by_itself = state.phase is Phase.STOPPING

    def release(self, names: Iterable[str]) -> None:
        """Leave these to another Controller: no action is taken on them, and their events are ignored."""
        for state in [self._states[name] for name in names]:
            state.phase, state.started_as, state.recycle_reason = Phase.DOWN, None, ""
            state.missing_since = None
            state.stop_requested = state.stopping_by_itself = False
            state.killed_at = -inf
            _forget_successor(state)

    def restart(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Restart these members, or all, one of a group at a time; return the names.

        Members that were given up are tried again at once.
        """
        if names is None:
            names = [name for name, state in self._states.items() if not state.is_spare]
        chosen = [self._states[name] for name in names if name in self._states]
        groups = {state.group for state in chosen}
        for state in self._states.values():
            if state.is_spare and not state.is_canary and state.group in groups:
                _reset_failures(state)  # it tries the new version before those that it stands in for
        for state in chosen:
            _reset_failures(state)
            if state.phase.is_running and state.is_wanted:
                self._to_restart.add(state.member.name)
        return tuple(sorted(state.member.name for state in chosen if state.is_wanted))

    def find_restarting_groups(self, members: Iterable[Member] | None = None) -> set[str]:
        """Return the groups of Workers that work, or start for the first time, and whose members a change restarts.

        A group whose members die at their start has nothing to lose by a new version. Nor has one whose processes
        run the wanted version already: that is how a change goes back that ended with the first member of a group.

        Args:
            members: those that are wanted after the change; None: it restarts all.
        """
        wanted = None if members is None else {member.name: member for member in members}
        return {
            state.member.group
            for name, state in self._states.items()
            if state.member.kind == "worker"
            and state.is_wanted
            and state.phase.is_running
            and not state.failures
            and (wanted is None or (name in wanted and state.started_as != wanted[name]))
        }

    def start_canaries(self, canaries: Iterable[Member]) -> None:
        """Start these beside all others, and keep them until `end_canaries`."""
        for canary in canaries:
            state = self._states.setdefault(canary.name, MemberState(canary))
            state.member, state.waits_for = canary, frozenset()
            state.is_wanted = state.is_spare = state.is_canary = True
            _reset_failures(state)
            if state.phase.is_running:
                self._to_restart.add(canary.name)

    def end_canaries(self, *, passed: bool) -> None:
        """Stop the canaries: at once, or when they have `passed` and the change that follows is complete."""
        for state in self._states.values():
            if state.is_canary and state.is_wanted:
                state.is_wanted, state.is_canary, state.has_passed = passed, not passed, passed

    @property
    def pending_names(self) -> tuple[str, ...]:
        """Return the members in transition: they start, stop, or wait to be restarted."""
        return tuple(
            sorted(
                name
                for name, state in self._states.items()
                if state.is_canary
                or (
                    not state.is_successor
                    and state.phase is not Phase.GIVEN_UP
                    and (not self._is_settled(state) if state.is_wanted else state.phase.is_running)
                )
            )
        )

    def drain(self) -> None:
        """Stop all members, in order, from the next decision on."""
        self.draining = True

    def resume(self) -> None:
        """Run the wanted members again."""
        self.draining = False

    def handle_event(self, event: MemberEvent, now: float, *, is_excused: bool = False) -> None:
        """Apply an event of the platform. An excused death (the broker is unreachable) does not count."""
        state = self._states.get(event.name)
        if state is None or not state.phase.is_running:
            return
        if isinstance(event, Beat) and event.status:
            _take_status(state, event.status, now)
        if isinstance(event, Beat) and not event.loop_alive:
            return
        state.last_heard_at = now
        state.unknown_reason = event.why if isinstance(event, Unknown) else ""
        if isinstance(event, Ended):
            self._handle_end(state, event, now, excused=is_excused)
            return
        if isinstance(event, Ready):
            state.code = event.code or state.code
            state.incarnation = event.incarnation or state.incarnation
        phase = TRANSITIONS[state.phase, type(event)]
        if phase is not state.phase:
            state.phase, state.phase_since = phase, now
            state.stopping_by_itself = state.stopping_by_itself or phase is Phase.STOPPING
            if phase is Phase.UP:
                state.recycle_reason, state.missing_since = "", None
        if state.unknown_reason and (
            phase is Phase.STARTING or (phase is Phase.STOPPING and not self.draining)
        ):
            state.phase_since = now  # it cannot be late while it can neither be started nor stopped
        elif phase is Phase.UP:
            state.failures, state.has_been_up = 0, True

    def mark_start_failed(self, name: str, reason: str, now: float, *, is_excused: bool = False) -> None:
        """Record that the platform could not start a member."""
        self.handle_event(Ended(name, reason), now, is_excused=is_excused)

    def mark_stop_failed(self, name: str, now: float) -> None:
        """Record that the platform could not ask a member to stop: it will be asked again."""
        state = self._states.get(name)
        if (
            state is not None
            and state.phase is Phase.STOPPING
            and state.stop_requested
            and state.killed_at == -inf
        ):
            state.stop_requested = False
            if not state.stopping_by_itself:
                state.phase, state.phase_since, state.last_heard_at = Phase.UP, now, now

    def _handle_end(self, state: MemberState, event: Ended, now: float, *, excused: bool) -> None:
        # One that ends while it starts never did anything.
        recycled = event.code == RESTART_EXIT_CODE and state.phase is not Phase.STARTING
        in_order = state.stop_requested or (state.stopping_by_itself and event.code == 0) or recycled
        why = state.end_reason if state.killed_at > -inf and not state.stop_requested else event.how
        if event.code == RESTART_EXIT_CODE:  # words are clearer than the number 75
            why = f"recycled: {state.recycle_reason or UNKNOWN_LIMIT}" if recycled else ASKED_TOO_EARLY
        state.recycle_reason = (state.recycle_reason or UNKNOWN_LIMIT) if recycled else ""
        state.phase, state.phase_since, state.started_as, state.status = Phase.DOWN, now, None, ""
        state.code = ""
        state.stop_requested = state.stopping_by_itself = False
        state.killed_at = -inf
        _forget_successor(state)
        self._to_restart.discard(state.member.name)
        state.end_reason = why
        if in_order:
            state.restart_at, state.failures = -inf, 0
            return
        if self._drop_failed_successor(state, now):
            return
        state.failures += 1
        state.missing_since = now if state.missing_since is None else state.missing_since
        state.death_count += event.code != EXIT_ALREADY_IN_USE
        state.restart_at = now + full_jitter(
            state.failures - 1, start=RESTART_DELAY, cap=MAX_RESTART_DELAY, random=self._random
        )
        # The exit code means that a former process, or another Controller's, has not ended yet.
        if excused or event.code == EXIT_ALREADY_IN_USE:
            return
        state.recent_deaths = [
            died_at for died_at in state.recent_deaths if now - died_at < self._cluster.restart_period
        ] + [now]
        state.failures = max(state.failures, len(state.recent_deaths))
        if len(state.recent_deaths) >= self._cluster.restart_limit:
            state.phase, state.given_up_in = Phase.GIVEN_UP, self._change
            state.end_reason = (
                f"it has died {format_count(len(state.recent_deaths), 'time')} within "
                f"{self._cluster.restart_period:g} s: {why}"
            )

    def end_overdue_recycling(self, now: float) -> None:
        """Count recycled members that have not come back within `start_limit` as failed, like any other."""
        limit = self._cluster.start_limit
        for state in self._states.values():
            if (
                state.is_recycling
                and state.phase in (Phase.DOWN, Phase.STARTING)
                and now - state.phase_since >= limit
            ):
                state.recycle_reason = ""
                state.failures, state.missing_since = 1, now
                state.end_reason = f"it was recycled, and was not up {limit:g} s later"

    def decide(self, now: float) -> list[Action]:
        """Return what to do now. An action counts as done unless `mark_start_failed` or `mark_stop_failed` follows."""
        if now - self._decided_at > STALL_LIMIT:
            for state in self._states.values():
                state.last_heard_at = max(state.last_heard_at, now)
                if state.phase is Phase.STARTING:
                    state.phase_since = now
        self._decided_at = now
        actions: list[Action] = list(self._plan_kills(now))
        if self.draining:
            return [*actions, *self._plan_shutdown(now)]
        self._settle_spares()
        self._settle_successors()
        for name in [
            name for name, state in self._states.items() if not state.is_wanted and not state.phase.is_running
        ]:
            del self._states[name]
        actions += self._plan_stops(now)
        actions += self._plan_permits(now)
        return [*actions, *self._plan_starts(now)]

    def _plan_kills(self, now: float) -> Iterable[Kill]:
        """Kill members that do not stop, do not become ready, or are silent."""
        for state in self._states.values():
            why = self._find_fault(state, now) if state.phase.is_running else ""
            if why and now - state.killed_at >= KILL_RETRY_DELAY:
                if state.killed_at == -inf:
                    state.end_reason = why
                state.killed_at, state.phase = now, Phase.STOPPING
                yield Kill(state.member.name, why)

    def _find_fault(self, state: MemberState, now: float) -> str:
        silent, limit = now - state.last_heard_at, self._cluster.hung_after
        if state.killed_at > -inf:
            return state.end_reason
        if state.phase is Phase.STOPPING and now - state.phase_since >= _get_stop_limit(state):
            return f"it had not ended {_get_stop_limit(state):g} s after it was asked to"
        if state.phase is Phase.STARTING and now - state.phase_since >= self._cluster.start_limit:
            return f"it was not ready {self._cluster.start_limit:g} s after its start"
        if state.phase is Phase.UP and limit and silent >= get_silence_limit(limit):
            return f"its event loop has said nothing for {limit:g} s"
        return ""

    def _plan_shutdown(self, now: float) -> Iterable[Stop]:
        for kind in STOP_ORDER:
            running = [
                state
                for state in self._states.values()
                if state.member.kind == kind and state.phase.is_running
            ]
            for state in running:
                yield from _request_stop(state, now)
            if running:
                return

    def _plan_stops(self, now: float) -> list[Action]:
        """Stop unwanted members, once the wanted ones are up, and the next stale member of each group."""
        actions: list[Action] = []
        coming = {
            state.member.kind for state in self._wanted() if state.phase in (Phase.DOWN, Phase.STARTING)
        }
        for state in self._states.values():
            must_wait = not state.is_canary and (
                state.member.kind in coming & OVERLAPPING_KINDS or self._get_pending_waits(state)
            )
            if not state.is_wanted and state.phase.is_running and not (must_wait and state.phase is Phase.UP):
                actions += _dismiss(state, now) if state.is_successor else _request_stop(state, now)
        for group in {state.group for state in self._wanted() if self._is_stale(state)}:
            actions += self._roll_group(group, now)
        return actions

    def _get_pending_waits(self, state: MemberState) -> frozenset[str]:
        """Return the members that an unwanted one still waits for. It forgets each as soon as that has come up."""
        up = {name for name in state.waits_for if self._is_settled(self._states.get(name))}
        state.waits_for -= up
        return state.waits_for

    def _is_settled(self, state: MemberState | None) -> bool:
        return state is None or (state.phase is Phase.UP and not self._is_stale(state))

    def _roll_group(self, group: tuple[Kind, str], now: float) -> Iterable[Stop]:
        """Stop the next member of a group that must be restarted.

        One that still starts is the next, and waits only for those that run the new version: it may never be up. All
        others wait until the whole group is up, with a spare that has tried the new version beside them, if the group
        may have one. So a new version that cannot run ends no member that works.
        """
        states = [state for state in self._wanted() if state.group == group]
        stale = [state for state in states if self._is_stale(state)]
        idle = [state for state in stale if state.phase is Phase.STARTING]
        if idle and all(state.phase is Phase.UP for state in states if not self._is_stale(state)):
            return _request_stop(idle[0], now)
        if any(state.phase is not Phase.UP for state in states):
            return []
        is_tried = any(state.is_spare and not state.is_successor for state in states)
        spare = None if is_tried else self._find_free_spare(stale[0])
        if group[0] in OVERLAPPING_KINDS and spare is not None:
            self._states[spare.name] = MemberState(spare, is_spare=True)
            return []
        return _request_stop(stale[0], now)

    def _settle_spares(self) -> None:
        """Mark spares as unwanted when the other members of their group are up and current."""
        for state in self._states.values():
            if state.is_spare and state.is_wanted and not (state.is_canary or state.is_successor):
                peers = [peer for peer in self._wanted() if peer.group == state.group and not peer.is_spare]
                state.is_wanted = any(peer.phase is not Phase.UP or self._is_stale(peer) for peer in peers)

    def _settle_successors(self) -> None:
        """Mark successors as unwanted whose members are up again, or are themselves not wanted any more."""
        for state in self._states.values():
            if state.is_successor and state.is_wanted:
                replaced = self._states.get(state.replaces)
                state.is_wanted = (
                    state.phase is not Phase.GIVEN_UP
                    and replaced is not None
                    and replaced.is_wanted
                    and (
                        replaced.phase is not Phase.UP
                        or bool(replaced.successor_reason or replaced.recycle_reason)
                    )
                )

    def _plan_permits(self, now: float) -> list[Action]:
        """Tell workers that ask for a successor whether they may be recycled, and add the successors they need."""
        actions: list[Action] = []
        for state in self._wanted():
            if state.successor_reason and state.phase is Phase.UP and not state.recycle_reason:
                granted = state.is_permitted or self._may_be_recycled(state, now)
                actions += _permit(state, now, granted=granted)
        return actions

    def _may_be_recycled(self, state: MemberState, now: float) -> bool:
        """Return whether the successor of a worker is up; add a successor if it has none and none is at work.

        A canary has none: it runs beside all others. A worker that has waited for SUCCESSOR_WAIT because of the
        successor of another one, which is up, does without.
        """
        if state.is_canary:
            return True
        successors = [
            other
            for other in self._wanted()
            if other.is_successor and other.group == state.group and other is not state
        ]
        own = next((other for other in successors if other.replaces == state.member.name), None)
        if own is not None:
            state.successor_failures *= own.phase is not Phase.UP
            return own.phase is Phase.UP
        spare = self._find_free_spare(state)
        if successors or spare is None:
            is_up = not successors or any(other.phase is Phase.UP for other in successors)
            return is_up and now - state.asked_at >= SUCCESSOR_WAIT
        if state.successor_at <= now:
            self._states[spare.name] = MemberState(
                spare, is_spare=True, is_successor=True, replaces=state.member.name
            )
        return False

    def _drop_failed_successor(self, state: MemberState, now: float) -> bool:
        """Drop a successor that has ended out of order, while the member that it was for still works.

        Another one is tried later. Return whether it was dropped.
        """
        replaced = self._states.get(state.replaces) if state.is_successor else None
        if replaced is None or replaced.phase is not Phase.UP or replaced.is_permitted:
            return False
        replaced.successor_failures += 1
        replaced.successor_at = now + min(2.0**replaced.successor_failures, MAX_SUCCESSOR_DELAY)
        state.is_wanted = False
        return True

    def _find_free_spare(self, state: MemberState) -> Member | None:
        """Return an additional member of a member's group, on its host, that does not run; None if there is none."""
        return next(
            (
                spare
                for spare in self._spares.get(state.group, ())
                if spare.name not in self._states and spare.host == state.member.host
            ),
            None,
        )

    def _plan_starts(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for state in self._wanted():
            if state.phase is Phase.DOWN and state.restart_at <= now:
                state.phase, state.started_as = Phase.STARTING, state.member
                state.incarnation, state.has_been_up = "", False
                state.phase_since = state.last_heard_at = now
                state.restart_count += bool(state.end_reason and not state.failures)
                actions.append(Start(state.member))
        return actions

    def _differs(self, member: Member) -> bool:
        """Return whether this name stands for another description, wanted or running, than `member`."""
        state = self._states[member.name]
        return state.member != member or (state.started_as or member) != member

    def _is_stale(self, state: MemberState) -> bool:
        if state.phase not in (Phase.STARTING, Phase.UP):
            return False
        return state.started_as != state.member or state.member.name in self._to_restart

    def _wanted(self) -> list[MemberState]:
        return [state for state in self._states.values() if state.is_wanted]

    @property
    def next_start_at(self) -> float:
        """Return the earliest time at which a member is started again."""
        if self.draining:
            return inf
        return min((state.restart_at for state in self._wanted() if state.phase is Phase.DOWN), default=inf)

    @property
    def is_complete(self) -> bool:
        """Return whether all wanted members are up, or are being recycled, and are current."""
        return all(
            (state.phase is Phase.UP or state.is_recycling) and not self._is_stale(state)
            for state in self._wanted()
            if not state.is_successor
        )

    @property
    def is_stopped(self) -> bool:
        """Return whether no member runs."""
        return not any(state.phase.is_running for state in self._states.values())

    @property
    def problem(self) -> str:
        """Return the problem of the members, in one line, each reason once; '' when there is none."""
        names_by_problem = defaultdict[str, list[str]](list)
        for state in self._wanted():
            if state.problem:
                names_by_problem[state.problem].append(state.member.name)
        failing = frozenset(chain.from_iterable(names_by_problem.values()))
        kept_names = [state.member.name for state in self.retained if state.waits_for & failing]
        problems = [f"{', '.join(names)}: {why}" for why, names in names_by_problem.items()]
        if kept_names:
            problems.append(
                f"{', '.join(kept_names)}: not wanted any more, and kept until the changed members are up"
            )
        return "; ".join(problems)

    @property
    def retained(self) -> list[MemberState]:
        """Return the unwanted members that stop only when the changed ones are up."""
        return [state for state in self._states.values() if state.waits_for and state.phase is Phase.UP]

    @property
    def status_line(self) -> str:
        """Return how many are up and what is wrong, in one line."""
        wanted = [state for state in self._wanted() if not state.is_successor]
        recycling = sum(state.is_recycling for state in wanted)
        up = sum(
            state.phase is Phase.UP and not state.unknown_reason and not state.is_recycling
            for state in wanted
        )
        members = f"{up} of {format_count(len(wanted), 'member')} up"
        line = members + (f", {recycling} recycling" if recycling else "")
        wrong = self.problem
        return line + (f"; {wrong}" if wrong else "")


def _take_status(state: MemberState, status: str, now: float) -> None:
    """Record the status of a member. While it starts, the reason to recycle is that of the process before."""
    state.status, state.status_at = status, now
    worker = parse_worker_status(status)
    if worker is not None and state.phase is not Phase.STARTING:
        state.recycle_reason = worker.recycling
        if worker.successor and not state.successor_reason:
            state.asked_at = now
        state.successor_reason = worker.successor


def _get_stop_limit(state: MemberState) -> float:
    return (state.started_as or state.member).stop_after


def _follows(member: Member, state: MemberState) -> bool:
    """Return whether `member`, which is new or changes, must be up before an unwanted one stops.

    One of another group need not, unless the kinds overlap: it might need what the unwanted one holds, such as
    a socket.
    """
    return member.kind == state.member.kind and (
        member.group == state.member.group or member.kind in OVERLAPPING_KINDS
    )


def _forget_successor(state: MemberState) -> None:
    """Forget what the process that has ended, or is another Controller's, has asked for and was told."""
    state.successor_reason, state.is_permitted = "", False
    state.permitted_at = state.dismissed_at = -inf


def _permit(state: MemberState, now: float, *, granted: bool) -> list[Permit]:
    """Tell a member whether it may be recycled: at once when that changes, and from time to time."""
    if granted == state.is_permitted and now - state.permitted_at < PERMIT_INTERVAL:
        return []
    state.is_permitted, state.permitted_at = granted, now
    return [Permit(state.member.name, granted)]


def _dismiss(state: MemberState, now: float) -> Sequence[Action]:
    """End a successor that is needed no more. Its jobs may take as long as those of the member that it was for."""
    if state.phase is Phase.UP and state.recycle_reason:
        return []
    if state.dismissed_at == -inf:
        state.dismissed_at = now
    if state.phase is not Phase.UP or now - state.dismissed_at >= DISMISSAL_LIMIT:
        return _request_stop(state, now)
    return _permit(state, now, granted=True)


def _reset_failures(state: MemberState) -> None:
    state.recent_deaths, state.failures, state.restart_at = [], 0, -inf
    state.successor_failures, state.successor_at = 0, -inf
    if state.phase is Phase.GIVEN_UP:
        state.phase = Phase.DOWN


def _request_stop(state: MemberState, now: float) -> list[Stop]:
    """Ask a member to stop, once. One that stops by itself is not asked: a second signal would end it at once."""
    if state.stop_requested:
        return []
    state.stop_requested = True
    if state.phase is Phase.STOPPING:
        return []
    state.phase, state.phase_since = Phase.STOPPING, now
    return [Stop(state.member.name)]
