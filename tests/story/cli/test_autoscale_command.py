"""Autoscale command: an application is scaled by processes of their own, and everybody can see how."""

import json
import signal
import sys
from typing import Any

import trustme  # noqa: F401  the desk forgets what is imported while it is used, and this bears no second time

from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk

SCALE = {
    "CELERY5_AUTOSCALE": "minimum=1 maximum=3 cooldown=0.1 longest_cooldown=0.1 prefetch=2",
    "CELERY5_PRIORITISE": "shortest",
}


def status(desk: Desk) -> Any:
    """What `autoscale status` says."""
    return json.loads(desk("autoscale", "status", "--json", **SCALE))


def test_a_scheduler_scales_what_workers_report_and_all_can_see_it(desk: Desk) -> None:
    shop = sys.modules["shop"]
    nothing = desk("autoscale", "status", **SCALE)
    assert nothing.startswith(
        "nothing is scaled: it takes the setting autoscale or prioritise, and a Scheduler"
    )
    with (
        Serving(
            "-A", "shop", "worker", "start", "--name", "w", "--concurrency", "2", cwd=desk.folder, env=SCALE
        ) as one,
        Serving("-A", "shop", "scheduler", "start", "--name", "s", cwd=desk.folder, env=SCALE) as scheduler,
    ):
        one.ready()
        jobs = shop.app.send_many([shop.stuck.s() for _ in range(9)])
        until(lambda: scheduler.logged("autoscale:not-applied"))
        until(lambda: one.logged("prefetch:set"))
        until(lambda: status(desk)["course"]["workers"] == 3)
        found = status(desk)
        assert (found["jobs"], found["needed"], found["course"]["prefetch"]) == (9, 5, 2.0)
        text = desk("autoscale", "status", **SCALE)
        words = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}
        assert (words["jobs"], words["workers"], words["needed"]) == ("9", "1", "5")
        assert words["wanted"] == "3, from 1 to 3"
        assert words["prefetch"] == "2 for default"
        assert " by s:" in words["decided"]
        assert "3, from 1 to 3" in desk("info", **SCALE)
        assert json.loads(desk("info", "--json", **SCALE))["scaling"]["maximum"] == 3
        for job in jobs:
            job.revoke()
        scheduler.signal(signal.SIGTERM)
        assert scheduler.ended().code == 0
        for command_line in ("autoscale", "status"), ("info",):
            assert "no Scheduler is running: nothing is scaled now" in desk(*command_line, **SCALE)


def test_settings_that_make_no_sense_end_a_scheduler_with_one_line(desk: Desk) -> None:
    for name, value, says in (
        ("CELERY5_AUTOSCALE", "minimum=3 maximum=1", "the minimum, 3, is over the maximum, 1"),
        ("CELERY5_AUTOSCALE", "maximum=1 strategy=nowhere:mine", "strategy 'nowhere:mine' cannot be loaded"),
        ("CELERY5_PRIORITISE", "shortset", "did you mean 'shortest'?"),
        ("CELERY5_PRIORITISE", "shop:app", "name a function"),
    ):
        ended = celery5("-A", "shop", "scheduler", "start", cwd=desk.folder, env={name: value})
        assert ended.code != 0
        assert says in ended.error
