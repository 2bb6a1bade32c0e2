"""Command line: what each command does, as a person at a terminal sees it.

Floor: tests. Reads: what the commands print. Writes: jobs, for real worker processes.
"""

import json
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import trio

import celery5 as package
from celery5 import App, BrokerUnavailable, JobState, TaskFailed, default_app
from celery5.cli.boundary import explained
from celery5.cli.loading import CannotLoad, load_app
from tests.story.commands import Serving, celery5

SHOP = """
import os
from celery5 import App, current_job

app = App({name!r}, broker={url!r}, grace_period=5)

@app.task
async def add(a: int, b: int) -> int:
    return a + b

@app.task(queue="slow")
def multiply(a: int, b: int) -> int:
    return a * b

@app.task(max_retries=2, backoff=0.1)
async def moody() -> int:
    if current_job().attempt < 3:
        raise ConnectionError("not now")
    return current_job().attempt

@app.task(max_retries=0)
async def hopeless() -> None:
    raise ValueError("never")

@app.task
def whose() -> int:
    return os.getpid()
"""


class Desk:
    """A folder with the application `shop`, and this process' own handle of it."""

    def __init__(self, folder: Path, app: App) -> None:
        self.folder = folder
        self.app = app

    def __call__(self, *words: object, **env: str) -> str:
        """What the command prints; it must go well."""
        ended = celery5("-A", "shop", *words, cwd=self.folder, env=env)
        assert (ended.code, ended.err) == (0, "")
        return ended.out


@pytest.fixture
def desk(
    tmp_path: Path, app_name: str, url: str, fresh_modules: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name, url=url))
    monkeypatch.chdir(tmp_path)
    app = load_app("shop")
    yield Desk(tmp_path, app)
    app.close()


@pytest.fixture
def fresh_modules() -> Iterator[None]:
    """Forgets what the test has imported, and its folder on the import path."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if not name.startswith("celery5."):
            del sys.modules[name]


# Which application


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        ("shop", None, "no module 'shop'"),
        ("shop.deep", None, "no module 'shop.deep': 'shop' was not found"),
        ("shop.py", "", "it takes a module, not a file: -A shop"),
        ("./sub/shop.py", "", "it takes a module, not a file: -A sub.shop"),
        (":app", "", "write module or module:app"),
        ("shop:", "", "write module or module:app"),
        ("shop..deep", "", "write module or module:app"),
        ("shop:ap", "from celery5 import App\napp = App('x')", "did you mean shop:app?"),
        ("shop:zzz", "from celery5 import App\napp = App('x')", "its applications: shop:app"),
        ("shop:other", "other = 7", "shop:other is a int, not a celery5 App"),
        ("shop:App", "from celery5 import App", "shop:App is a class, not a celery5 App"),
        ("shop", "x = 1", "has no celery5 App and no tasks"),
        ("shop", "from celery5 import App\na = App('a')\nb = App('b')", "say which: -A shop:a or -A shop:b"),
        ("shop", "import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' (HERE:1)"),
        ("shop", "\n{}['key']", "KeyError: 'key' (HERE:2)"),
        ("shop", "import json\njson.loads('{')", "(HERE:2)"),
        ("shop", "def (:", "SyntaxError: invalid syntax (HERE:1)"),
        ("shop", "raise SystemExit('no')", "fails while it is imported: SystemExit: no (HERE:1)"),
        ("shop", "from celery5 import App\napp = App('a b')", "application name 'a b'"),
        ("shop", "from celery5 import App\napp = App('a', include=['no_such'])", "No module named 'no_such'"),
    ],
)
@pytest.mark.usefixtures("fresh_modules")
def test_what_is_no_application_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, source: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        (tmp_path / "shop.py").write_text(source)
    with pytest.raises(CannotLoad) as caught:
        load_app(target)
    assert said.replace("HERE", str(tmp_path / "shop.py")) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["shop", "shop:app", "shop:inside.app"])
@pytest.mark.usefixtures("fresh_modules")
def test_an_application_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "shop.py").write_text(
        textwrap.dedent("""
            from celery5 import App, task

            app = App("found")

            class inside:
                app = app

            @task
            async def free() -> None: ...
        """)
    )
    monkeypatch.chdir(tmp_path)
    app = load_app(target)
    assert app.name == "found"
    assert list(app.tasks) == ["shop.free"]


@pytest.mark.usefixtures("fresh_modules")
def test_free_tasks_without_an_application_belong_to_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely.py").write_text("from celery5 import task\n@task\ndef one() -> int: return 1")
    monkeypatch.chdir(tmp_path)
    app = load_app("lonely")
    assert app is default_app()
    assert "lonely.one" in app.tasks


def test_the_application_is_named_by_a_flag_or_by_the_environment(desk: Desk) -> None:
    flag = celery5("-A", "shop:app", "queue", "list", cwd=desk.folder)
    environment = celery5("queue", "list", cwd=desk.folder, env={"CELERY5_APP": "shop"})
    neither = celery5("queue", "list", cwd=desk.folder)
    assert (
        (flag.code, flag.out)
        == (environment.code, environment.out)
        == (0, "no queues yet: nothing was sent\n")
    )
    assert neither.code == 2
    assert (
        neither.error == "Error: which application? write celery5 -A module[:app] COMMAND, or set CELERY5_APP"
    )


# Words alone


def test_the_version(tmp_path: Path) -> None:
    assert celery5("--version", cwd=tmp_path).out == f"celery5 {package.__version__}\n"


def test_no_command_shows_the_commands(tmp_path: Path) -> None:
    ended = celery5(cwd=tmp_path)
    assert ended.code == 2
    for command in ("worker", "controller", "queue", "task", "dlq", "demo"):
        assert f"\n  {command} " in ended.err


@pytest.mark.parametrize(
    "words", ["worker", "no-such-command", "worker start --no-such-flag", "worker start --processes 0"]
)
def test_what_is_no_command_exits_with_2_and_says_where_help_is(tmp_path: Path, words: str) -> None:
    ended = celery5(*words.split(), cwd=tmp_path)
    assert ended.code == 2
    assert ended.error.startswith("Error: ")
    assert "--help'" in ended.error


def test_help_imports_neither_trio_nor_redis(tmp_path: Path) -> None:
    script = (
        "import sys; from celery5.cli.boundary import guarded; from celery5.cli.main import cli;"
        "guarded(lambda: cli.main(['worker', 'start', '--help'], standalone_mode=False));"
        "print([name for name in ('trio', 'redis', 'asyncio', 'rich', 'eliot') if name in sys.modules])"
    )
    ended = celery5(cwd=tmp_path, command=(sys.executable, "-c", script))
    assert ended.out.splitlines()[-1] == "[]"


def test_the_controller_is_there_for_development_only(desk: Desk) -> None:
    ended = celery5("-A", "shop", "controller", "start", cwd=desk.folder)
    assert ended.code == 2
    assert "add --development" in ended.error


def test_the_first_error_of_ours_inside_a_group_is_what_counts() -> None:
    inner = ExceptionGroup("nursery", [BrokerUnavailable("redis\nis away"), ValueError("bug")])
    assert explained(ExceptionGroup("nursery", [inner])) == ("Error: redis is away", 1)
    assert explained(BaseExceptionGroup("nursery", [KeyboardInterrupt()])) == ("Interrupted.", 130)
    assert explained(click.UsageError("what?")) == ("Error: what?", 2)
    assert explained(ValueError("a bug shows its traceback")) is None
    assert explained(ExceptionGroup("nursery", [trio.ClosedResourceError()])) is None


# Serving


def test_a_burst_ends_when_all_is_done(desk: Desk) -> None:
    shop = sys.modules["shop"]
    sums = desk.app.send_many([shop.add.s(number, 1) for number in range(100)])
    product, retried = shop.multiply.delay(6, 7), shop.moody.delay()
    later = shop.add.options(countdown=0.5).delay(20, 22)
    out = desk("worker", "start", "--burst")
    assert [each.get(timeout=0.1) for each in sums] == list(range(1, 101))
    assert (product.get(timeout=0.1), retried.get(timeout=0.1), later.get(timeout=0.1)) == (42, 3, 42)
    kinds = [json.loads(line).get("message_type") for line in out.splitlines()]
    assert kinds.count("celery5:job") == 105, "100 sums, a product, 3 attempts, and one that was scheduled"


def test_a_burst_of_several_processes(desk: Desk) -> None:
    shop = sys.modules["shop"]
    results = desk.app.send_many([shop.add.s(number, 1) for number in range(500)])
    out = desk("worker", "start", "--burst", "--processes", 2, "--concurrency", 4)
    assert [each.get(timeout=0.1) for each in results] == list(range(1, 501))
    ready = [line for line in out.splitlines() if '"celery5:worker:ready"' in line]
    assert len(ready) == 2


def test_a_burst_of_chosen_queues_leaves_the_others_alone(desk: Desk) -> None:
    shop = sys.modules["shop"]
    total, product = shop.add.delay(1, 2), shop.multiply.delay(6, 7)
    desk("worker", "start", "--burst", "--queues", "slow, slow")
    assert product.get(timeout=0.1) == 42
    assert total.status() is JobState.SENT


def test_flags_win_over_the_environment_and_that_over_the_default(desk: Desk, url: str) -> None:
    desk.folder.joinpath("told.py").write_text(
        textwrap.dedent(f"""
            from celery5 import App
            app = App({desk.app.name!r})

            @app.task(name="told")
            def told() -> list[float]:
                settings = app.settings
                return [settings.concurrency, settings.cpu_slots, settings.grace_period]
        """)
    )
    result = desk.app.task(name="told")(_told).delay()
    environment = {
        "CELERY5_CONCURRENCY": "7",
        "CELERY5_CPU_SLOTS": "3",
        "CELERY5_BROKER": "redis://127.0.0.1:1",
    }
    flags = ("--cpu-slots", 2, "--grace-period", 1.5, "--broker", url, "--burst", "--name", "teller")
    ended = celery5("-A", "told", "worker", "start", *flags, cwd=desk.folder, env=environment)
    assert (ended.code, ended.err) == (0, "")
    assert result.get(timeout=0.1) == [7, 2, 1.5]
    assert '"teller"' in ended.out


def _told() -> list[float]:
    return []


def test_people_may_have_another_log(desk: Desk) -> None:
    sys.modules["shop"].add.delay(1, 2)
    out = desk("worker", "start", "--burst", "--log-format", "console")
    assert "state=SUCCESS" in out
    assert "{" not in out
    sys.modules["shop"].add.delay(1, 2)
    assert (
        desk("worker", "start", "--burst", "--log-level", "error", "--log-format", "console").count("\n") <= 2
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_worker_in_order(desk: Desk, number: signal.Signals, processes: int) -> None:
    words = ("-A", "shop", "worker", "start", "--processes", processes)
    with Serving(*words, cwd=desk.folder) as worker:
        worker.ready(processes)
        sys.modules["shop"].add.delay(1, 2).get()
        worker.signal(number)
        ended = worker.ended()
    assert (ended.code, ended.err) == (0, "")
    assert len(worker.logged("worker:stopped")) == processes


def test_the_development_controller_brings_its_own_server_and_takes_it_away(
    desk: Desk, tmp_path: Path
) -> None:
    words = ("-A", "shop", "controller", "start", "--development")
    with Serving(*words, cwd=desk.folder) as controller:
        controller.ready()
        said = controller.err
        assert said.startswith("producers reach this server with CELERY5_BROKER='unix:///")
        own = said.split("'")[1]
        socket = Path(own.removeprefix("unix://").partition("?")[0])
        desk.app.use_broker(own)
        assert sys.modules["shop"].whose.delay().get() == controller.process.pid
        desk.app.close()
        controller.signal(signal.SIGINT)
        assert controller.ended().code == 0
    assert not socket.parent.exists()


# Looking


def test_queues_and_their_jobs(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.send_many([shop.add.s(1, 2), shop.add.options(countdown=60).s(1, 2), shop.multiply.s(2, 3)])
    rows = json.loads(desk("queue", "list", "--json"))
    assert rows == [
        {"queue": "default", "waiting": 1, "running": 0, "scheduled": 1, "dead": 0},
        {"queue": "slow", "waiting": 1, "running": 0, "scheduled": 0, "dead": 0},
    ]
    assert desk("queue", "list").splitlines()[1].split() == ["default", "1", "0", "1", "0"]


def test_one_job_and_the_dead_letter_queue(desk: Desk) -> None:
    shop = sys.modules["shop"]
    good, waiting, bad = shop.add.delay(1, 2), shop.multiply.delay(2, 3), shop.hopeless.delay()
    assert desk("dlq", "read") == "no dead jobs\n"
    desk("worker", "start", "--burst", "--queues", "default")
    shown = json.loads(desk("task", "show", good.id, "--json"))
    assert (shown["state"], shown["value"], shown["queue"]) == ("SUCCESS", 3, "default")
    assert json.loads(desk("task", "show", waiting.id, "--queue", "slow", "--json"))["state"] == "SENT"
    assert "SUCCESS" in desk("task", "show", good.id)
    with pytest.raises(TaskFailed):
        bad.get(timeout=1)
    (dead,) = json.loads(desk("dlq", "read", "--json"))
    assert (dead["job"], dead["task"], dead["reason"]) == (bad.id, "shop.hopeless", "exhausted")
    assert dead["error"] == "ValueError: never"
    assert "ValueError: never" in desk("dlq", "read", "--queue", "default")


def test_a_job_of_which_nothing_is_known(desk: Desk) -> None:
    ended = celery5("-A", "shop", "task", "show", "nobody", cwd=desk.folder)
    assert ended.code == 1
    assert ended.error.startswith("Error: nothing is known of job 'nobody' on queue 'default'")
