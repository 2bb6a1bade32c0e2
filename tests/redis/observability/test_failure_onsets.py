"""Since when a task fails does not depend on how far back somebody looks."""

import random
import time

import pytest
import redis

from celery5 import App
from celery5.broker.call import Call
from celery5.observability import overview
from celery5.protocol.observability.overview import TaskMinute, find_onset
from celery5.protocol.observability.report import compress
from celery5.protocol.observability.rollup import DAY, HOUR, MINUTE
from tests.redis.observability.seeding import Ended, seed_history
from tests.redis.observability.surfaces import Surfaces, find_queue
from tests.redis.observability.surfaces_app import SETTINGS, declare

WINDOWS = (60, 900, 3600, 21_600)
"""Seconds that overviews look back."""


def fail_from(begin: int, now: float, *, well_before: int = 10) -> dict[int, Ended]:
    """Minutes in which `push` failed from a time on, after some in which it did well."""
    minutes: dict[int, Ended] = {}
    # Up to the minute that is under way: the one before is gone from a window of a minute when the next one begins.
    for at in range(begin - well_before * MINUTE, int(now), MINUTE):
        minutes[at // MINUTE * MINUTE] = {"push": (0, 5) if at >= begin else (20, 0), "other": (9, 0)}
    return minutes


def get_expected(minutes: dict[int, Ended], task: str) -> int | None:
    """Since when the task fails, by all minutes."""
    onset = find_onset(
        TaskMinute(at, sum(ended[task]), ended[task][1]) for at, ended in minutes.items() if task in ended
    )
    return None if onset is None else onset.at


def read_since(app: App, task: str, window: float) -> int | None:
    """Since when an overview says that the task fails."""
    shown = {overview.name: overview for overview in app.metrics.overview(since=window).tasks}
    return shown[task].failing_since if task in shown else None


@pytest.mark.parametrize("ago", [120, 1800, 5400, 5 * HOUR, 26 * HOUR, 6 * DAY])
def test_the_onset_is_the_same_in_every_window(app: App, redis_client: "redis.Redis", ago: int) -> None:
    now = time.time()
    begin = int(now - ago) // MINUTE * MINUTE
    minutes = fail_from(begin, now)
    seed_history(redis_client, app, "crm", minutes, now)
    assert {window: read_since(app, "push", window) for window in WINDOWS} == dict.fromkeys(WINDOWS, begin)
    assert [read_since(app, "push", 3600) for _ in range(3)] == [begin] * 3  # also by what is remembered
    assert read_since(app, "other", 3600) is None


@pytest.mark.parametrize("ago", [9 * DAY, 40 * DAY])
def test_the_onset_is_known_by_the_hour_when_its_minutes_are_gone(
    app: App, redis_client: "redis.Redis", ago: int
) -> None:
    now = time.time()
    begin = int(now - ago) // HOUR * HOUR
    seed: dict[int, Ended] = {begin - HOUR: {"push": (90, 0)}}
    seed |= {at: {"push": (0, 5)} for at in range(begin, int(now) - MINUTE, HOUR)}
    seed[int(now) // MINUTE * MINUTE - 120] = {"push": (0, 5)}
    seed_history(redis_client, app, "crm", seed, now)
    assert [read_since(app, "push", window) for window in (900, 3600, 21_600)] == [begin] * 3


@pytest.mark.parametrize("ago", [1800, 5400, 26 * HOUR, 9 * DAY])
@pytest.mark.parametrize("past", [0.5, 59.5, 61.0, 179.5])
def test_onset_does_not_change_when_an_hour_begins(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, past: float, ago: int
) -> None:
    now = time.time() // HOUR * HOUR + past
    begin = int(now - ago) // HOUR * HOUR
    monkeypatch.setattr(overview, "SERVER_TIME", Call(("TIME",), lambda _: now))
    seed: dict[int, Ended] = {begin - 600: {"push": (90, 0)}}
    # Not in the hour that has just begun: what is known of the failures lies in the hours before.
    seed |= {at: {"push": (0, 5)} for at in range(begin, int(now - past), HOUR)}
    seed[int(now) // MINUTE * MINUTE - 240] = {"push": (0, 5)}
    seed_history(redis_client, app, "crm", seed, now)
    assert {window: read_since(app, "push", window) for window in WINDOWS[1:]} == dict.fromkeys(
        WINDOWS[1:], begin
    )


def test_a_task_that_heals_and_fails_again_fails_since_the_second_time(
    app: App, redis_client: "redis.Redis"
) -> None:
    now = time.time()
    minutes = fail_from(int(now - 9 * HOUR) // MINUTE * MINUTE, now)
    healed = int(now - 3 * HOUR) // MINUTE * MINUTE
    minutes |= {at: {"push": (20, 0), "other": (1, 0)} for at in range(healed - 300, healed, MINUTE)}
    seed_history(redis_client, app, "crm", minutes, now)
    assert [read_since(app, "push", window) for window in WINDOWS] == [healed] * len(WINDOWS)


@pytest.mark.parametrize("seed", range(6))
def test_the_onset_is_that_of_all_minutes_whatever_came_before(
    app: App, redis_client: "redis.Redis", seed: int
) -> None:
    rng, now = random.Random(seed), time.time()
    minutes: dict[int, Ended] = {}
    is_bad = False
    for at in range(int(now - 30 * HOUR) // MINUTE * MINUTE, int(now) - 2 * MINUTE, MINUTE):
        is_bad = is_bad if rng.random() < 0.99 else not is_bad
        if rng.random() < 0.3:
            failed = rng.randint(1, 9) if is_bad and rng.random() < 0.8 else 0
            minutes[at] = {"push": (rng.randint(0 if failed else 1, 20), failed)}
    minutes[int(now) // MINUTE * MINUTE - 60] = {"push": (0, 5)}
    seed_history(redis_client, app, "crm", minutes, now)
    expected = get_expected(minutes, "push")
    assert {window: read_since(app, "push", window) for window in WINDOWS} == dict.fromkeys(WINDOWS, expected)


def test_a_task_of_several_queues_fails_since_it_did_on_all_of_them_together(
    app: App, redis_client: "redis.Redis"
) -> None:
    now = time.time()
    begin = int(now - 8 * HOUR) // MINUTE * MINUTE
    minutes = fail_from(begin, now)
    for queue in ("crm", "web"):
        seed_history(redis_client, app, queue, minutes, now)
    index = app.keys.metrics_state
    redis_client.hset(index, "index", compress(["", "crm", "web"]))
    assert read_since(app, "push", 3600) == begin


async def test_an_old_onset_is_told_by_every_surface(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app, now = declare(App(app_name, broker=url, **SETTINGS)), time.time()
    begin = int(now - 9 * HOUR) // MINUTE * MINUTE
    seed_history(redis_client, app, "crm", fail_from(begin, now), now)
    surfaces = Surfaces(app)
    shown = {
        "app.metrics.overview": next(
            task.failing_since for task in (await app.metrics.aoverview()).tasks if task.name == "push"
        ),
        "top --json": find_queue((await surfaces.run_json("top"))["tasks"], "push")["failing_since"],
        "top --since 15m --json": find_queue(
            (await surfaces.run_json("top", "--since", "15m"))["tasks"], "push"
        )["failing_since"],
        "JSON API": find_queue((await surfaces.ask("top:show"))["tasks"], "push")["failing_since"],
    }
    assert shown == dict.fromkeys(shown, begin)
    for path in ("", "tasks", "tasks/push"):
        text = await surfaces.look(path)
        assert "9 h ago" in text or time.strftime("%H:%M", time.gmtime(begin)) in text, path
