"""Own steps: an application's boot steps and services come up, are looked after, are tried again and are undone."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5 import App, Misconfigured, RetryPolicy
from celery5.boot_step import BootStep, service
from celery5.errors import BootStepFailed, BrokerUnavailable, CommandRefused
from celery5.protocol.commands.definitions import RETRY_BOOT_STEP
from celery5.services.commands.dispatcher import SelfCommandSender
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import QUICK, Body, Desk, failing, told


async def test_a_preparation_is_done_before_the_first_job_and_undone_after_the_last(
    desk: Desk, notes: list[str]
) -> None:
    async def fill() -> str:
        await trio.sleep(0.05)
        notes.append("fill")
        return "full"

    async def empty(cache: str) -> None:
        notes.append(f"empty {cache}")

    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(BootStep("cache", fill, undo=empty)).run)
        nursery.cancel_scope.cancel()
    assert notes.index("fill") < notes.index("execution up")
    assert notes.index("empty full") > notes.index("execution down")


async def test_code_is_handed_what_it_asks_for_by_name(desk: Desk) -> None:
    got: dict[str, object] = {}

    class Pool:
        """What steps may give to others."""

    async def connect_db() -> Pool:
        return pool

    class Prices:
        def __init__(self, *, connect_db: Pool, app: App, worker: str, depth: int = 7) -> None:
            got.update(connect_db=connect_db, app=app, worker=worker, depth=depth)

        async def run(self, *, settings: object, logger: Any, task_status: trio.TaskStatus[None]) -> None:
            got.update(settings=settings, logger=logger.name)
            task_status.started()

    def report(prices: Prices, inbox: SelfCommandSender) -> None:  # in a thread
        got.update(prices=type(prices), inbox=inbox, thread=threading.current_thread().name)

    pool = Pool()
    steps = [BootStep("connect-db", connect_db), BootStep("report", report, requires=("prices",))]
    async with trio.open_nursery() as nursery:
        boot = desk.boot(*steps, services=(service(Prices, requires=("connect-db",)),))
        await nursery.start(boot.run)
        nursery.cancel_scope.cancel()
    assert got.pop("thread") != threading.current_thread().name
    assert got == {
        "connect_db": pool,
        "app": desk.app,
        "worker": "w1",
        "depth": 7,
        "settings": desk.app.settings,
        "logger": "desk.prices",
        "prices": Prices,
        "inbox": desk.posts,
    }


async def test_failed_mandatory_step_stops_the_process_with_its_cause(
    desk: Desk, notes: list[str], lines: Lines
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await desk.boot(BootStep("cache", failing(notes, 9))).run()
    assert caught.group_contains(
        BootStepFailed, match=r"^boot step 'cache' did not come up: ValueError: no 1$"
    )
    assert "execution up" not in notes
    assert notes[-1] == "publishing down"
    (line,) = told(lines, "step:failed")
    assert (line["step"], line["why"], line["level"]) == ("cache", "ValueError: no 1", "error")
    assert "in prepare" in line["traceback"]


async def test_a_mandatory_step_with_a_retry_policy_is_tried_so_often(
    desk: Desk, notes: list[str], autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        await nursery.start(desk.boot(BootStep("cache", failing(notes, 3), retry=QUICK)).run)
        assert trio.current_time() - began == 1 + 2 + 4
        nursery.cancel_scope.cancel()


async def test_a_mandatory_step_that_is_not_up_in_time_stops_the_process(
    desk: Desk, autojump_clock: MockClock
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await desk.boot(BootStep("slow", trio.sleep_forever, start_limit=2)).run()
    assert caught.group_contains(
        BootStepFailed, match="'slow' did not come up: TimeoutError: not up after 2 s"
    )
    assert trio.current_time() >= 2


async def test_an_optional_step_that_fails_is_told_of_and_tried_again_by_the_command(
    desk: Desk, notes: list[str], lines: Lines, autojump_clock: MockClock
) -> None:
    posted: list[tuple[str, Mapping[str, Any]]] = []

    class Noted:
        """What posts, and notes it."""

        async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
            assert "consumer up" in notes  # it is put off until the process works
            posted.append((command, parameters))
            await desk.commands.perform(command, parameters)

    desk.posts = Noted()
    step = BootStep("cache", failing(notes, 3), optional=True, retry=QUICK)
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        await nursery.start(desk.boot(step).run)
        assert trio.current_time() == began
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert posted == [(RETRY_BOOT_STEP.name, {"step": "cache"})]
    tries = [float(note.split()[-1]) - began for note in notes if note.startswith("try")]
    assert tries == pytest.approx([0, 0, 1, 3])
    assert desk.board.to_json()["cache"] == {"state": "up"}
    assert [line["level"] for line in told(lines, "step:failed")] == ["warning"] * 3
    assert [line["failures"] for line in told(lines, "step:started")] == [2]


async def test_without_an_answer_to_its_command_a_step_is_tried_again_all_the_same(
    desk: Desk, notes: list[str], lines: Lines, autojump_clock: MockClock
) -> None:
    class Silent:
        """An inbox that takes what nobody reads, is stuck, or refuses."""

        def __init__(self, does: Body) -> None:
            self.does = does

        async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
            await self.does()

    async def refuse() -> None:
        raise BrokerUnavailable("redis is away")

    bodies: list[Body] = [trio.lowlevel.checkpoint, trio.sleep_forever, refuse]
    for body in bodies:
        desk.posts = Silent(body)
        async with trio.open_nursery() as nursery:
            await nursery.start(desk.boot(BootStep("cache", failing(notes, 1), optional=True)).run)
            await trio.sleep(120)
            assert desk.board.to_json()["cache"] == {"state": "up"}
            nursery.cancel_scope.cancel()
    assert [line["why"] for line in told(lines, "step:retry-send-failed")] == [
        "it did not arrive",
        "no answer within 10 s",
        "redis is away",
    ]


async def test_a_step_that_was_given_up_is_tried_again_each_time_that_somebody_asks(
    desk: Desk, notes: list[str], autojump_clock: MockClock
) -> None:
    step = BootStep("cache", failing(notes, 100), optional=True, retry=QUICK)
    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(step).run)
        await trio.sleep(30)
        assert desk.board.to_json()["cache"] == {
            "state": "given up",
            "failures": 3,
            "why": "ValueError: no 4",
        }
        for asked in range(1, 21):  # no circuit breaker ever says no
            assert await desk.retry("cache") == {"step": "cache", "tries": 3}
            await trio.sleep(30)
            assert len([note for note in notes if note.startswith("try")]) == 4 + 3 * asked
        nursery.cancel_scope.cancel()


async def test_requested_try_of_a_waiting_step_runs_at_once(
    desk: Desk, notes: list[str], autojump_clock: MockClock
) -> None:
    policy = RetryPolicy(max_retries=5, backoff=3600.0, jitter=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(BootStep("cache", failing(notes, 2), optional=True, retry=policy)).run)
        await trio.sleep(5)
        assert desk.board.to_json()["cache"]["state"] == "failed"
        await desk.retry("cache")
        await trio.sleep(5)
        assert desk.board.to_json()["cache"] == {"state": "up"}
        nursery.cancel_scope.cancel()


async def test_a_command_about_a_step_that_cannot_be_tried_again_is_refused_and_says_why(
    desk: Desk, autojump_clock: MockClock
) -> None:
    async def nothing() -> None: ...

    async with trio.open_nursery() as nursery:
        steps = [BootStep("cache", nothing, optional=True), BootStep("pool", nothing)]
        await nursery.start(desk.boot(*steps).run)
        await trio.sleep(1)
        for name, why in {
            "cache": "'cache' is up: only one that failed",
            "pool": "'pool' is mandatory",
            "execution": "'execution' is mandatory",
            "cash": "no boot step 'cash' here; did you mean 'cache'?",
            "xyz": "failed: none",
        }.items():
            with pytest.raises(CommandRefused, match=why):
                await desk.retry(name)
        nursery.cancel_scope.cancel()


async def test_what_requires_an_optional_step_waits_until_it_is_up(
    desk: Desk, notes: list[str], autojump_clock: MockClock
) -> None:
    async def warm() -> None:
        notes.append("warm")

    first = BootStep("cache", failing(notes, 2), optional=True, retry=QUICK)
    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(first, BootStep("warm", warm, ("cache",), optional=True)).run)
        assert "warm" not in notes
        await trio.sleep(10)
        assert notes[-1] == "warm"
        nursery.cancel_scope.cancel()


async def test_a_step_may_post_a_command_to_its_own_process(desk: Desk, notes: list[str]) -> None:
    async def tell(inbox: SelfCommandSender) -> None:
        with pytest.raises(CommandRefused, match="command 'sing' is not known here"):
            await inbox.send("sing", {})
        notes.append("told")

    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(BootStep("tell", tell)).run)
        nursery.cancel_scope.cancel()
    assert "told" in notes


async def nothing() -> None:
    """A preparation."""


async def needs(cache: object) -> None:
    """One that asks for what another one gives."""


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (
            [BootStep("a", nothing, "cnosumer")],
            "'a' requires 'cnosumer', which is not there; did you mean 'consumer'?",
        ),
        ([BootStep("consumer", nothing)], "'consumer' has the name of one of celery5's own"),
        ([BootStep("a", nothing, "b"), BootStep("b", nothing, "a")], "in a circle: "),
        ([BootStep("a", nothing, "b"), BootStep("b", nothing, optional=True)], "'b', which is optional"),
        (
            [BootStep("a", needs)],
            "asks for 'cache', which is not there; there are: app, inbox, logger, settings",
        ),
        ([BootStep("a", needs), BootStep("cache", nothing)], "does it require a step 'cache'?"),
        ([BootStep("a", "no_such_module:run")], "no_such_module cannot be imported: ModuleNotFoundError"),
        ([BootStep("a", "celery5.app:Ap")], "there is no 'Ap' in celery5.app"),
        ([BootStep("a", int)], r"<class 'int'> has no run\(\)"),
    ],
)
def test_steps_that_do_not_fit_are_told_of_before_anything_starts(
    desk: Desk, added: list[BootStep], why: str
) -> None:
    with pytest.raises(Misconfigured, match=why) as caught:
        desk.boot(*added)
    assert "\n" not in str(caught.value)
