"""Boot: steps come up in order, go down in reverse, and no failure leaves one behind."""

import pytest
import trio
from trio.testing import MockClock

from celery5 import Misconfigured
from celery5.bootsteps.boot import BootFailed, BootGraph, Step, sort_steps


class Part:
    """A service that notes when it is up and when it has gone."""

    def __init__(
        self,
        name: str,
        notes: list[str],
        *,
        takes: float = 0.0,
        fails: str = "",
        crash: trio.Event | None = None,
        leaves_in: float = 0.0,
    ) -> None:
        self.name, self.notes, self.takes, self.fails, self.crash = name, notes, takes, fails, crash
        self.leaves_in = leaves_in

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Come up after `takes` seconds; stay until cancelled, or until the crash."""
        self.notes.append(f"{self.name} begins")
        try:
            await trio.sleep(self.takes)
            if self.fails:
                raise ValueError(self.fails)
            self.notes.append(f"{self.name} up")
            task_status.started()
            crash = trio.Event() if self.crash is None else self.crash
            await crash.wait()
            raise RuntimeError(f"{self.name} crashed")
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.leaves_in)
            self.notes.append(f"{self.name} down")


def steps(notes: list[str], *chain: str) -> list[Step]:
    """Steps that each require the one before."""
    return [Step(name, Part(name, notes), chain[n - 1 : n] if n else ()) for n, name in enumerate(chain)]


async def test_steps_come_up_in_order_and_go_down_in_reverse(nursery: trio.Nursery) -> None:
    notes: list[str] = []
    shuffled = [steps(notes, "a", "b", "c")[n] for n in (2, 0, 1)]
    async with trio.open_nursery() as inner:
        await inner.start(BootGraph(steps=shuffled).run)
        assert notes == ["a begins", "a up", "b begins", "b up", "c begins", "c up"]
        inner.cancel_scope.cancel()
    assert notes[6:] == ["c down", "b down", "a down"]


async def test_a_step_starts_as_soon_as_what_it_requires_is_up(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    slow, quick = Part("slow", notes, takes=5), Part("quick", notes, takes=1)
    boot = BootGraph(
        steps=[Step("slow", slow), Step("quick", quick), Step("next", Part("next", notes), ("quick",))]
    )
    async with trio.open_nursery() as inner:
        began = trio.current_time()
        await inner.start(boot.run)
        assert trio.current_time() - began == 5
        assert notes[2:] == ["quick up", "next begins", "next up", "slow up"]
        inner.cancel_scope.cancel()


async def test_each_step_has_gone_before_what_it_requires_goes(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    a, b = Part("a", notes), Part("b", notes, leaves_in=10)
    async with trio.open_nursery() as inner:
        await inner.start(BootGraph(steps=[Step("a", a), Step("b", b, ("a",))]).run)
        inner.cancel_scope.cancel()
    assert notes[-2:] == ["b down", "a down"]


async def test_a_step_that_does_not_go_in_time_does_not_keep_the_others(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    a, b = Part("a", notes), Part("b", notes, leaves_in=10)
    async with trio.open_nursery() as inner:
        await inner.start(BootGraph(steps=[Step("a", a), Step("b", b, ("a",), stop_limit=1)]).run)
        inner.cancel_scope.cancel()
    assert notes[-2:] == ["a down", "b down"]


async def test_step_that_does_not_end_is_reported_to_the_process(
    autojump_clock: MockClock,
) -> None:
    notes: list[str] = []
    a, b = Part("a", notes, leaves_in=100), Part("b", notes)
    async with trio.open_nursery() as inner:
        boot = BootGraph(
            steps=[Step("a", a, stop_limit=1), Step("b", b, ("a",))], on_stuck=lambda: notes.append("stuck")
        )
        await inner.start(boot.run)
        inner.cancel_scope.cancel()
    assert notes[4:] == ["b down", "stuck", "a down"]


async def test_a_crash_takes_all_down_in_reverse_and_is_raised() -> None:
    notes: list[str] = []
    crash = trio.Event()
    a, b, c = Part("a", notes), Part("b", notes, crash=crash), Part("c", notes)
    boot = BootGraph(steps=[Step("a", a), Step("b", b, ("a",)), Step("c", c, ("b",))])
    with pytest.RaisesGroup(pytest.RaisesGroup(RuntimeError)):
        async with trio.open_nursery() as inner:
            await inner.start(boot.run)
            crash.set()
    assert sorted(notes[-3:-1]) == ["b down", "c down"]  # b went by itself
    assert notes[-1] == "a down"


async def test_a_step_that_fails_to_start_takes_down_what_was_up(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    boot = BootGraph(
        steps=[
            Step("a", Part("a", notes, leaves_in=1)),
            Step("b", Part("b", notes, fails="no", takes=2), ("a",)),
            Step("slow", Part("slow", notes, takes=100, leaves_in=3), ("a",)),
            Step("never", Part("never", notes), ("b",)),
        ]
    )
    with pytest.raises(ExceptionGroup) as caught:
        await boot.run()
    assert caught.group_contains(ValueError, match="no")
    assert notes[-1] == "a down"
    assert {"b down", "slow down"} <= set(notes)
    assert "never begins" not in notes


async def test_cancelled_while_it_starts_it_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    boot = BootGraph(
        steps=[
            Step("a", Part("a", notes)),
            Step("b", Part("b", notes, takes=10, leaves_in=5), ("a",)),
            Step("c", Part("c", notes), ("b",)),
        ]
    )
    with trio.move_on_after(3):
        await boot.run()
    assert notes == ["a begins", "a up", "b begins", "b down", "a down"]


async def test_step_cancelled_as_it_is_up_stops_before_what_it_requires(
    autojump_clock: MockClock,
) -> None:
    notes: list[str] = []

    class Abrupt(Part):
        """Its start is what cancels everything."""

        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            scope.cancel()
            await super().run()

    boot = BootGraph(steps=[Step("a", Part("a", notes)), Step("b", Abrupt("b", notes, leaves_in=5), ("a",))])
    with trio.CancelScope() as scope:
        await boot.run()
    assert notes[-2:] == ["b down", "a down"]


async def test_a_step_that_is_not_up_in_time_fails_the_start(autojump_clock: MockClock) -> None:
    notes: list[str] = []
    boot = BootGraph(
        steps=[Step("a", Part("a", notes)), Step("b", Part("b", notes, takes=60), ("a",), start_limit=2)]
    )
    with pytest.raises(ExceptionGroup) as caught:
        await boot.run()
    assert caught.group_contains(BootFailed, match="'b' was not up after 2 s")
    assert notes[-2:] == ["b down", "a down"]


async def test_a_step_may_be_over_once_it_is_up() -> None:
    notes: list[str] = []

    class Done:
        async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()

    async with trio.open_nursery() as inner:
        await inner.start(BootGraph(steps=[Step("done", Done()), Step("a", Part("a", notes), ("done",))]).run)
        inner.cancel_scope.cancel()
    assert notes[-1] == "a down"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([Step("a", Part("a", []), ("b",))], "requires 'b', which is not there"),
        ([Step("a", Part("a", []), ("b",)), Step("b", Part("b", []), ("a",))], "in a circle"),
        ([Step("a", Part("a", [])), Step("a", Part("a", []))], "two boot steps are named 'a'"),
        (
            [Step("a", Part("a", []), ("b",)), Step("b", Part("b", []), optional=True)],
            "'b', which is optional",
        ),
    ],
    ids=["missing", "circle", "doubled", "optional"],
)
def test_steps_that_make_no_graph_are_refused_at_once(wrong: list[Step], why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        sort_steps(wrong)


class Hasty:
    """A service during whose first breath everything is cancelled."""

    def __init__(self, around: trio.CancelScope) -> None:
        self._around = around

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Come up, and look whether it is cancelled."""
        task_status.started()
        self._around.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()


async def test_who_is_cancelled_as_it_comes_up_stays_so() -> None:
    for _ in range(30):  # Trio goes on with either of two in any order
        with trio.CancelScope() as around:
            await BootGraph(steps=[Step("hasty", Hasty(around))]).run()
        assert around.cancelled_caught
