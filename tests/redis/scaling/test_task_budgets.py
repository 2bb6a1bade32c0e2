"""Tasks with budgets of their own: held to fewer slots than their kind, with slots of it that are kept for them."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, agather
from celery5.errors import CommandRefused, Misconfigured
from celery5.processes.options import resolve_budgets
from celery5.scaling import Budget, Demand
from tests.redis.scaling.test_budgets import SOON, parts_of_a_worker
from tests.redis.worker.workers import Lines, held, until, working

RESIZE, OTHER = "shop.resize", "shop.other"


class RunningTasks:
    """Jobs that wait until they are let go: how many of each task run now, and how many did at most."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, task: str, by: int) -> None:
        with self._lock:
            self.inside[task] += by
            self.inside["all"] += by
            for name in (task, "all"):
                self.most[name] = max(self.most[name], self.inside[name])

    def run(self, task: str, seconds: float) -> None:
        self.count(task, 1)
        self.open.wait(seconds)
        self.count(task, -1)


@pytest.fixture
def running() -> Iterator[RunningTasks]:
    running = RunningTasks()
    yield running
    running.open.set()


def application(
    url: str,
    name: str,
    running: RunningTasks,
    *,
    seconds: float = 30.0,
    limit: int | None = None,
    **more: Any,
) -> App:
    """Its tasks run in threads, on one queue, until they are let go."""
    app = App(name, broker=url, lease=1.0, grace_period=1.0, **more)

    @app.task(name=RESIZE, limit=limit)
    def resize() -> None:
        running.run(RESIZE, seconds)

    @app.task(name=OTHER)
    def other() -> None:
        running.run(OTHER, seconds)

    return app


async def send(app: App, task: str, count: int) -> list[Any]:
    return list(await app.asend_many([app.tasks[task].s() for _ in range(count)]))


@pytest.mark.parametrize(("limit", "minimum"), [(None, 0), (100, 2)])
async def test_a_task_is_held_to_its_own_slots_and_does_not_hold_up_others_of_its_kind(
    url: str, app_name: str, running: RunningTasks, limit: int | None, minimum: int
) -> None:
    budgets = {
        "thread": Budget(minimum=6, maximum=6),
        RESIZE: Budget(minimum=minimum, maximum=2, cooldown=SOON),
    }
    app = application(url, app_name, running, limit=limit, budgets=budgets)
    async with parts_of_a_worker(app) as parts:
        sent = await send(app, RESIZE, 30) + await send(app, OTHER, 30)
        await until(lambda: running.inside[RESIZE] == 2 and running.inside[OTHER] == 4)
        counts = parts.budget.get_counts()
        assert (counts["thread"]["executing"], counts[RESIZE]["executing"]) == (6, 2)
        running.open.set()
        assert not any(await agather(sent, timeout=30))
    assert (running.most[RESIZE], running.most["all"]) == (2, 6)


async def test_slots_are_reserved_for_a_task_while_its_kind_is_full(
    url: str, app_name: str, redis_client: "redis.Redis", running: RunningTasks
) -> None:
    budgets = {"thread": Budget(minimum=4, maximum=4), RESIZE: Budget(minimum=2, maximum=2)}
    app = application(url, app_name, running, budgets=budgets)
    async with parts_of_a_worker(app):
        sent = await send(app, OTHER, 20)
        await until(lambda: running.inside[OTHER] == 2)
        await trio.sleep(0.3)
        assert running.most[OTHER] == 2  # two of four are kept
        sent += await send(app, RESIZE, 3)
        await until(lambda: running.inside[RESIZE] == 2)
        await until(lambda: held(redis_client, app) == {"w": 4})
        await trio.sleep(0.3)
        assert held(redis_client, app) == {"w": 4}
        running.open.set()
        assert not any(await agather(sent, timeout=30))
    assert running.most["all"] == 4


async def test_where_nothing_is_reserved_a_kind_uses_all_of_its_slots_for_others(
    url: str, app_name: str, running: RunningTasks
) -> None:
    budgets = {"thread": Budget(minimum=4, maximum=4), RESIZE: Budget(minimum=0, maximum=1)}
    app = application(url, app_name, running, budgets=budgets)
    async with parts_of_a_worker(app):
        sent = await send(app, OTHER, 4)
        await until(lambda: running.inside[OTHER] == 4)
        sent += await send(app, RESIZE, 3)
        await trio.sleep(0.3)
        assert not running.most[RESIZE]
        running.open.set()
        assert not any(await agather(sent, timeout=30))
    assert (running.most[RESIZE], running.most["all"]) == (1, 4)


async def test_short_jobs_of_both_never_run_beyond_either_budget(
    url: str, app_name: str, running: RunningTasks
) -> None:
    budgets = {"thread": Budget(minimum=5, maximum=5), RESIZE: Budget(minimum=1, maximum=2, cooldown=SOON)}
    app = application(url, app_name, running, seconds=0.002, budgets=budgets)
    async with parts_of_a_worker(app) as parts:
        sent: list[Any] = []
        for _ in range(10):
            sent += await send(app, RESIZE, 30) + await send(app, OTHER, 30)
        assert not any(await agather(sent, timeout=30))
        await until(lambda: not parts.budget.get_counts()["thread"]["executing"])
    assert running.most[RESIZE] <= 2
    assert running.most["all"] <= 5


async def test_a_kind_grows_for_the_jobs_that_its_task_may_run(
    url: str, app_name: str, running: RunningTasks
) -> None:
    budgets = {
        "thread": Budget(minimum=1, maximum=8, cooldown=SOON),
        RESIZE: Budget(minimum=0, maximum=3, cooldown=SOON),
    }
    app = application(url, app_name, running, budgets=budgets)
    async with parts_of_a_worker(app) as parts:
        sent = await send(app, RESIZE, 20)
        await until(lambda: running.inside[RESIZE] == 3)
        await until(lambda: parts.slots("thread") == 3)
        await trio.sleep(0.5)
        assert parts.slots("thread") == 3  # more would be of no use
        sent += await send(app, OTHER, 20)
        await until(lambda: running.inside["all"] == 8)
        running.open.set()
        assert not any(await agather(sent, timeout=30))
    assert (running.most[RESIZE], running.most["all"]) == (3, 8)


async def test_the_maximum_of_a_task_may_be_a_function(
    url: str, app_name: str, running: RunningTasks
) -> None:
    asked: list[Demand] = []

    def two(demand: Demand) -> int:
        asked.append(demand)
        return 2

    budgets = {RESIZE: Budget(minimum=1, maximum=two, cooldown=SOON)}
    app = application(url, app_name, running, cpu_slots=8, budgets=budgets)
    async with parts_of_a_worker(app) as parts:
        sent = await send(app, RESIZE, 9)
        await until(lambda: running.inside[RESIZE] == 2)
        assert parts.budget.get_counts()[RESIZE]["maximum"] == 2
        running.open.set()
        assert not any(await agather(sent, timeout=30))
    assert running.most[RESIZE] == 2
    assert (asked[0].kind, asked[0].task) == ("thread", RESIZE)


async def test_the_budget_of_a_task_is_set_from_afar_and_logged(
    url: str, app_name: str, running: RunningTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_BUDGETS", f"thread=4 {RESIZE}=1")
    app = application(url, app_name, running, keys=str(tmp_path / "keys"))
    app.control.keyring.get_signer()
    with Lines() as lines:
        async with working(app, name="w"):
            sent = await send(app, RESIZE, 9)
            await until(lambda: running.inside[RESIZE] == 1)
            (reply,) = await app.control.asend("budget", {"task": RESIZE, "minimum": 3, "maximum": 3})
            assert reply.ok
            assert {name: reply.answer[name] for name in ("kind", "task", "current", "minimum", "maximum")} == {
                "kind": "thread", "task": RESIZE, "current": 3, "minimum": 3, "maximum": 3,
            }  # fmt: skip
            await until(lambda: running.inside[RESIZE] == 3)
            (reply,) = await app.control.asend("stats")
            assert reply.answer["slots"][RESIZE]["executing"] == 3
            (reply,) = await app.control.asend("budget", {"task": RESIZE, "minimum": 4, "maximum": 4})
            assert reply.why == (
                f"budget of {RESIZE}: thread has a minimum of 4 slots, and 4 would be reserved for {RESIZE}: "
                "one at least must be left for other tasks"
            )
            (reply,) = await app.control.asend("budget", {"kind": "thread", "minimum": 3})
            assert "3 would be reserved" in reply.why
            (reply,) = await app.control.asend("budget", {"task": OTHER, "maximum": 2})
            assert f"task {OTHER!r} has no budget of its own here; these have: {RESIZE}" in reply.why
            running.open.set()
            assert not any(await agather(sent, timeout=30))
    (line,) = lines.of("budget:set")
    assert (line["kind"], line["task"], line["minimum"]) == ("thread", RESIZE, 3)


async def test_slots_that_are_no_longer_kept_are_for_others_at_once(
    url: str, app_name: str, running: RunningTasks
) -> None:
    app = application(url, app_name, running, cpu_slots=3, budgets={RESIZE: Budget(minimum=2, maximum=2)})
    async with parts_of_a_worker(app) as parts:
        sent = await send(app, OTHER, 9)
        await until(lambda: running.inside[OTHER] == 1)
        await parts.perform(task=RESIZE, minimum=0)
        await until(lambda: running.inside[OTHER] == 3)
        with pytest.raises(CommandRefused, match="either a kind or a task"):
            await parts.perform(task=RESIZE, kind="thread", minimum=1)
        running.open.set()
        assert not any(await agather(sent, timeout=30))


def test_a_budget_for_no_task_or_for_all_slots_is_refused_in_one_line(running: RunningTasks) -> None:
    for budgets, error in (
        (
            {"shop.rezise": Budget()},
            "'shop.rezise', which is no task of this application: did you mean 'shop.resize'?",
        ),
        ({RESIZE: Budget(minimum=2)}, "budgets: thread has a minimum of 2 slots, and 2 would be reserved"),
    ):
        app = application("redis://localhost", "shop", running, cpu_slots=2, budgets=budgets)
        with pytest.raises(Misconfigured, match=error.replace("?", r"\?")):
            resolve_budgets(app)
