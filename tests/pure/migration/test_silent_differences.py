"""Code that would run after a migration without an error, but do something else: it is changed, or listed."""

from pathlib import Path

import pytest

from celery5.migration.files.findings import CeleryUse
from celery5.migration.rewrite import migrate_project

TASKS = 'from celery import Celery\n\napp = Celery("shop")\n\n\n@app.task\ndef add(a_id, b_id=1): ...\n\n\n'


def migrate(folder: Path, text: str, *, settings: str = "") -> tuple[str, list[tuple[str, str]]]:
    """Return a module as it is changed, and what is left of it, by kind."""
    (folder / "tasks.py").write_text(TASKS + text)
    if settings:
        (folder / "settings.py").write_text(settings)
        (folder / "manage.py").touch()
    (report,) = [file for file in migrate_project(folder).report.files if file.path == "tasks.py"]
    return report.text, [(use.kind, use.name) for use in sorted(report.findings) if use.kind != "change"]


QUEUES = [
    ("add.apply_async((1,), queue='celery')\n", 'add.options(queue="default").delay(1)'),
    ("app.send_task('tasks.add', (1,), queue='celery')\n", '.task.options(queue="default").delay(1)'),
    ("@app.task(queue='celery')\ndef late(): ...\n", '@app.task(queue="default")'),
    ("app.conf.task_routes = {'tasks.*': {'queue': 'celery'}}\n", "queue_routes={'tasks.*': \"default\"}"),
]


@pytest.mark.parametrize(("text", "expected"), QUEUES)
def test_default_queue_of_celery_becomes_the_default_queue(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in migrate(tmp_path, text)[0]
    named = f"app.conf.task_default_queue = 'celery'\n{text}"
    assert expected not in migrate(tmp_path, named)[0]


def test_queues_of_a_worker_keep_a_default_queue_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "Procfile").write_text("w: celery -A tasks worker -Q celery,a\n")
    for text, queues in [("", "default,a"), ("app.conf.task_default_queue = 'celery'\n", "celery,a")]:
        (tmp_path / "tasks.py").write_text(TASKS + text)
        (report,) = [file for file in migrate_project(tmp_path).report.files if file.path == "Procfile"]
        assert report.findings[0].advice == f"celery5 -A tasks worker start --queues {queues}"


@pytest.mark.parametrize(
    ("clause", "names"),
    [
        ("except ValueError:", ["except ValueError around get()"]),
        (
            "except (KeyError, errors.Refused) as error:",
            ["except KeyError around get()", "except Refused around get()"],
        ),
        ("except Exception:", []),
        ("except TaskFailed:", []),
        ("except (TimeoutError, celery.exceptions.TimeoutError):", []),
    ],
)
def test_except_of_a_task_error_around_get_is_to_decide(
    tmp_path: Path, clause: str, names: list[str]
) -> None:
    head = "import celery.exceptions\nfrom celery5 import TaskFailed\n"
    _, left = migrate(tmp_path, f"{head}try:\n    add.delay(1).get(timeout=3)\n{clause}\n    pass\n")
    assert [name for kind, name in left if kind == "decide" and "get()" in name] == names
    _, left = migrate(tmp_path, f"{head}try:\n    {{}}.get(1)\n{clause}\n    pass\n")
    assert [name for _, name in left if "get()" in name] == []


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("add.delay(Order.objects.get(pk=1))\n", True),
        ("add.apply_async(args=[Order.objects.filter(a=1).first()])\n", True),
        ("def view(request):\n    order = Order.objects.create()\n    add.delay(order)\n", True),
        ("def view(request):\n    add.delay(request.user)\n", True),
        ("def view(request):\n    add.delay(b_id=get_object_or_404(Order, pk=1))\n", True),
        ("def view(request):\n    order = Order.objects.create()\n    add.delay(order.pk)\n", False),
        ("def view(request, order):\n    add.delay(order)\n", False),
    ],
)
def test_object_of_the_database_as_an_argument_is_named_in_a_django_project(
    tmp_path: Path, text: str, is_named: bool
) -> None:
    _, left = migrate(tmp_path, text, settings="INSTALLED_APPS = []\n")
    assert (
        any(kind == "by hand" and "an object of the database for add(" in name for kind, name in left)
        == is_named
    )


@pytest.mark.parametrize(
    "read",
    [
        "os.environ.get('CELERY_BROKER_URL', 'redis://a/0')",
        "os.environ['CELERY_BROKER_URL']",
        "env.str('CELERY_BROKER_URL')",
    ],
)
def test_environment_variable_does_not_count_as_a_use_of_a_setting(tmp_path: Path, read: str) -> None:
    migrate(tmp_path, "", settings=f"INSTALLED_APPS = []\nCELERY_BROKER_URL = {read}\n")
    (report,) = [file for file in migrate_project(tmp_path).report.files if file.path == "settings.py"]
    assert f'CELERY5 = {{"broker": {read}}}\n' in report.text
    assert "\nCELERY_BROKER_URL =" not in report.text


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("add.delay(1)", ["delay"]),
        ("add.apply_async((1,), countdown=3)", ["delay"]),
        ("add.delay(1).get()", ["delay", "get"]),
        ("app.AsyncResult(name).get(timeout=3)", ["get"]),
        ("app.control.revoke(name)", ["revoke"]),
        ("(add.s(1) | add.s()).apply_async()", ["start"]),
        ("celery.group(add.s(1), add.s(2))()", ["start"]),
        ("app.send_task('tasks.other', (1,))", ["delay"]),
        ("await app.result(name).aget()", []),
        ("await sync_to_async(add.delay)(1)", []),
    ],
)
def test_call_that_waits_for_redis_is_listed_in_async_def(
    tmp_path: Path, call: str, names: list[str]
) -> None:
    for kind, expected in (("async def", [f"{name} in async def" for name in names]), ("def", [])):
        text = f"import celery\n\n{kind} view(request, name):\n    {call}\n"
        if kind == "def" and "await" in call:
            continue
        changed, left = migrate(tmp_path, text)
        assert sorted({name for _, name in left if "async def" in name}) == expected
        if changed:
            (tmp_path / "tasks.py").write_text(changed)
            reports = migrate_project(tmp_path).report.files
            again = {use.name for report in reports for use in report.findings if "async def" in use.name}
            assert sorted(again) == expected


@pytest.mark.parametrize(
    ("retries", "expected"),
    [
        (["max_retries=5"], 5),
        (["max_retries=5", "max_retries=5, countdown=2"], 5),
        (["max_retries=5", "max_retries=7"], 3),
        (["max_retries=5", "countdown=2"], 3),
        (["max_retries=limit"], 3),
        (["countdown=2"], 3),
    ],
)
def test_declaration_has_the_number_of_retries_that_its_calls_name(
    tmp_path: Path, retries: list[str], expected: int
) -> None:
    lines = "".join(f"    raise self.retry({options})\n" for options in retries)
    changed, _ = migrate(tmp_path, f"@app.task(bind=True)\ndef again(self):\n{lines}")
    decorator = changed.partition("def again")[0].rpartition("@app.task")[2]
    assert f"max_retries={expected}," in decorator


def test_successful_has_an_advice_for_a_job_and_one_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(
        f"{TASKS}app.AsyncResult('a').successful()\napp.AsyncResult('a').failed()\n"
    )
    (report,) = migrate_project(tmp_path).report.files
    advice = " ".join(use.advice for use in report.of_kind("by hand"))
    for words in ('result.status() == "SUCCESS"', 'run.status().state == "SUCCESS"', 'state == "FAILED"'):
        assert words in advice


@pytest.mark.parametrize("read", ["state", "status"])
def test_comparison_with_a_state_has_the_states_of_celery5_as_advice(tmp_path: Path, read: str) -> None:
    text = f'result = add.delay(1)\nif result.{read} in ("PROGRESS", "STARTED", "PENDING", "FAILURE"): ...\n'
    (tmp_path / "tasks.py").write_text(TASKS + text)
    (report,) = migrate_project(tmp_path).report.files
    (advice,) = [use.advice for use in report.findings if use.name == f"result.{read}"]
    assert all(state in advice for state in ('"EXECUTING"', '"SENT"', '"SCHEDULED"', '"DEAD"'))


IMPORT = "from celery import chain, chord\n"
TASK = "@app.task\ndef assign(order_id):\n"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("order.save()\nadd.delay(1)", 2),
        ("charge(order_id)\nadd.apply_async((1,))", 2),
        ("charge(order_id)\nadd.delay_on_commit(1)", 2),
        ("charge(order_id)\nadd.si(1).delay()", 2),
        ("charge(order_id)\nchain(add.s(1), add.s())()", 2),
        ("charge(order_id)\n(add.s(1) | add.s()).apply_async()", 2),
        ("flow = chord([add.s(1)], add.s())\ncharge(order_id)\nflow()", 3),
        ("charge(order_id)\napp.send_task('tasks.add', (1,))", 2),
        ("charge(order_id)\ntransaction.on_commit(lambda: add.delay(1))", 2),
        ("with transaction.atomic():\n    order.save()\n    transaction.on_commit(partial(add.delay, 1))", 3),
        ("with transaction.atomic():\n    add.delay_on_commit(1)\n    order.save()", 2),
        ("with transaction.atomic():\n    order.save()\nadd.delay(1)", 3),
        ("def later():\n    add.delay(1)\norder.save()\ntransaction.on_commit(later)", 4),
        ("if order_id:\n    charge(1)\nelse:\n    return\nadd.delay(1)", 5),
        ("try:\n    charge(1)\nexcept OSError:\n    add.delay(1)", 4),
        ("for one in range(3):\n    charge(one)\n    add.delay(one)", 3),
        ("add.delay(charge(1))", 1),
        ("add.delay(1)\nadd.delay(2)", 2),
        ("cache.set('a', 1)\nadd.delay(2)", 2),
    ],
)
def test_task_that_sends_after_an_effect_is_to_decide(tmp_path: Path, body: str, line: int) -> None:
    text = TASK + "".join(f"    {part}\n" for part in body.split("\n"))
    found = find_sendings(tmp_path, f"{IMPORT}{text}")
    assert [use.name for use in found] == ["sending after an effect in assign"]
    assert "let the second run send again, or set backlog" in found[0].advice
    assert found[0].line == line + TASKS.count("\n") + 3
    (report,) = migrate_project(tmp_path).report.files
    again = find_sendings(tmp_path, report.text.removeprefix(TASKS), head="")
    assert [use.name for use in again] == ["sending after an effect in assign"]
    settled = text.split("\n")
    settled[line + 1] += "  # celery5: decided"
    assert not find_sendings(tmp_path, IMPORT + "\n".join(settled))


@pytest.mark.parametrize(
    "body",
    [
        "add.delay(1)\ncharge(order_id)",
        "order = Order.objects.filter(a=1).first()\nlogger.info('%s', order.pk)\nadd.delay(order.pk)",
        "with transaction.atomic():\n    order.save()\n    add.delay(1)",
        "with transaction.atomic():\n    lines = list(order.lines.all())\n    add.delay_on_commit(len(lines))",
        "if not order_id:\n    charge(1)\n    return\nadd.delay(1)",
        "if order_id:\n    charge(1)\nelse:\n    add.delay(1)",
        "for one in range(3):\n    add.delay(one)\n    charge(one)",
        "Thread(target=charge).start()",
        "charge(order_id)",
    ],
)
def test_task_that_sends_first_has_no_note_on_sending_again(tmp_path: Path, body: str) -> None:
    assert not find_sendings(tmp_path, TASK + "".join(f"    {part}\n" for part in body.split("\n")))


@pytest.mark.parametrize(
    ("settings", "is_listed"),
    [
        ("INSTALLED_APPS = []\nCELERY5 = {'backlog': 100}\n", False),
        ("INSTALLED_APPS = []\nCELERY5['backlog'] = 100\n", False),
        ("INSTALLED_APPS = []\nCELERY5 = {'backlog': 0}\n", True),
        ("INSTALLED_APPS = []\n", True),
    ],
)
def test_setting_of_a_backlog_ends_the_notes_on_sending_again(
    tmp_path: Path, settings: str, is_listed: bool
) -> None:
    (tmp_path / "settings.py").write_text(settings)
    assert bool(find_sendings(tmp_path, f"{TASK}    charge(1)\n    add.delay(1)\n")) == is_listed


def find_sendings(folder: Path, text: str, *, head: str = TASKS) -> list[CeleryUse]:
    """Return the findings on sending after an effect in a module of tasks."""
    (folder / "tasks.py").write_text(head + text)
    files = [file for file in migrate_project(folder).report.files if file.path == "tasks.py"]
    return [use for file in files for use in file.of_kind("decide") if use.name.startswith("sending after")]
