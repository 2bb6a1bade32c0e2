"""Listing: `celery5 migrate` names the changes left to its user, also in a run after `--write`."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from celery5.broker.endpoint import Endpoint
from celery5.cli.standalone.migrate import migrate as migrate_command
from celery5.migration.command_lines import REDIS_PY
from celery5.migration.files.findings import ProjectReport
from celery5.migration.rewrite import migrate_project
from celery5.migration.settings.broker_urls import translate_url
from tests.pure.migration.test_rewriting import GENERAL, HEAD, migrate
from tests.story.migrating.projects import PROJECTS, unpack

APP = """
from celery import Celery

app = Celery("shop")


@app.task
def add(x, y=1): ...


"""


def list_left(report: ProjectReport) -> set[tuple[str, str, str]]:
    """Return the changes that a report leaves to its user."""
    return {
        (file.path, finding.name, finding.advice)
        for file in report.files
        for kind in ("by hand", "decide", "nothing")
        for finding in file.of_kind(kind)
    }


def write(folder: Path, report: ProjectReport) -> None:
    for file in report.files:
        if file.text:
            (folder / file.path).write_text(file.text)


def find_names(folder: Path, text: str, *, head: str = APP, name: str = "tasks.py") -> list[str]:
    """Return the names left to change in a module, and check that a run after `--write` has the same."""
    (folder / name).write_text(head + text)
    first = migrate_project(folder).report
    write(folder, first)
    again = migrate_project(folder).report
    assert list_left(again) == list_left(first)
    assert not any(file.diff for file in again.files)
    return [finding.name for file in first.files for finding in file.of_kind("by hand")]


@pytest.mark.parametrize("project", sorted(path.stem for path in PROJECTS.glob("*.txt")))
def test_second_run_lists_all_that_the_first_one_left(project: str, tmp_path: Path) -> None:
    folder = unpack(project, tmp_path / project)
    first = migrate_project(folder).report
    write(folder, first)
    again = migrate_project(folder).report
    assert list_left(again) == list_left(first)
    assert again.count("change") == 0
    assert again.notes == first.notes


KEPT = """
INSTALLED_APPS = ["shop", "celery5.contrib.django"]
CELERY_BROKER_URL = "redis://localhost:1/0"
CHANNELS = {"hosts": [CELERY_BROKER_URL]}
CELERY_TASK_ALWAYS_EAGER = False
SHOWN = CELERY_TASK_ALWAYS_EAGER
CELERY_TASK_TIME_LIMIT = 20
"""


def test_setting_that_another_one_uses_is_written_once_however_often_it_runs(tmp_path: Path) -> None:
    names = find_names(tmp_path, KEPT, head="", name="settings.py")
    text = (tmp_path / "settings.py").read_text()
    assert names == []
    assert text.count('CELERY5 = {"broker": CELERY_BROKER_URL}\n') == 1
    assert text.endswith('\nSHOWN = CELERY_TASK_ALWAYS_EAGER\nCELERY5["time_limit"] = 20\n')
    (tmp_path / "settings.py").write_text(f"{text}CELERY_RESULT_EXPIRES = 60\n")
    report = migrate_project(tmp_path).report
    write(tmp_path, report)
    assert (tmp_path / "settings.py").read_text() == f'{text}CELERY5["results_ttl"] = 60\n'


def test_setting_above_the_dictionary_of_settings_is_named_as_an_item_would_be_lost(tmp_path: Path) -> None:
    text = 'INSTALLED_APPS = []\nCELERY_TASK_TIME_LIMIT = 20\nCELERY5 = {"broker": "redis://localhost:1/0"}\n'
    assert find_names(tmp_path, text, head="", name="settings.py") == ["CELERY_TASK_TIME_LIMIT"]
    assert (tmp_path / "settings.py").read_text() == text


LEFT: list[tuple[str, list[str]]] = [
    (
        "from celery import Task\nclass Own(Task):\n    client = None\n\n@app.task(base=Own)\ndef a(): ...\n",
        ["base", "class Own(Task)"],
    ),
    ("@app.task(bind=True)\ndef a(self): self.client.pay()\n", ["self.client"]),
    (
        "@app.task(bind=True)\ndef a(self): print(self.request, self.max_retries)\n",
        ["self.max_retries", "self.request"],
    ),
    ("@app.task(bind=True)\ndef a(self): add_up(self)\n", ["add_up(self)"]),
    ("@app.task(bind=True)\ndef a(self): self.retry(countdown=1, **more)\n", ["retry(**options)"]),
    ("@app.task(priority=3, ignored=1, **more)\ndef a(): ...\n", ["**options", "ignored", "priority"]),
    ("from celery.result import AsyncResult\nprint(AsyncResult('x').ready())\n", ["result.ready()"]),
    ("from celery.result import AsyncResult\nprint(AsyncResult('x').info)\n", ["result.info"]),
    ("from celery import chain\nchain([add.s(1), add.si(2)])()\n", ["si in a list"]),
    ("from celery import group\ngroup(add.s(1)).apply_async(link_error=app)\n", ["link_error"]),
    ("from celery import chain\nchain(add.s(1), queue='q')\n", ["chain(queue=)"]),
    ("app.conf.task_always_eager = True\n", ["task_always_eager"]),
    ("app.conf.beat_schedule = {'a': make()}\n", ["beat_schedule"]),
    (
        "from celery.schedules import crontab\napp.conf.beat_schedule.update({'a': entry, 'b': crontab()})\n",
        ["beat_schedule", "import of crontab"],
    ),
    ("app.conf.beat_schedule['x'] = {'task': 't', 'schedule': 3}\n", ["beat_schedule"]),
    ("app.conf.beat_scheduler = 'django_celery_beat.schedulers:DatabaseScheduler'\n", ["beat_scheduler"]),
    ("add.s(1).delay(2)\n", ["delay(...) of a signature"]),
    ("~add.s(1)\n", ["~ of a signature"]),
    ("then = add.s(1)\nthen.set(countdown=3)\n", ["set"]),
    ("print(add.request.id, add.max_retries)\n", ["add.max_retries", "add.request"]),
    ("from celery import chord\nchord([add.s(1)])(add.s(), countdown=3)\n", ["a signature that is called"]),
    ("with app.connection_for_write(): ...\n", []),
    ("app.steps['worker'].add(Step)\n", ["app.steps"]),
    ("with app.events.State() as state: ...\n", ["app.events"]),
    ("app.conf.task_routes = (route, {'shop.*': {'queue': 'a'}})\n", ["task_routes"]),
    ("app.conf.task_routes = 'shop.routers.route'\n", ["task_routes"]),
    ("app.conf.task_default_rate_limit = '0.5/m'\n", ["task_default_rate_limit"]),
    ("from celery.exceptions import Reject\nraise Reject('no', requeue=True)\n", ["Reject(requeue=)"]),
    ("from celery.exceptions import Retry\nraise Retry('no', error, 5)\n", ["Retry(...)"]),
    (
        "from celery.exceptions import MaxRetriesExceededError\nraise MaxRetriesExceededError()\n",
        ["raise MaxRetriesExceededError"],
    ),
    (
        "from celery_once import QueueOnce\n@app.task(base=QueueOnce, once={'keys': ['a']})\ndef a(): ...\n",
        ["base=QueueOnce", "import of QueueOnce from celery_once", "once"],
    ),
    ("@app.task(on_failure=note)\ndef a(): ...\n", ["on_failure"]),
    ("x = add.s(1)\nx |= add.s()\nx(3)\n", ["a signature that is called"]),
    ("add.s(1).freeze(); add.s(1).stamp(a=1)\n", ["freeze() of a signature", "stamp() of a signature"]),
    ("add.rate_limit = '5/m'\nprint(add.priority)\n", ["add.priority", "add.rate_limit"]),
    ("i = app.control.inspect()\ni.reserved()\n", ["control.inspect", "inspect.reserved()"]),
    ("app.add_periodic_task(9.0, add.s(1), name='x', expires=9)\n", ["add_periodic_task"]),
    ("async def view(): add.apply_async((1,), countdown=3)\n", ["delay in async def"]),
    ("app.send_task('other.task', (1,))\n", ['the task "other.task"']),
    (
        "from celery import current_app\ncurrent_app.control.inspect()\n",
        ["control.inspect", "import of current_app"],
    ),
]


@pytest.mark.parametrize(("text", "names"), LEFT)
def test_what_is_left_is_named_before_and_after_the_writing(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    assert sorted(find_names(tmp_path, text)) == names


HANDLERS = [
    "class Own(Task):\n    def on_failure(self, *words): ...\n\n@app.task(base=Own)\ndef one(): ...",
    "@app.task(on_failure=add)\ndef one(): ...",
]


@pytest.mark.parametrize("declared", HANDLERS)
@pytest.mark.parametrize(
    "call",
    [
        "one.apply_async((), link_error=add.s())",
        "one.s().set(link_error=add.s())",
        "one.signature((), link_error=add.s())",
        "app.send_task('tasks.one', link_error=add.s())",
    ],
)
def test_task_with_a_handler_and_link_error_is_told_how_to_have_both(
    tmp_path: Path, declared: str, call: str
) -> None:
    find_names(tmp_path, f"from celery import Task\n{declared}\n\n{call}\n")
    uses = [use for file in migrate_project(tmp_path).report.files for use in file.of_kind("by hand")]
    (use,) = [use for use in uses if use.name == "link_error"]
    assert use.advice.startswith(
        "options(on_failure=task) for link_error, and Middleware.running for what on_failure of one did"
    )


def test_reject_without_requeue_and_options_of_a_periodic_task_are_kept(tmp_path: Path) -> None:
    text = """
from celery.exceptions import Reject


@app.task
def one(): raise Reject("no", requeue=False)


app.add_periodic_task(9.0, one.s(1), name="x", expires=9, queue="q")
"""
    report = migrate(tmp_path, text)
    assert 'raise Reject("no")\n' in report.text
    (use,) = [use for use in report.of_kind("by hand") if use.name == "add_periodic_task"]
    assert use.advice.startswith('app.schedule(one.options(expires=9, queue="q").s(1), 9.0, name="x")')


def test_task_of_celery5_is_left_as_its_authors_wrote_it(tmp_path: Path) -> None:
    text = """
from celery5 import App, task, chain
app = App("shop")

@app.task(bind=True, max_retries=5, priority="high", on_failure=None)
def add(self, x):
    print(self.run_id, self.sections)

@task(autoretry_for=(OSError,))
def total(x): ...

print(add.delay(1).get(), app.result("x").status(), chain(add.s(1), total.s()).start().get())
app.control.send("stats")
celery = "the word"
"""
    (tmp_path / "tasks.py").write_text(text)
    report = migrate_project(tmp_path).report
    assert [report.count(kind) for kind in ("change", "by hand", "nothing")] == [0, 0, 0]


ERRBACKS = [
    "add.apply_async((1,), link_error=fail.s())",
    "add.apply_async((1,), link_error=[fail.s(), other])",
    "add.s(1).on_error(fail.s())",
    "add.s(1).link_error(fail.s('x'))",
    "from celery import chain\nchain(add.s(1)).apply_async(link_error=app.signature('shop.fail'))",
    "then = fail.s()\nadd.apply_async((1,), link_error=then)",
    "add.options(on_failure=fail).delay(1)",
]


@pytest.mark.parametrize("use", ERRBACKS)
@pytest.mark.parametrize(
    ("decorator", "parameters"),
    [("@app.task", "request, exc, traceback"), ("@app.task(bind=True)", "self, task_id")],
)
def test_task_that_is_called_with_failures_is_named(
    tmp_path: Path, use: str, decorator: str, parameters: str
) -> None:
    names = find_names(tmp_path, f"{decorator}\ndef fail({parameters}): ...\n\n{use}\n")
    assert f"fail({parameters.removeprefix('self, ')}) of link_error" in names


@pytest.mark.parametrize("parameters", ["failures", "errors: list[StepFailure]", ""])
def test_task_that_takes_failures_already_is_not_named(tmp_path: Path, parameters: str) -> None:
    text = f"@app.task\ndef fail({parameters}): ...\n\nadd.apply_async((1,), link_error=fail.s())\n"
    assert find_names(tmp_path, text) == ["link_error"]


def test_immutable_errback_is_called_with_its_own_arguments(tmp_path: Path) -> None:
    text = "@app.task\ndef fail(order): ...\n\nadd.apply_async((1,), link_error=fail.si(7))\n"
    assert find_names(tmp_path, text) == ["link_error"]


TESTS = [
    ("@override_settings(CELERY_TASK_ALWAYS_EAGER=True)\nclass Orders: ...\n", "CELERY_TASK_ALWAYS_EAGER"),
    (
        "def test_a(self):\n    with self.settings(CELERY_TASK_ALWAYS_EAGER=True): ...\n",
        "CELERY_TASK_ALWAYS_EAGER",
    ),
    ("def test_a(settings):\n    settings.CELERY_TASK_ALWAYS_EAGER = True\n", "CELERY_TASK_ALWAYS_EAGER"),
    ("@override_settings(CELERY_TASK_EAGER_PROPAGATES=True)\nclass A: ...\n", "CELERY_TASK_EAGER_PROPAGATES"),
    ("app.conf.update(task_always_eager=True)\n", "task_always_eager"),
    ("def test_a(celery_worker): ...\n", "fixture celery_worker"),
    ("@pytest.fixture\ndef celery_config(): ...\n", "fixture celery_config"),
    ("@pytest.mark.celery(result_backend='x')\ndef test_a(): ...\n", "pytest.mark.celery"),
    ("@patch.object(add, 'run')\ndef test_a(): ...\n", 'patch.object(add, "run")'),
    ("monkeypatch.setattr(add, 'retry', None)\n", 'monkeypatch.setattr(add, "retry")'),
    ("def test_a():\n    add.retry = MagicMock()\n", "add.retry = ..."),
    ("@patch('shop.tasks.add.apply_async')\ndef test_a(): ...\n", 'patch("shop.tasks.add.apply_async")'),
]


@pytest.mark.parametrize(("text", "name"), TESTS)
def test_what_tests_use_of_celery_is_named_with_the_testing_kit(tmp_path: Path, text: str, name: str) -> None:
    assert find_names(tmp_path, text, name="test_tasks.py") == [name]
    (file,) = migrate_project(tmp_path).report.files
    (finding,) = file.of_kind("by hand")
    assert any(word in finding.advice for word in ("in_memory(app)", "recorded(app)"))


EAGER = "app.conf.task_always_eager = True\n    app.conf.task_eager_propagates = False\n"


@pytest.mark.parametrize(
    "text",
    [
        f"from tasks import app\n\ndef prepare():\n    {EAGER}",
        f"import tasks\n\ndef prepare():\n    {EAGER.replace('app', 'tasks.app')}",
        "from tasks import app\napp.conf.update(task_always_eager=True, task_eager_propagates=False)\n",
        "from tasks import app\napp.conf['task_always_eager'] = True\napp.conf['task_eager_propagates'] = False\n",
    ],
)
def test_eager_mode_of_an_application_stays_as_it_is_and_is_listed(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    assert find_names(tmp_path, text, head="", name="conftest.py") == [
        "task_always_eager",
        "task_eager_propagates",
    ]
    assert (tmp_path / "conftest.py").read_text() == text


def test_eager_mode_among_other_settings_stays_in_a_statement_of_its_own(tmp_path: Path) -> None:
    text = "app.conf.update(task_always_eager=True, task_time_limit=3)\n"
    assert find_names(tmp_path, text) == ["task_always_eager"]
    assert (
        (tmp_path / "tasks.py")
        .read_text()
        .endswith("\napp.configure(time_limit=3)\napp.conf.task_always_eager = True\n")
    )


def test_signal_that_is_connected_by_a_call_or_only_imported_is_named(tmp_path: Path) -> None:
    text = "from celery.signals import task_success, task_retry\ntask_success.connect(add_up, weak=False)\n"
    assert find_names(tmp_path, text) == ["task_success.connect(add_up)", "import of task_retry"][::-1]


def test_import_of_kombu_goes_with_the_setting_that_needed_it_or_is_named(tmp_path: Path) -> None:
    text = "from kombu import Exchange, Queue\napp.conf.task_queues = [Queue('a', Exchange('a'))]\n"
    report = migrate(tmp_path, text)
    assert "kombu" not in report.text
    assert "Queue" not in report.text
    text = "from kombu.serialization import register\nregister('x')\n"
    assert find_names(tmp_path, text) == ["import of register from kombu"]


def test_options_of_a_task_that_a_function_of_the_project_makes_are_named(tmp_path: Path) -> None:
    text = """
def instrumented_task(name, silo_mode=None, **options):
    def make(function):
        return app.task(name=name, **options)(function)
    return make


@instrumented_task(name="shop.process", silo_mode=1, queue="q", acks_late=True, default_retry_delay=300, max_retries=5)
def process(x): ...


process.apply_async((1,), countdown=5)
"""
    names = find_names(tmp_path, text)
    assert names == [
        "app.task(...) in a function",
        "instrumented_task(acks_late=)",
        "instrumented_task(default_retry_delay=)",
    ]
    assert "process.options(countdown=5).delay(1)" in (tmp_path / "tasks.py").read_text()


def test_options_that_a_base_class_gives_its_tasks_are_named_as_options(tmp_path: Path) -> None:
    text = (
        "from celery import Task\nclass Own(Task):\n    autoretry_for = (OSError,)\n    retry_kwargs = {}\n"
    )
    assert find_names(tmp_path, text) == ["class Own(Task)"]
    (found,) = (use for file in migrate_project(tmp_path).report.files for use in file.of_kind("by hand"))
    assert "; autoretry_for, retry_kwargs: an option of each task: keep those" in found.advice


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "@app.task(autoretry_for=(OSError,))",
            "@app.task(autoretry_for=(OSError,), max_retries=3, backoff=180, cap=180, jitter=False)",
        ),
        (
            "@app.task(autoretry_for=(OSError,), max_retries=0)",
            "@app.task(autoretry_for=(OSError,), max_retries=0)",
        ),
        ("@app.task(max_retries=None)", "@app.task(max_retries=1000, dont_autoretry_for=[Exception])"),
    ],
)
def test_delay_and_number_of_retries_stay_as_with_celery(tmp_path: Path, before: str, after: str) -> None:
    report = migrate(tmp_path, f"{before}\ndef one(): ...\n", head=HEAD)
    assert f"{after}\ndef one(): ...\n" in (report.text or HEAD + before + "\ndef one(): ...\n")
    assert not report.of_kind("by hand")


def test_retry_without_a_countdown_waits_as_with_celery(tmp_path: Path) -> None:
    report = migrate(tmp_path, "@app.task(bind=True)\ndef one(self): raise self.retry()\n")
    assert "backoff=180,\n    cap=180,\n    jitter=False," in report.text


TWICE = """
from celery import Task


class Own(Task): ...


@app.task(base=Own)
def a(): ...


@app.task(base=Own)
def b(): ...
"""


@pytest.mark.parametrize("columns", [60, 100])
def test_an_advice_is_written_once_with_its_places_in_lines_of_the_terminal(
    tmp_path: Path, columns: int
) -> None:
    for name in ("tasks.py", "more.py"):
        (tmp_path / name).write_text(APP + TWICE)
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(migrate_command, [str(tmp_path)])
    assert done.exit_code == 0
    text = done.output[done.output.index("\nto change by hand\n") :].partition("to decide\n")[0]
    assert " ".join(text.split()).count("a task is a function, not a class") == 1
    assert "  more.py:18, 22  base\n  tasks.py:18, 22  base\n      middleware (App(" in text
    assert max(map(len, text.splitlines()[:-1])) <= columns  # without the summary


def test_project_whose_app_is_written_already_has_no_note_of_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text('from celery5 import App\n\nshop: App = App("shop")\n')
    (tmp_path / "tasks.py").write_text("from celery import shared_task\n\n@shared_task\ndef a(): ...\n")
    assert migrate_project(tmp_path).report.notes == []


def test_requirements_of_a_django_project_name_the_extra_and_the_end_says_that_nothing_is_left(
    tmp_path: Path,
) -> None:
    (tmp_path / "requirements.txt").write_text("celery>=5\n")
    (tmp_path / "manage.py").write_text("INSTALLED_APPS = []\n")
    done = CliRunner(env={"COLUMNS": "120"}).invoke(migrate_command, [str(tmp_path)])
    extras = re.search(r"celery5\[[\w,]+\]", done.output)
    assert extras is not None
    assert extras[0] in Path("docs/guide/django.md").read_text()
    assert "without [redis]" not in done.output
    (tmp_path / "requirements.txt").write_text("celery5[django]\n")
    done = CliRunner().invoke(migrate_command, [str(tmp_path)])
    assert done.output == "nothing left to do\n"


DJANGO = "INSTALLED_APPS = []\n"


def find_notes(folder: Path, text: str, *, settings: str = "") -> list[str]:
    """Return what is to be decided in a project, each once, and check that a run after `--write` lists the same.

    A comment on each line that is listed ends it.
    """
    (folder / "tasks.py").write_text(f"{APP}{text}")
    if settings:
        (folder / "manage.py").write_text(settings)
    first = migrate_project(folder).report
    write(folder, first)
    again = migrate_project(folder).report
    assert list_to_decide(again) == list_to_decide(first)
    notes = {
        use.advice: None for file in again.files for use in file.of_kind("decide") if use.name != UNANNOTATED
    }
    settle(folder, again)
    assert migrate_project(folder).report.count("decide") == 0
    return [*notes]


def list_to_decide(report: ProjectReport) -> set[tuple[str, str, str]]:
    return {(file.path, use.name, use.advice) for file in report.files for use in file.of_kind("decide")}


UNANNOTATED = "parameters without annotations"


def settle(folder: Path, report: ProjectReport) -> None:
    """Write the comment of a decision at the end of each line that is listed as one to decide."""
    for file in report.files:
        lines = (folder / file.path).read_text().split("\n")
        for number in {use.line for use in file.of_kind("decide")}:
            lines[number - 1] += "  # celery5: decided"
        (folder / file.path).write_text("\n".join(lines))


@pytest.mark.parametrize("call", ["add.delay(1)", "add.apply_async((1,))", "add.delay_on_commit(1)"])
def test_project_that_sends_has_one_note_about_delay_while_redis_is_down(tmp_path: Path, call: str) -> None:
    (note,) = find_notes(tmp_path, f"{call}\n{call}\n")
    assert note.startswith("delay does not raise while Redis is down")
    assert "App(..., backlog=0) raises" in note
    (tmp_path / "tasks.py").write_text(f"{APP}{call}\n")
    uses = [use for file in migrate_project(tmp_path).report.files for use in file.of_kind("decide")]
    (line,) = [use.line for use in uses if use.name == "the backlog"]
    assert APP.split("\n")[line - 1].startswith("app = Celery(")
    (note,) = find_notes(tmp_path, f"{call}\n", settings=DJANGO)
    assert 'CELERY5["backlog"] = 0 raises' in note
    assert find_notes(tmp_path, f"{call}\n", settings=f'{DJANGO}CELERY5 = {{"backlog": 0}}\n') == []
    assert find_notes(tmp_path, f"{call}\n", settings=f'{DJANGO}CELERY5["backlog"] = 0\n') == []


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("@app.task(time_limit=9)\ndef b(): ...\n@app.task(soft_time_limit=9)\ndef c(): ...\n", ""),
        ("app.conf.task_time_limit = 9\n", ""),
        ("app.conf.update(task_soft_time_limit=9, task_time_limit=10)\n", ""),
        ("", f"{DJANGO}CELERY_TASK_TIME_LIMIT = 9\nCELERYD_TASK_SOFT_TIME_LIMIT = 8\n"),
    ],
)
def test_time_limits_of_def_tasks_have_one_note(tmp_path: Path, text: str, settings: str) -> None:
    (note,) = find_notes(tmp_path, text, settings=settings)
    assert note.startswith("time limits of def tasks raise in the thread of the job")


def test_time_limit_of_a_boxed_or_async_task_has_no_note(tmp_path: Path) -> None:
    tasks = "@app.task(time_limit=9, boxed=True)\ndef b(): ...\n@app.task(time_limit=9)\nasync def c(): ...\n"
    assert find_notes(tmp_path, tasks) == []


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("app.conf.worker_max_tasks_per_child = 1000\n", ""),
        ("app.conf.update(worker_max_memory_per_child=1000)\n", ""),
        ("", f"{DJANGO}CELERY_WORKER_MAX_TASKS_PER_CHILD = 1000\nCELERYD_MAX_MEMORY_PER_CHILD = 9\n"),
    ],
)
def test_limits_of_each_child_have_one_note_that_celery5_counts_for_the_worker(
    tmp_path: Path, text: str, settings: str
) -> None:
    (note,) = find_notes(tmp_path, text, settings=settings)
    assert note.startswith("max_jobs and max_memory count for a whole worker process")
    assert "multiply the jobs by the concurrency" in note


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("celery[redis]>=5.5,<5.6", "celery[redis]", "write celery without [redis]"),
        ("redis>=4.5,<6", "redis", REDIS_PY),
        ("redis==5.2.1", "redis", REDIS_PY),
        ("redis<8", "redis", REDIS_PY),
    ],
)
def test_requirements_of_a_too_old_redis_py_are_listed(
    tmp_path: Path, line: str, name: str, words: str
) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    for text in (line, "redis>=5", "redis>=8,<9", "redis!=5.0.2"):
        (tmp_path / "requirements.txt").write_text(f"{text}\n")
        reports = [file for file in migrate_project(tmp_path).report.files if file.path == "requirements.txt"]
        found = [(use.name, words in use.advice) for file in reports for use in file.of_kind("by hand")]
        assert found == ([(name, True)] if text == line else [])
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert (
        Requirement(REDIS_PY).specifier
        == Requirement(next(text for text in project["dependencies"] if text.startswith("redis"))).specifier
    )


def test_modules_that_import_celery_are_named_until_none_does(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    (tmp_path / "signals.py").write_text("from celery.signals import task_failure\n")
    for arguments in ([str(tmp_path)], [str(tmp_path), "--write", "--backup"]):
        lines = CliRunner(env={"COLUMNS": "120"}).invoke(migrate_command, arguments).output.splitlines()
        assert lines[-2].startswith("note: keep celery installed while")
        assert lines[-2].endswith("import it: signals.py")
    (tmp_path / "signals.py").write_text("from celery.signals import task_failure  # celery5: decided\n")
    (tmp_path / "requirements.txt").write_text("celery\n")
    assert "keep celery" not in CliRunner().invoke(migrate_command, [str(tmp_path)]).output


def test_last_line_says_that_nothing_is_left_to_do(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    (tmp_path / "manage.py").write_text("INSTALLED_APPS = ['celery5.contrib.django']\n")
    write(tmp_path, migrate_project(tmp_path).report)
    left = CliRunner().invoke(migrate_command, [str(tmp_path)]).output
    assert "keep celery" not in left
    assert left.endswith("nothing left to change, 1 to decide\n")
    (tmp_path / "tasks.py").write_text(f"# celery5: decided\n{(tmp_path / 'tasks.py').read_text()}")
    done = CliRunner().invoke(migrate_command, [str(tmp_path)])
    assert (done.output, done.exit_code) == ("nothing left to do\n", 0)
    fields = json.loads(CliRunner().invoke(migrate_command, [str(tmp_path), "--json"]).output)
    assert [fields[name] for name in ("changes", "by_hand", "to_decide", "no_counterpart", "notes")] == [
        0,
        0,
        0,
        0,
        [],
    ]


MOVED = """
import datetime as dt
from datetime import datetime
from uuid import uuid4

from celery import Celery
from django.utils import timezone

app = Celery("shop")


@app.task(bind=True)
def moved(self, pk, old_time, by="", key: str = ""): ...


"""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("moved.delay(1, datetime(2026, 1, 1))", "datetime for moved(old_time)"),
        ("moved.delay(1, old_time=datetime.now().date())", "date for moved(old_time)"),
        ("moved.apply_async((1, timezone.now() + dt.timedelta(1)))", "datetime for moved(old_time)"),
        ("moved.apply_async(kwargs={'old_time': b'x'}, countdown=3)", "bytes for moved(old_time)"),
        ("def f():\n    now = timezone.now()\n    moved.s(1, now)", "datetime for moved(old_time)"),
        ("moved.options(queue='q').delay_on_commit(uuid4(), 'x')", "UUID for moved(pk)"),
    ],
)
def test_value_that_arrives_as_text_without_an_annotation_is_named_at_its_call(
    tmp_path: Path, call: str, name: str
) -> None:
    assert find_names(tmp_path, f"{call}\n", head=MOVED) == [name]


@pytest.mark.parametrize(
    "call", ["moved.delay(1, 'x', key=uuid4())", "moved.delay(1, now)", "moved.delay(f(1))"]
)
def test_value_of_json_or_for_an_annotated_parameter_is_not_named(tmp_path: Path, call: str) -> None:
    assert find_names(tmp_path, f"{call}\n", head=MOVED) == []


def test_tasks_without_annotations_are_listed_by_their_lines_until_each_is_settled(tmp_path: Path) -> None:
    tasks = "".join(f"@app.task\ndef job_{number:02}(at): ...\n\n\n" for number in range(30))
    others = "@app.task\ndef by_id(order_id, pk, times=3): ...\n\n\n@app.task\ndef typed(at: str): ...\n"
    (tmp_path / "tasks.py").write_text(f'from celery import Celery\n\napp = Celery("a")\n\n\n{tasks}{others}')
    report = migrate_project(tmp_path).report
    assert report.notes == []
    found = [use for file in report.files for use in file.of_kind("decide")]
    assert {use.name for use in found} == {UNANNOTATED}
    assert [use.line for use in found] == [*range(7, 7 + 30 * 4, 4)]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(migrate_command, [str(tmp_path)])
    assert done.output.count("annotate those that take a datetime") == 1
    write(tmp_path, report)
    text = (tmp_path / "tasks.py").read_text().replace("(at)", "(at: str)")
    (tmp_path / "tasks.py").write_text(text)
    assert migrate_project(tmp_path).report.files == ()


def test_comment_decided_settles_its_line_or_in_its_own_line_the_file(
    tmp_path: Path,
) -> None:
    text = "add.delay(1).get(propagate=False)  # celery5: decided\nadd.delay(2).get(propagate=False)\n"
    tasks = f"from celery5 import App\n\napp = App('a')\n\n\n@app.task\ndef add(at): ...\n\n\n{text}"
    (tmp_path / "tasks.py").write_text(tasks)
    (tmp_path / "Procfile").write_text("a: celery -A a worker  # celery5: decided\nb: celery -A a beat\n")

    def list_places() -> list[tuple[str, str, int]]:
        files = migrate_project(tmp_path).report.files
        return [(file.path, use.kind, use.line) for file in files for use in sorted(file.findings)]

    left = [("Procfile", "by hand", 2), ("tasks.py", "by hand", 11)]
    assert list_places() == [left[0], ("tasks.py", "decide", 3), ("tasks.py", "decide", 7), left[1]]
    (tmp_path / "tasks.py").write_text(f"{tasks}# celery5: decided\n")
    assert list_places() == left


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        (
            "rediss://:secret@host:6380/1?ssl_cert_reqs=CERT_NONE",
            "rediss://:secret@host:6380/1?ssl_cert_reqs=CERT_NONE",
        ),
        ("redis+socket:///run/redis.sock?virtual_host=1", "unix:///run/redis.sock?db=1"),
        ("redis+socket:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis+socket://:secret@/run/redis.sock?virtual_host=2", "unix://:secret@/run/redis.sock?db=2"),
        ("redis://host:6379?virtual_host=/1", "redis://host:6379?db=1"),
    ],
)
def test_url_of_redis_is_one_that_celery5_takes(url: str, expected: str) -> None:
    assert translate_url(url) == (expected, "")
    Endpoint.from_url(expected)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("sentinel://:pw@a:1;sentinel://b:2/3", "redis+sentinel://a:1,b:2/SERVICE/3, with the password"),
        ("sentinel://a:1", "redis+sentinel://a:1/SERVICE/0"),
        ("redis://a;redis://b", "redis+sentinel://host:26379"),
        ("amqp://guest@host//", "redis://host/0: celery5 runs on Redis and Valkey alone"),
        ("sqs://", "redis://host/0: celery5 runs on Redis and Valkey alone"),
        ("memory://", "in_memory(app)"),
        ("filesystem://", "in_memory(app)"),
        ("redis://host/0?socket_timeout=3", "socket_timeout"),
    ],
)
@pytest.mark.parametrize(
    "statement",
    [
        'other = Celery("b", broker="URL")\n',
        'app.conf.update({"broker_url": os.environ.get("BROKER", "URL")})\n',
        'app.conf.broker_url = "URL"\n',
    ],
)
def test_url_that_celery5_does_not_take_is_named_with_what_to_write(
    tmp_path: Path, url: str, advice: str, statement: str
) -> None:
    names = find_names(tmp_path, "import os\nfrom celery import Celery\n" + statement.replace("URL", url))
    assert names == [f"broker {url.partition('://')[0]}://"]
    (found,) = (use for file in migrate_project(tmp_path).report.files for use in file.of_kind("by hand"))
    assert advice in found.advice
    assert "pw" not in found.advice


def test_url_of_a_socket_is_changed_in_the_settings_of_django(tmp_path: Path) -> None:
    text = 'INSTALLED_APPS = []\nCELERY_BROKER_URL = env("URL", "redis+socket:///r.sock?virtual_host=1")\n'
    assert find_names(tmp_path, text, head="", name="settings.py") == []
    assert 'CELERY5 = {"broker": env("URL", "unix:///r.sock?db=1")}' in (tmp_path / "settings.py").read_text()


def test_each_unusual_feature_of_a_project_is_changed_or_listed(tmp_path: Path) -> None:
    folder = unpack("features", tmp_path / "features")
    found = {(file.path, use.line) for file in migrate_project(folder).report.files for use in file.findings}
    marked = {
        (path.relative_to(folder).as_posix(), number): line.strip()
        for path in folder.rglob("*.py")
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if line.endswith("  # !")
    }
    assert len(marked) > 90
    assert [line for place, line in marked.items() if place not in found] == []
    general = [
        use for file in migrate_project(folder).report.files for use in file.findings if use.advice == GENERAL
    ]
    assert general == []
