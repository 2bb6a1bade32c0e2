"""Foreman: what each member of a cluster is, and what is to be done next about it, decided from what was heard (C89).

A `Crew` hears words and is told what is wanted; asked to `decide`, it compares what is with what should be, and says
what to do. It says a thing once, and nothing is done twice: a member is started only when its former process has ended,
asked to end once, and killed when that takes too long.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Phase,
    Start,
    State,
    Stop,
    Unknown,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.process.liveness import get_silence_limit
from celery5.protocol.process.recycling import RESTART_EXIT_CODE

STOP_ORDER: Sequence[Kind] = ("scheduler", "router", "worker", "publisher")
"""Who ends before whom: first what makes jobs, then what runs them, last what takes them in for others."""
OVERLAPPING_KINDS: frozenset[Kind] = frozenset({"worker", "router"})
"""Who has a successor before it goes, so that there is no pause. Two publishers would want one socket."""
RESTART_DELAY = 0.05
MAX_RESTART_DELAY = 10.0
"""Seconds: the longest wait after the first death, doubled with each, and its cap."""
KILL_RETRY_DELAY = 5.0
"""Seconds after which somebody is killed again who should be dead."""
STALL_LIMIT = 5.0
"""Seconds without a decision after which we are the ones who were away: nobody is blamed for silence meanwhile."""


class ClusterState:
    """All members of a cluster. `chance` gives numbers from 0 up to 1."""

    def __init__(self, cluster: Cluster, *, random: Callable[[], float]) -> None:
        self._cluster = cluster
        self._chance = random
        self._posts: dict[str, MemberState] = {}
        self._spares: Mapping[tuple[Kind, str], Member] = {}
        self._looked = -inf
        self._again: set[str] = set()
        self.draining = False

    @property
    def members(self) -> Mapping[str, MemberState]:
        """The members, by name."""
        return self._posts

    def set_desired(self, cluster: Cluster, members: Iterable[Member], spares: Iterable[Member] = ()) -> None:
        """These are the members that there should be. Those that are another than they were started as are restarted,
        one of a group at a time; `spares` step in for a group's only one meanwhile. Who is not wanted any more goes
        when those that change have come up: should they not, it stays. Who was given up is tried again when it has
        changed."""
        self._cluster = cluster
        wanted = {each.name: each for each in members}
        new = [each for name, each in wanted.items() if name not in self._posts or self._is_another(each)]
        self._spares = {(each.kind, each.group): each for each in spares}
        for post in self._posts.values():
            post.is_wanted = post.member.name in wanted
            post.is_spare = post.is_spare and not post.is_wanted
        for name, member in wanted.items():
            post = self._posts.setdefault(name, MemberState(member))
            if post.member != member:
                post.member = member
                _forgive(post)
        for post in self._posts.values():
            before = {each.name for each in new if _follows(each, post)} | post.waits_for
            post.waits_for = frozenset() if post.is_wanted else frozenset(before & wanted.keys())

    def adopt(self, running: Mapping[str, State], now: float) -> None:
        """These run already. They are taken for what they should be; who should not be is to end."""
        for name, state in running.items():
            post = self._posts.get(name)
            if post is None:
                kind: Kind = "worker"
                for each in STOP_ORDER:
                    kind = each if name.startswith(each) else kind
                post = self._posts[name] = MemberState(
                    Member(name=name, kind=kind, arguments=()), is_wanted=False
                )
            post.phase, post.started_as = Phase(state), post.member
            post.phase_since = post.last_heard_at = now
            post.stop_requested = post.stopping_by_itself = post.phase is Phase.STOPPING

    def release(self, names: Iterable[str]) -> None:
        """These are another Controller's from now on: nothing is done to them, or heard of them."""
        for post in [self._posts[name] for name in names]:
            post.phase, post.started_as = Phase.DOWN, None
            post.stop_requested = post.stopping_by_itself = False
            post.killed_at = -inf

    def restart(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Have these restarted, or all, one of a group at a time; gives who will be. Whoever was given up is tried
        again at once."""
        chosen = [
            self._posts[name] for name in (self._posts if names is None else names) if name in self._posts
        ]
        for post in chosen:
            _forgive(post)
            if post.phase.is_running and post.is_wanted:
                self._again.add(post.member.name)
        return tuple(sorted(post.member.name for post in chosen if post.is_wanted))

    @property
    def pending_names(self) -> tuple[str, ...]:
        """Who is not yet what it should be, and will be without anybody's help: who starts or ends, or is to be
        restarted when its turn comes."""
        return tuple(
            sorted(
                name
                for name, post in self._posts.items()
                if post.phase is not Phase.GIVEN_UP
                and (not self._is_settled(post) if post.is_wanted else post.phase.is_running)
            )
        )

    def drain(self) -> None:
        """Everybody is to end, in order."""
        self.draining = True

    def resume(self) -> None:
        """Everybody is to be there again."""
        self.draining = False

    def handle_event(self, event: MemberEvent, now: float, *, is_excused: bool = False) -> None:
        """What a platform says. A death that is `excused`, since nobody could live now, does not count."""
        post = self._posts.get(event.name)
        if post is None or not post.phase.is_running:
            return
        if isinstance(event, Beat) and not event.loop_alive:
            post.status, post.status_at = event.status, now
            return
        post.last_heard_at = now
        post.unknown_reason = event.why if isinstance(event, Unknown) else ""
        if isinstance(event, Ended):
            self._ended(post, event, now, excused=is_excused)
            return
        if isinstance(event, Beat) and event.status:
            post.status, post.status_at = event.status, now
        phase = TRANSITIONS[post.phase, type(event)]
        if phase is not post.phase:
            post.phase, post.phase_since = phase, now
            post.stopping_by_itself = post.stopping_by_itself or phase is Phase.STOPPING
        if post.unknown_reason and (
            phase is Phase.STARTING or (phase is Phase.STOPPING and not self.draining)
        ):
            post.phase_since = now  # it cannot be late where nobody can start it, or ask it to end
        elif phase is Phase.UP:
            post.failures = 0

    def mark_start_failed(self, name: str, reason: str, now: float, *, is_excused: bool = False) -> None:
        """The platform could not start it."""
        self.handle_event(Ended(name, reason), now, is_excused=is_excused)

    def mark_stop_failed(self, name: str, now: float) -> None:
        """The platform could not ask it to end: it has not been asked, and will be."""
        post = self._posts.get(name)
        if (
            post is not None
            and post.phase is Phase.STOPPING
            and post.stop_requested
            and post.killed_at == -inf
        ):
            post.stop_requested = False
            if not post.stopping_by_itself:
                post.phase, post.phase_since, post.last_heard_at = Phase.UP, now, now

    def _ended(self, post: MemberState, word: Ended, now: float, *, excused: bool) -> None:
        recycled = (
            word.code == RESTART_EXIT_CODE and post.phase is not Phase.STARTING
        )  # else it never did anything
        in_order = post.stop_requested or (post.stopping_by_itself and word.code == 0) or recycled
        why = post.end_reason if post.killed_at > -inf and not post.stop_requested else word.how
        post.phase, post.phase_since, post.started_as, post.status = Phase.DOWN, now, None, ""
        post.stop_requested = post.stopping_by_itself = False
        post.killed_at = -inf
        self._again.discard(post.member.name)
        post.end_reason = why
        if in_order:
            post.restart_at, post.failures = -inf, 0
            return
        post.failures += 1
        post.death_count += word.code != EXIT_ALREADY_IN_USE
        post.restart_at = now + full_jitter(
            post.failures - 1, start=RESTART_DELAY, cap=MAX_RESTART_DELAY, random=self._chance
        )
        if (
            excused or word.code == EXIT_ALREADY_IN_USE
        ):  # a former one, or another Controller's, has not ended yet
            return
        post.recent_deaths = [
            each for each in post.recent_deaths if now - each < self._cluster.restart_period
        ] + [now]
        post.failures = max(post.failures, len(post.recent_deaths))
        if len(post.recent_deaths) >= self._cluster.restart_limit:
            post.phase = Phase.GIVEN_UP
            post.end_reason = f"it has died {len(post.recent_deaths)} times within "
            f"{self._cluster.restart_period:g} s: {why}"

    def decide(self, now: float) -> list[Action]:
        """What is to be done. Each action counts as done: whoever cannot do it says so with `not_started`."""
        if now - self._looked > STALL_LIMIT:
            for post in self._posts.values():
                post.last_heard_at = max(post.last_heard_at, now)
                if post.phase is Phase.STARTING:
                    post.phase_since = now
        self._looked = now
        actions: list[Action] = list(self._kills(now))
        if self.draining:
            return [*actions, *self._stops_in_order(now)]
        self._settle_spares()
        for name in [
            name for name, post in self._posts.items() if not post.is_wanted and not post.phase.is_running
        ]:
            del self._posts[name]
        actions += self._stops(now)
        return [*actions, *self._starts(now)]

    def _kills(self, now: float) -> Iterable[Kill]:
        """Who does not end, does not come up, or says nothing."""
        for post in self._posts.values():
            why = self._fault(post, now) if post.phase.is_running else ""
            if why and now - post.killed_at >= KILL_RETRY_DELAY:
                if post.killed_at == -inf:
                    post.end_reason = why
                post.killed_at, post.phase = now, Phase.STOPPING
                yield Kill(post.member.name, why)

    def _fault(self, post: MemberState, now: float) -> str:
        silent, limit = now - post.last_heard_at, self._cluster.hung_after
        if post.killed_at > -inf:
            return post.end_reason
        if post.phase is Phase.STOPPING and now - post.phase_since >= _patience(post):
            return f"it had not ended {_patience(post):g} s after it was asked to"
        if post.phase is Phase.STARTING and now - post.phase_since >= self._cluster.start_limit:
            return f"it was not ready {self._cluster.start_limit:g} s after its start"
        if post.phase is Phase.UP and limit and silent >= get_silence_limit(limit):
            return f"its event loop has said nothing for {limit:g} s"
        return ""

    def _stops_in_order(self, now: float) -> Iterable[Stop]:
        for kind in STOP_ORDER:
            running = [
                post for post in self._posts.values() if post.member.kind == kind and post.phase.is_running
            ]
            for post in running:
                yield from _asked(post, now)
            if running:
                return

    def _stops(self, now: float) -> list[Action]:
        """Who is not wanted any more, once those who are have come; and who is to be another, in its turn."""
        found: list[Action] = []
        coming = {post.member.kind for post in self._wanted() if post.phase in (Phase.DOWN, Phase.STARTING)}
        for post in self._posts.values():
            awaits = post.member.kind in coming & OVERLAPPING_KINDS or self._awaited(post)
            if not post.is_wanted and post.phase.is_running and not (awaits and post.phase is Phase.UP):
                found += _asked(post, now)
        for group in {post.group for post in self._wanted() if self._is_stale(post)}:
            found += self._roll(group, now)
        return found

    def _awaited(self, post: MemberState) -> frozenset[str]:
        """Whom a member that is to go still waits for. Once they have come up, whatever becomes of them later is no
        matter of it."""
        up = {name for name in post.waits_for if self._is_settled(self._posts.get(name))}
        post.waits_for -= up
        return post.waits_for

    def _is_settled(self, post: MemberState | None) -> bool:
        return post is None or (post.phase is Phase.UP and not self._is_stale(post))

    def _roll(self, group: tuple[Kind, str], now: float) -> Iterable[Stop]:
        """The next one of a group that is to be restarted. One that does not work holds up nobody; all others wait
        until the whole group is up, so a new version that cannot live ends with its first member."""
        posts = [post for post in self._wanted() if post.group == group]
        stale = [post for post in posts if self._is_stale(post)]
        idle = [post for post in stale if post.phase is Phase.STARTING]
        if idle:
            return [stop for post in idle for stop in _asked(post, now)]
        if any(post.phase is not Phase.UP for post in posts):
            return []
        spare = self._spares.get(group)
        if (
            len(posts) == 1
            and group[0] in OVERLAPPING_KINDS
            and spare is not None
            and spare.name not in self._posts
        ):
            self._posts[spare.name] = MemberState(spare, is_spare=True)
            return []
        return _asked(stale[0], now)

    def _settle_spares(self) -> None:
        """A spare goes when the others of its group are what they should be."""
        for post in self._posts.values():
            if post.is_spare and post.is_wanted:
                others = [each for each in self._wanted() if each.group == post.group and not each.is_spare]
                post.is_wanted = any(each.phase is not Phase.UP or self._is_stale(each) for each in others)

    def _starts(self, now: float) -> list[Action]:
        found: list[Action] = []
        for post in self._wanted():
            if post.phase is Phase.DOWN and post.restart_at <= now:
                post.phase, post.started_as = Phase.STARTING, post.member
                post.phase_since = post.last_heard_at = now
                post.restart_count += bool(post.end_reason and not post.failures)
                found.append(Start(post.member))
        return found

    def _is_another(self, member: Member) -> bool:
        """Whether what is under this name, or was to be, is another than this `member`."""
        post = self._posts[member.name]
        return post.member != member or (post.started_as or member) != member

    def _is_stale(self, post: MemberState) -> bool:
        if post.phase not in (Phase.STARTING, Phase.UP):
            return False
        return post.started_as != post.member or post.member.name in self._again

    def _wanted(self) -> list[MemberState]:
        return [post for post in self._posts.values() if post.is_wanted]

    @property
    def next_start_at(self) -> float:
        """When somebody is to be started again, at the earliest."""
        if self.draining:
            return inf
        return min((post.restart_at for post in self._wanted() if post.phase is Phase.DOWN), default=inf)

    @property
    def is_complete(self) -> bool:
        """Whether everybody is up who should be, and is what it should be."""
        return all(post.phase is Phase.UP and not self._is_stale(post) for post in self._wanted())

    @property
    def is_stopped(self) -> bool:
        """Whether nobody runs."""
        return not any(post.phase.is_running for post in self._posts.values())

    @property
    def problem(self) -> str:
        """What is wrong with the members, in one line; '' when nothing is."""
        troubled = {post.member.name: post.problem for post in self._wanted() if post.problem}
        stay = [post.member.name for post in self.retained if post.waits_for & troubled.keys()]
        told = [f"{name}: {why}" for name, why in troubled.items()]
        if stay:
            told.append(f"{', '.join(stay)}: not wanted any more, and kept until the changed members are up")
        return "; ".join(told)

    @property
    def retained(self) -> list[MemberState]:
        """Who is not wanted any more, and goes only when those that have changed are up."""
        return [post for post in self._posts.values() if post.waits_for and post.phase is Phase.UP]

    @property
    def status_line(self) -> str:
        """How many are up, and what is wrong, in one line."""
        wanted = self._wanted()
        up = sum(post.phase is Phase.UP and not post.unknown_reason for post in wanted)
        wrong = self.problem
        return f"{up} of {len(wanted)} members up" + (f"; {wrong}" if wrong else "")


def _patience(post: MemberState) -> float:
    return (post.started_as or post.member).stop_after


def _follows(member: Member, post: MemberState) -> bool:
    """Whether `member`, which is new or changes, is to be up before the one of this `post` goes. One of another group
    might want what that one holds, as a socket, unless they are of a kind that overlaps."""
    return member.kind == post.member.kind and (
        member.group == post.member.group or member.kind in OVERLAPPING_KINDS
    )


def _forgive(post: MemberState) -> None:
    post.recent_deaths, post.failures, post.restart_at = [], 0, -inf
    if post.phase is Phase.GIVEN_UP:
        post.phase = Phase.DOWN


def _asked(post: MemberState, now: float) -> list[Stop]:
    """Have it end, if it was not asked before. Who is about to end by itself need not be asked: a second signal would
    have it end at once."""
    if post.stop_requested:
        return []
    post.stop_requested = True
    if post.phase is Phase.STOPPING:
        return []
    post.phase, post.phase_since = Phase.STOPPING, now
    return [Stop(post.member.name)]
