"""The doctor command: what it prints, and its exit code."""

import json
import re
import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.process.recycling import RESTART_EXIT_CODE, SUPERVISED_VARIABLE
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.cli.commands import Serving, celery5, until

NEWER = (
    sys.executable,
    "-c",
    "import celery5; celery5.__version__ = '9.9'; from celery5.cli.main import main; main()",
)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(
        'from celery5 import App\napp = App("shop")\n@app.task\ndef add(a: int) -> int:\n    return a\n'
    )
    return tmp_path


def test_all_is_well_with_a_worker_that_lives_and_keys(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    assert celery5("-A", "shop", "keys", "new", cwd=shop, env=env).code == 0
    with Serving("-A", "shop", "worker", "start", cwd=shop, env=env) as worker:
        worker.ready()
        said = celery5("-A", "shop", "doctor", "--json", cwd=shop, env=env)
        assert (said.code, said.err) == (0, ""), said
        found = {entry["check"]: entry for entry in json.loads(said.out)}
        assert found["workers"]["summary"].startswith("1 live, of version ")
        assert found["application"]["summary"] == "shop, 1 task"
        assert found["certificates"]["state"] == "ok"
        checks = "application settings server persistence memory clock latency permissions keys"
        assert list(found)[:9] == checks.split()

        newer = celery5("-A", "shop", "doctor", cwd=shop, env=env, command=NEWER)
        assert newer.code == 0
        assert "not of version 9.9" in newer.out
        assert "restart them: celery5 -A shop worker shutdown --to " in newer.out
        assert newer.out.splitlines()[-1].endswith(" 0 fail")

        with closing(App("shop", broker=own_server.url)) as app:
            app.task(name="shop.add", queue="elsewhere")(len).delay("a")
        unread = celery5("-A", "shop", "doctor", cwd=shop, env=env)
        assert "1 live, and jobs wait on queues that none of them reads: elsewhere" in unread.out


def test_doctor_and_info_name_a_worker_that_is_being_recycled(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    limits = {SUPERVISED_VARIABLE: "1", "CELERY5_MAX_JOBS": "1"}
    with (
        closing(App("shop", broker=own_server.url)) as app,
        Serving("-A", "shop", "worker", "start", "--name", "w-1", cwd=shop, env=env | limits) as worker,
    ):
        worker.ready()

        @app.task(name="shop.add")
        def add(a: int) -> int:
            return a

        assert add.delay(1).get(timeout=30) == 1
        assert worker.process.wait(30) == RESTART_EXIT_CODE
    examined = celery5("-A", "shop", "doctor", "--json", cwd=shop, env=env)
    finding = next(entry for entry in json.loads(examined.out) if entry["check"] == "workers")
    assert (finding["state"], finding["summary"]) == ("ok", "w-1 is being recycled: its next process starts")
    assert re.search(r"(?m)^recycling +w-1$", celery5("-A", "shop", "info", cwd=shop, env=env).out)
    assert json.loads(celery5("-A", "shop", "info", "--json", cwd=shop, env=env).out)["recycling"] == "w-1"


def test_jobs_that_died_in_the_last_day_are_counted_by_cause(own_server: EmbeddedServer, shop: Path) -> None:
    env = {"CELERY5_BROKER": own_server.url}

    def find() -> dict[str, str]:
        said = celery5("-A", "shop", "doctor", "--json", cwd=shop, env=env)
        return next(entry for entry in json.loads(said.out) if entry["check"] == "dead jobs")

    with closing(App("shop", broker=own_server.url)) as app, redis.Redis.from_url(own_server.url) as client:
        assert (find()["state"], find()["summary"]) == ("ok", "none of the last day")
        add_dead_letters(app, client, "a", "b")
        add_dead_letters(app, client, "c", error="OSError")
        found = find()
        assert found["state"] == "warn"
        assert found["summary"] == (
            "3 of the last day: 2 of shop.t (ValueError: ValueError of shop.t), "
            "1 of shop.t (OSError: OSError of shop.t)"
        )
        assert found["remedy"].startswith("celery5 -A shop dlq groups shows each cause")
        add_dead_letters(app, client, "d", error="KeyError")
        add_dead_letters(app, client, "e", error="TypeError")
        assert find()["summary"].endswith(" and 1 more")
        for job, message in (
            ("f", "'LIS-1'"),
            ("g", "'LIS-2' password=hunter2"),
            ("h", "'LIS-3' password=hunter3"),
        ):
            add_dead_letters(
                app, client, job, "1" + job, "2" + job, error="KeyError", message_of_error=message
            )
        summary = find()["summary"]
        assert "LIS-3" in summary, "the newest of those that the pattern makes one"
        assert "hunter" not in summary


def test_its_advice_is_a_command_that_works_as_it_is_printed(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    with (
        closing(App("shop", broker=own_server.url)) as app,
        Serving("-A", "shop", "worker", "start", cwd=shop, env=env) as worker,
    ):
        worker.ready()
        handle = app.task(name="shop.add", queue="elsewhere")(len).options(countdown=0.1).delay("a")
        said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
        line = next(line for line in said.out.splitlines() if line.strip().startswith("celery5 "))
        words = shlex.split(line.partition(";")[0])
        assert words == ["celery5", "-A", "shop", "worker", "start", "--queues", "elsewhere"]
        with Serving(*words[1:], cwd=shop, env=env):
            until(lambda: handle.status() in ("HELD", "DEAD", "SUCCESS"))
    # With the application in the environment nothing is to be added.
    said = celery5("doctor", cwd=shop, env=env | {"CELERY5_APP": "shop"})
    remedies = [line.strip().partition(";")[0] for line in said.out.splitlines()]
    assert "celery5 worker start" in remedies, said.out


def test_it_starts_no_worker_that_would_end_the_jobs_of_other_code(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    with closing(App("shop", broker=own_server.url)) as app:
        app.task(name="billing.bill", queue="billing")(len).delay("a")
        app.task(name="billing.later", queue="later")(len).options(countdown=1000).delay("a")
        app.task(name="shop.add", queue="own")(len).options(countdown=1000).delay("a")
    found = json.loads(celery5("-A", "shop", "doctor", "--json", cwd=shop, env=env).out)
    remedy = next(finding["remedy"] for finding in found if finding["check"] == "workers")
    assert remedy.startswith("celery5 -A shop worker start --queues own;"), remedy
    assert "for billing start a worker of the code that has the task billing.bill" in remedy
    assert "for later start a worker of the code that has the task billing.later" in remedy


def test_periodic_tasks_without_a_scheduler_are_not_well(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    with (shop / "shop.py").open("a") as file:
        file.write('@app.task(schedule="0 3 * * *")\ndef clean_up() -> None: ...\n')
    with Serving("-A", "shop", "worker", "start", cwd=shop, env=env) as worker:
        worker.ready()
        said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
        assert "1 live, and no Scheduler: periodic tasks" in said.out
        with Serving("-A", "shop", "scheduler", "start", cwd=shop, env=env) as scheduler:
            until(lambda: scheduler.logged("scheduler:started"))
            said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
            assert "no Scheduler" not in said.out


def test_schedules_of_other_code_are_left_to_a_scheduler_of_that_code(
    own_server: EmbeddedServer, shop: Path, tmp_path: Path
) -> None:
    """A Scheduler retires what no code of a live Scheduler declares, but for what was added while the system ran."""
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    (shop / "billing.py").write_text(
        'from celery5 import App\napp = App("shop")\n'
        '@app.task(schedule="0 3 * * *")\ndef close() -> None: ...\n'
    )
    with Serving("-A", "shop", "worker", "start", cwd=shop, env=env) as worker:
        worker.ready()
        with closing(App("shop", broker=own_server.url)) as app:
            app.schedule.add(app.task(name="shop.add")(len).s("a"), "0 4 * * *", name="at-four")
        said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
        assert "1 live, and no Scheduler: periodic tasks" in said.out
        assert "celery5 -A shop scheduler start" in said.out
        with Serving("-A", "billing", "scheduler", "start", cwd=shop, env=env) as scheduler:
            until(lambda: scheduler.logged("scheduler:started"))
        said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
        assert "start a Scheduler of the code that declares the schedule billing.close" in said.out
        assert "scheduler start" not in said.out
        said = celery5("-A", "billing", "doctor", cwd=shop, env=env)
        assert "celery5 -A billing scheduler start" in said.out


def test_it_exits_with_1_when_something_fails_and_says_what_to_do(shop: Path) -> None:
    env = {"CELERY5_BROKER": "unix:///nonexistent/none.sock"}
    said = celery5("-A", "shop", "doctor", cwd=shop, env=env)
    assert (said.code, said.err) == (1, "")
    assert "fail  server " in said.out
    assert "Traceback" not in said.out


def test_an_application_that_cannot_be_imported_is_a_failure_like_others(shop: Path) -> None:
    (shop / "shop.py").write_text("import nowhere_at_all\n")
    said = celery5("-A", "shop", "doctor", "--json", cwd=shop)
    assert (said.code, said.err) == (1, "")
    first, *rest = json.loads(said.out)
    assert (first["check"], first["state"]) == ("application", "fail")
    assert "nowhere_at_all" in first["summary"]
    assert [finding["check"] for finding in rest] == ["units", "python", "libraries"]

    (shop / "shop.py").write_text('from celery5 import App\napp = App("shop", broker="http://there")\n')
    said = celery5("-A", "shop", "doctor", cwd=shop)
    assert (said.code, "fail  application" in said.out) == (1, True)


def test_without_an_application_it_asks_which(tmp_path: Path) -> None:
    said = celery5("doctor", cwd=tmp_path)
    assert (said.code, said.error.startswith("Error: which application?")) == (2, True)
