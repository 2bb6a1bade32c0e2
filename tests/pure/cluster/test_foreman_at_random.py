"""Foreman at random: whatever processes do and people want, no member is ever there twice, and all ends well."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery5.protocol.cluster.description import build_canaries, build_members, build_spares, parse_cluster
from celery5.protocol.cluster.foreman import ClusterState
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Kill,
    Kind,
    Member,
    MemberEvent,
    Permit,
    Phase,
    Ready,
    Start,
    Stop,
    Stopping,
    Unknown,
)
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from celery5.protocol.process.recycling import RESTART_EXIT_CODE
from tests.night import examples
from tests.pure.cluster.test_foreman import CLUSTER


class AnyCluster(RuleBasedStateMachine):
    """Processes that live and die as they like, below a crew that is told anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.crew = ClusterState(CLUSTER, random=lambda: 0.5)
        self.running: dict[str, Member] = {}
        self.asked: set[str] = set()
        self.permitted: set[str] = set()
        self.want(2, 1)

    @rule(workers=st.integers(0, 4), routers=st.integers(0, 2))
    def want(self, workers: int, routers: int) -> None:
        scale = {"worker-default": workers, "router-default": routers}
        wanted = build_members(CLUSTER, scale)
        self.crew.set_desired(CLUSTER, wanted, build_spares(CLUSTER, scale, environment={}, grace=30))

    @rule(queues=st.sampled_from(["a", "b"]))
    def reload(self, queues: str) -> None:
        self.crew.set_desired(
            CLUSTER, build_members(parse_cluster({"workers": {"default": {"count": 2, "queues": [queues]}}}))
        )

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0, 50.0]))
    def decide(self, seconds: float) -> None:
        self.now += seconds
        for action in self.crew.decide(self.now):
            match action:
                case Start(member):
                    assert member.name not in self.running, "never two of one member"
                    self.running[member.name] = member
                case Stop(name):
                    assert name in self.running
                    assert name not in self.asked, "a second signal would end it at once"
                    self.asked.add(name)
                    if self.crew.draining:
                        self.assert_nobody_before(self.running[name].kind)
                case Kill(name):
                    assert name in self.running
                case Permit(name, is_granted):
                    assert name in self.running
                    if is_granted:
                        self.permitted.add(name)

    def assert_nobody_before(self, kind: Kind) -> None:
        order = ["scheduler", "router", "worker", "publisher"]
        before = order[: order.index(kind)]
        assert [member for member in self.running.values() if member.kind in before] == []

    @precondition(lambda self: self.running)
    @rule(data=st.data(), word=st.sampled_from([Ready, Beat, Stopping, Unknown]))
    def speak(self, data: st.DataObject, word: type[MemberEvent]) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.crew.handle_event(Unknown(name, "away") if word is Unknown else word(name), self.now)  # type: ignore[call-arg]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ask_for_a_successor(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.crew.handle_event(
            Beat(name, format_worker_status("", 9, Attempts(9), 0, successor="why")), self.now
        )

    @precondition(lambda self: self.permitted & self.running.keys())
    @rule(data=st.data(), ends=st.booleans())
    def be_recycled(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.permitted & self.running.keys())))
        status = format_worker_status("", 9, Attempts(9), 0, recycling="why")
        self.crew.handle_event(Beat(name, status), self.now)
        if ends:
            self.end_one(name, RESTART_EXIT_CODE, excused=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9, RESTART_EXIT_CODE]), excused=st.booleans())
    def end(self, data: st.DataObject, code: int, excused: bool) -> None:
        self.end_one(data.draw(st.sampled_from(sorted(self.running))), code, excused=excused)

    def end_one(self, name: str, code: int, *, excused: bool) -> None:
        del self.running[name]
        self.asked.discard(name)
        self.permitted.discard(name)
        self.crew.handle_event(Ended(name, "it ended", code), self.now, is_excused=excused)

    @rule()
    def restart(self) -> None:
        self.crew.restart()

    @rule(queues=st.sampled_from(["a", "b"]))
    def try_with_a_canary(self, queues: str) -> None:
        cluster = parse_cluster({"workers": {"default": {"count": 2, "queues": [queues]}}})
        groups = self.crew.find_restarting_groups(build_members(cluster))
        self.crew.end_canaries(passed=False)
        self.crew.start_canaries(build_canaries(cluster, groups, {}, environment={}, grace=30))

    @rule(passed=st.booleans())
    def end_canaries(self, passed: bool) -> None:
        self.crew.end_canaries(passed=passed)

    @rule()
    def drain(self) -> None:
        self.crew.drain()

    @rule()
    def resume(self) -> None:
        self.crew.resume()

    @invariant()
    def the_crew_knows_what_runs(self) -> None:
        believed = {name for name, post in self.crew.members.items() if post.phase.is_running}
        assert believed == set(self.running)

    def teardown(self) -> None:
        """Whatever has happened: when all goes well from here on, all that should be there comes."""
        self.crew.resume()
        self.crew.end_canaries(passed=True)
        self.want(2, 1)
        self.crew.restart()
        for _ in range(200):
            self.decide(1.0)
            for name in list(self.running):
                if self.crew.members[name].phase is Phase.STOPPING:
                    self.end_one(name, 0, excused=False)
                elif name in self.permitted:
                    self.end_one(name, RESTART_EXIT_CODE, excused=False)
                else:
                    self.crew.handle_event(Ready(name), self.now)
        assert self.crew.is_complete, self.crew.status_line
        assert sorted(self.running) == sorted(member.name for member in build_members(CLUSTER))


TestAnyCluster = AnyCluster.TestCase
TestAnyCluster.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
