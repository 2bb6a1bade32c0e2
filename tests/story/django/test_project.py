"""A Django project with celery5 among its apps: its application, settings, tasks and commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from tests.house.sources import HERE
from tests.story.cli.commands import LIMIT, environment
from tests.story.django.projects import Project

SHOW = """
from celery5.contrib.django import get_app
app = get_app()
app.load()
print(app.name, sorted(app.tasks), app.settings.concurrency)
"""
ORDERS = """
from celery5 import task

@task
def count() -> int:
    return 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("orders/tasks.py", ORDERS)
    project.write("plain/models.py", "")
    project.configure('"orders", "plain"')
    return project


def test_a_project_without_an_app_gets_one_with_its_name_settings_and_tasks(project: Project) -> None:
    project.write("mails/tasks/__init__.py", "")
    project.write("mails/tasks/letters.py", ORDERS)
    project.configure('"orders", "plain", "mails"', '"concurrency": 7')
    assert project.run(SHOW) == "shop ['mails.tasks.letters.count', 'orders.tasks.count'] 7\n"


def test_the_environment_precedes_the_settings_of_django(project: Project) -> None:
    project.configure(celery5='"concurrency": 7, "name": "till"')
    assert project.run(SHOW, CELERY5_CONCURRENCY="8") == "till [] 8\n"


def test_a_task_of_an_app_belongs_to_the_project_wherever_it_is_imported(project: Project) -> None:
    text = "from orders.tasks import count\nprint(count.app.name, count.name)"
    assert project.run(text) == "shop orders.tasks.count\n"


@pytest.mark.parametrize("module", ["shop/celery5.py", "shop/__init__.py"])
def test_the_app_of_the_project_is_found_in_its_package(project: Project, module: str) -> None:
    project.write(module, 'from celery5 import App\napp = App("till", concurrency=9)\n')
    assert project.run(SHOW) == "till ['orders.tasks.count'] 9\n"


def test_the_settings_of_django_name_an_app_elsewhere(project: Project) -> None:
    project.write("jobs/main.py", 'from celery5 import App\nfirst = App("till")\nsecond = App("stock")\n')
    project.configure('"orders"', '"app": "jobs.main:second"')
    assert project.run(SHOW).startswith("stock ['orders.tasks.count']")


TWO = 'from celery5 import App\nfirst = App("till")\nsecond = App("stock")\n'
MISTAKES = {
    "a misspelt setting": (
        '"concurency": 7',
        "",
        "setting 'concurency' in CELERY5 of Django's settings is not known; did you mean 'concurrency'?",
    ),
    "a bad value": (
        '"concurrency": 0',
        "",
        "concurrency in CELERY5 of Django's settings=0: Expected `int` >= 1",
    ),
    "no module": ('"app": "jobs"', "", "\"app\" is 'jobs': ModuleNotFoundError: No module named 'jobs'"),
    "no App": (
        '"app": "orders.tasks"',
        "",
        "where there is no App: write module:name, such as 'shop.jobs:app'",
    ),
    "two Apps": ("", TWO, "shop.celery5 has several applications"),
    "a name for a declared App": (
        '"name": "bill"',
        'from celery5 import App\napp = App("till")\n',
        "\"name\" is for a project without an App, and this one declares 'till'",
    ),
    "two sources of settings": (
        '"concurrency": 7',
        'from celery5 import App\napp = App("till", config="shop.jobs")\n',
        "application 'till' has its settings from 'shop.jobs' and from CELERY5 of Django's settings",
    ),
    "an ignored app that is not there": ('"ignored_apps": ["order"]', "", "ignored_apps has 'order'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_settings_of_django_is_one_line(project: Project, case: str) -> None:
    settings, module, line = MISTAKES[case]
    project.configure('"orders"', settings)
    project.write("shop/jobs.py", "")
    if module:
        project.write("shop/celery5.py", module)
    ended = project.celery5("-A", "shop", "config", "show")
    assert ended.code == 2
    assert line in ended.error
    # Django sets itself up before it runs any command.
    for command in ("check", "celery5"):
        ended = project.manage(command)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1)
        assert line in ended.error


def test_a_mistake_in_the_settings_of_django_is_raised_where_no_command_sets_it_up(project: Project) -> None:
    project.configure('"orders"', '"concurency": 7')
    text = """
    import django
    from celery5 import Misconfigured
    try:
        django.setup()
    except Misconfigured as error:
        print(error)
    """
    ended = project.python(text)
    assert ended.out.startswith("setting 'concurency' in CELERY5 of Django's settings is not known")


def test_an_app_whose_tasks_are_for_something_else_is_ignored(project: Project) -> None:
    project.write("orders/tasks.py", "import no_such_library\n")
    project.configure('"orders"', '"ignored_apps": ["orders"]')
    assert project.run(SHOW).startswith("shop [] ")


def test_an_import_error_inside_of_a_tasks_module_is_told(project: Project) -> None:
    project.write("orders/tasks.py", "import no_such_library\n")
    ended = project.manage("celery5", "worker", "start")
    assert ended.code == 2
    assert "included module 'orders.tasks' fails while it is imported" in ended.error
    assert "No module named 'no_such_library'" in ended.error
    assert "orders/tasks.py:1" in ended.error


def test_doctor_examines_the_broker_of_the_settings_while_a_tasks_module_fails(
    project: Project, url: str
) -> None:
    project.write("orders/tasks.py", "import no_such_library\n")
    project.configure('"orders"', f'"broker": {url!r}')
    for words in ((), ("--app-name", "shop")):
        ended = project.manage("celery5", *words, "doctor")
        assert "ok    server " in ended.out, ended
    failing = project.manage("celery5", "doctor").out
    assert "fail  application " in failing
    assert "orders/tasks.py:1" in failing


def test_import_error_during_django_setup_names_its_file_and_line(project: Project) -> None:
    project.write("orders/models.py", "\nimport no_such_library\n")
    ended = project.celery5("-A", "shop", "config", "check")
    assert ended.code == 2
    assert "Django cannot be set up: ModuleNotFoundError: No module named 'no_such_library' (" in ended.error
    assert ended.error.count("orders/models.py:2)") == 1


def test_import_error_of_a_tasks_module_names_its_file_and_line_once(project: Project) -> None:
    project.write("orders/tasks.py", "\nimport no_such_library\n")
    ended = project.celery5("-A", "shop", "config", "check")
    assert ended.code == 2
    assert ended.error.count("orders/tasks.py:2)") == 1
    text = """
    from celery5 import Misconfigured
    from celery5.contrib.django import get_app
    try:
        get_app().load()
    except Misconfigured as error:
        print(error)
    """
    assert project.run(text).strip().endswith("orders/tasks.py:2)")


def test_settings_that_cannot_be_imported_are_one_line(project: Project) -> None:
    ended = project.celery5("-A", "shop", "config", "show", DJANGO_SETTINGS_MODULE="shop.setings")
    assert ended.code == 2
    assert "DJANGO_SETTINGS_MODULE is 'shop.setings', and Django cannot be set up" in ended.error
    assert ended.error.strip().endswith("No module named 'shop.setings'")


def test_a_module_that_names_the_settings_itself_is_enough(project: Project) -> None:
    project.write(
        "shop/celery5.py",
        'import os\nos.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")\n'
        'from celery5 import App\napp = App("till")\n',
    )
    ended = project.celery5("-A", "shop.celery5", "config", "show", DJANGO_SETTINGS_MODULE="")
    assert (ended.code, ended.err) == (0, "")


def test_a_process_without_the_app_is_told_what_to_do(project: Project) -> None:
    project.write("shop/settings.py", "INSTALLED_APPS = []\n")
    text = """
    from celery5.contrib.django import get_app
    try:
        get_app()
    except Exception as error:
        print(error)
    """
    assert 'add "celery5.contrib.django" to INSTALLED_APPS' in project.run(text)


def test_manage_passes_words_help_and_exit_codes_on(project: Project) -> None:
    shown = project.manage("celery5", "config", "show", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == project.celery5("-A", "shop", "config", "show", "--json").out
    assert (
        project.manage("celery5", "--settings", "shop.settings", "config", "show", "--json").out == shown.out
    )
    usage = "Usage: manage.py celery5 [OPTIONS] [COMMAND] [ARGS]..."
    assert project.manage("celery5", "--help").out.startswith(usage)
    assert project.manage("help", "celery5").out.startswith(usage)
    refused = project.manage("celery5", "queue", "lst")
    assert (refused.code, refused.error) == (
        2,
        "Error: No such command 'lst'. Did you mean 'list'?",
    )
    unread = project.manage("celery5", "docs", "nosuchpage")
    assert "; python manage.py celery5 docs alone lists all" in unread.error
    named = project.manage("celery5", "-A", "orders.tasks", "config", "show", "--json")
    assert named.out == shown.out


def test_call_command_runs_a_command(project: Project) -> None:
    text = """
    from django.core.management import call_command
    try:
        call_command("celery5", "acl", "sender")
    except SystemExit as end:
        print(end.code)
    """
    assert project.run(text).startswith("ACL SETUSER shop-sender")


RUN = """
from orders.tasks import boxed, in_thread, on_loop
print(in_thread.delay().get(), boxed.delay().get(), on_loop.delay().get())
"""


@pytest.mark.parametrize("declared", [False, True])
def test_a_worker_runs_tasks_with_models_of_each_kind(
    project: Project, own_server: EmbeddedServer, declared: bool
) -> None:
    project.env["CELERY5_BROKER"] = own_server.url
    project.write("orders/models.py", "from django.db import models\nclass Order(models.Model): pass\n")
    project.write(
        "orders/tasks.py",
        """
        from celery5 import task
        from orders.models import Order

        @task
        def in_thread() -> int:
            return Order.objects.count()

        @task(boxed=True)
        def boxed() -> int:
            return Order.objects.count()

        @task(loop="asyncio")
        async def on_loop() -> int:
            return await Order.objects.acount()
        """,
    )
    if declared:
        project.write("shop/celery5.py", 'from celery5 import App\napp = App("till")\n')
    migrated = project.manage("migrate", "--run-syncdb")
    assert migrated.code == 0, migrated.err
    with project.serve("worker", "start") as worker:
        worker.ready()
        assert project.run(RUN) == "0 0 0\n"
    assert worker.ended().code == 0, worker.err


ON_LOOPS = """
from celery5 import task
from orders.models import Order

@task(max_retries=0, name="trio")
async def on_trio() -> int:
    return Order.objects.count()

@task(max_retries=0, name="asyncio", loop="asyncio")
async def on_asyncio() -> int:
    return Order.objects.count()

@task(max_retries=0, name="boxed", boxed=True)
async def in_box() -> int:
    return Order.objects.count()

@task(name="methods", loop="asyncio")
async def by_methods() -> list[int]:
    order = await Order.objects.acreate()
    return [row.pk - order.pk async for row in Order.objects.all()] + [await Order.objects.acount()]
"""
SHOW_FAILURES = """
from celery5 import TaskFailed
from celery5.contrib.django import get_app
get_app().load()
for name in ("trio", "boxed", "asyncio"):
    try:
        get_app().tasks[name].delay().get()
    except TaskFailed as error:
        print(error.type, "|", error.message)
print(get_app().tasks["methods"].delay().get())
"""


def test_a_query_that_would_block_an_event_loop_is_refused(
    project: Project, own_server: EmbeddedServer
) -> None:
    project.env["CELERY5_BROKER"] = own_server.url
    project.write("orders/models.py", "from django.db import models\nclass Order(models.Model): pass\n")
    project.write("orders/tasks.py", ON_LOOPS)
    migrated = project.manage("migrate", "--run-syncdb")
    assert migrated.code == 0, migrated.err
    with project.serve("worker", "start") as worker:
        worker.ready()
        on_trio, in_box, on_asyncio, methods = project.run(SHOW_FAILURES).splitlines()
    assert on_trio.startswith(
        "SynchronousOnlyOperation | Django cannot query a database on the Trio event loop"
    )
    assert in_box == on_trio
    assert on_asyncio.startswith("SynchronousOnlyOperation | You cannot call this from an async context")
    assert methods == "[0, 1]"


FROM_CELERY = """
import logging
from celery import shared_task
from celery.signals import task_failure

@shared_task
def count(): ...
"""


def test_check_warns_of_task_modules_that_import_from_celery(project: Project) -> None:
    project.write("plain/tasks.py", FROM_CELERY)
    checked = project.manage("check")
    assert checked.code == 0
    assert "(celery5.W001) plain/tasks.py imports from Celery (line 3, 4): what it declares" in checked.err
    assert "celery5 migrate plain/tasks.py shows what to write instead" in checked.err
    assert checked.err.count("W001") == 1

    project.write("plain/tasks.py", ORDERS + '# celery was here\n"""from celery import shared_task"""\n')
    assert "no issues" in project.manage("check").out


def test_check_names_what_is_left_of_celery_outside_of_task_modules(project: Project) -> None:
    project.configure('"orders", "plain"', '"name": "shop"}; CELERY_TASK_ALWAYS_EAGER = True  #')
    project.write("plain/signals.py", "from celery.signals import task_failure\n")
    project.write("plain/loaded.py", "try:\n    import celery\nexcept ImportError: ...\n")
    project.write("plain/other.py", "import celery\n")
    project.write("plain/models.py", "import plain.loaded\n")
    project.write("shop/celery.py", "from celery import Celery\n")
    checked = project.manage("check").err
    for place in (
        "plain/signals.py imports from Celery (line 1)",
        "plain/loaded.py imports from Celery (line 2)",
    ):
        assert f"(celery5.W001) {place}" in checked
    assert "(celery5.W001) shop/celery.py imports from Celery (line 1)" in checked
    assert "(celery5.W002) CELERY_TASK_ALWAYS_EAGER in Django's settings has no effect" in checked
    assert (checked.count("W001"), checked.count("W002")) == (3, 1)


def test_check_names_settings_of_celery_once(project: Project) -> None:
    project.configure(celery5='"name": "shop"}; CELERY_BEAT_SCHEDULE = {}; CELERY_BROKER_URL = "redis://h" #')
    checked = project.manage("check").err
    assert (
        "(celery5.W003) Celery's settings have no effect here: CELERY_BEAT_SCHEDULE, CELERY_BROKER_URL"
        in checked
    )
    assert checked.count("celery5.") == 1


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            '"schedules": {"x": {"task": "nope", "cron": "* * * * *"}}',
            "E001) schedule 'x' in the settings: task is 'nope', which is none of this application; "
            "known: orders.tasks.count",
        ),
        (
            '"schedules": {"x": {"task": "orders.task.count", "cron": "* * * * *"}}',
            "which is none of this application; did you mean 'orders.tasks.count'?",
        ),
        ('"schedules": {"x": {"task": "orders.tasks.count", "cron": "61 * * * *"}}', "61"),
        ('"queue_routes": {"billing.*": "documents"}', "W004) queue_routes: 'billing.*' matches no task"),
    ],
)
def test_check_finds_what_a_worker_or_a_scheduler_would_not_take(
    project: Project, setting: str, told: str
) -> None:
    project.configure('"orders"', setting)
    checked = project.manage("check")
    assert told in checked.err
    assert checked.code == ("W004" not in told)


def test_a_schedule_of_a_task_that_no_app_includes_says_what_to_write(project: Project) -> None:
    project.write("orders/weather.py", ORDERS)
    schedules = '"schedules": {"x": {"task": "orders.weather.count", "cron": "* * * * *"}}'
    project.configure('"orders"', schedules)
    own = "which is none of this application; import it in orders.tasks, as in `from orders.weather import count`"
    for words in (["check"], ["celery5", "scheduler", "start"]):
        assert own in project.manage(*words).err
    project.write("shop/celery5.py", "from celery5 import App\napp = App('till')\n")
    assert (
        "application; add \"orders.weather\" to include=[...] of the App in module 'shop.celery5'"
        in project.manage("check").err
    )
    project.write(
        "shop/celery5.py", "from celery5 import App\napp = App('till', include=['orders.weather'])\n"
    )
    assert "no issues" in project.manage("check").out


BAD_TASK = """
from celery5 import task

@task(base=object)
def sell() -> int:
    return 1
"""


LOADING = """
from django.apps import AppConfig

class Plain(AppConfig):
    name = "plain"

    def ready(self) -> None:
        import plain.tasks
"""


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_tasks_that_cannot_be_imported_are_an_error_beside_other_checks(
    project: Project, command: str
) -> None:
    project.write("plain/tasks.py", BAD_TASK)
    project.write("orders/signals.py", "from celery.signals import task_failure\n")
    checked = project.manage(command)
    assert checked.code == 1
    assert "(celery5.E002) a worker would not start: included module 'plain.tasks' fails" in checked.err
    assert f"({project.folder}/plain/tasks.py:4)" in checked.err
    assert "W001" in checked.err
    assert "Traceback" not in checked.err
    started = project.manage("celery5", "worker", "start")
    assert (started.code, started.err.count("\n")) == (2, 1)
    assert f"({project.folder}/plain/tasks.py:4)" in started.err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plain/models.py", "import plain.tasks\n"),
        ("shop/urls.py", "import plain.tasks\nurlpatterns = []\n"),
        ("plain/apps.py", LOADING),
    ],
)
def test_tasks_that_fail_where_django_imports_them_are_one_line(
    project: Project, file: str, text: str
) -> None:
    project.configure('"orders", "plain"', '"name": "x"}; ROOT_URLCONF = "shop.urls"; ALSO = {')
    project.write("plain/tasks.py", BAD_TASK)
    project.write("orders/signals.py", "from celery.signals import task_failure\n")
    project.write(file, text)
    command = [sys.executable, "manage.py", "check"]
    environ = environment()
    ended = subprocess.run(
        command, cwd=project.folder, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    first, *others = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert first.startswith("Error: module 'plain.tasks' fails while it is imported: ")
    assert f"({project.folder}/plain/tasks.py:4); --traceback shows all" in first
    assert len(others) == (2 if file == "shop/urls.py" else 0), (
        "what is left of Celery, where the apps are ready"
    )
    if file != "plain/models.py":
        return
    whole = subprocess.run(
        [*command, "--traceback"],
        cwd=project.folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert whole.stderr.startswith("Traceback")


def test_tasks_that_fail_where_the_application_is_declared_are_one_line(project: Project) -> None:
    project.write("plain/tasks.py", BAD_TASK)
    project.write("shop/celery5.py", "import plain.tasks\nfrom celery5 import App\napp = App('till')\n")
    checked = project.manage("check")
    assert (checked.code, checked.err.count("\n")) == (2, 1)
    assert checked.err.endswith(f"({project.folder}/plain/tasks.py:4)\n")


def test_url_of_the_environment_that_cannot_be_understood_is_one_line(project: Project) -> None:
    checked = Project(project.folder, CELERY5_BROKER="redis+socket:///tmp/redis.sock").manage("check")
    assert (checked.code, checked.err.count("\n")) == (2, 1)
    assert checked.err.startswith(
        "Error: broker URL 'redis+socket:///tmp/redis.sock': it cannot be understood"
    )


def test_check_says_nothing_where_celery_is_kept_on_purpose(project: Project) -> None:
    project.write("plain/tasks.py", FROM_CELERY)
    project.configure('"orders", "plain"', '"ignored_apps": ["plain"]')
    assert "no issues" in project.manage("check").out

    project.configure('"orders", "plain"')
    project.write(
        "shop/celery5.py", "import celery5.contrib.celery\nfrom celery5 import App\napp = App('till')\n"
    )
    assert "no issues" in project.manage("check").out


def test_tasks_in_other_modules_are_named_with_the_line_to_write(project: Project) -> None:
    project.write("orders/jobs.py", ORDERS.replace("count", "late"))
    project.write("orders/tests/test_jobs.py", ORDERS.replace("count", "tested"))
    send = """
    import django
    django.setup()
    from celery5 import Misconfigured
    from orders.jobs import late
    try:
        late.delay()
    except Misconfigured as error:
        print(error)
    """
    line = "import it in orders.tasks, as in `from orders.jobs import late`"
    checked = project.manage("check")
    assert checked.code == 0
    assert f"(celery5.W005) module 'orders.jobs' declares tasks that no application has (late): {line}" in (
        checked.err
    )
    assert "test_jobs" not in checked.err
    assert f"declares tasks that no application has (late): {line}" in (
        project.manage("celery5", "config", "check").err
    )
    assert line in project.python(send).out
    project.write("shop/celery5.py", 'from celery5 import App\napp = App("shop")\n')
    assert (
        "add \"orders.jobs\" to include=[...] of the App in module 'shop.celery5'" in project.python(send).out
    )
    for module, text in {
        "orders/tasks.py": ORDERS + "from orders.jobs import late\n",
        "shop/celery5.py": 'from celery5 import App\napp = App("shop", include=["orders.jobs"])\n',
    }.items():
        project.write("shop/celery5.py", "")
        project.write("orders/tasks.py", ORDERS)
        project.write(module, text)
        assert "W005" not in project.manage("check").err


def test_module_that_celery5_refuses_is_one_line_whatever_its_name(project: Project) -> None:
    project.write("orders/jobs.py", ORDERS.replace("@task", '@task(serializer="pickle")'))
    project.write("orders/models.py", "import orders.jobs\n")
    ended = project.manage("check")
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert line.startswith(
        "Error: module 'orders.jobs' fails while it is imported: Misconfigured: task option"
    )
    assert "orders/jobs.py:4" in line


SEND_ROWS = """
from celery5 import Misconfigured, task
from celery5.errors import BadArguments
from orders.models import Order
from orders.tasks import pay, pay_all, ship

for value in (Order(pk=1), Order.objects.all(), object()):
    try:
        ship.delay(value)
    except BadArguments as error:
        print(error)

for task_of_keys, value in ((pay, Order(pk=1)), (pay_all, Order.objects.all()), (pay_all, [Order(pk=1)])):
    try:
        task_of_keys.delay(value)
    except BadArguments as error:
        print(error)

try:
    @task
    def bill(order: Order) -> None: ...
    bill.delay(Order(pk=1))
except Misconfigured as error:
    print(error)
"""


def test_error_for_a_row_as_an_argument_names_what_to_pass(project: Project) -> None:
    project.write("orders/models.py", "from django.db import models\nclass Order(models.Model): pass\n")
    project.write(
        "orders/tasks.py",
        "from celery5 import task\n@task\ndef ship(order): ...\n"
        "@task\ndef pay(order_id: int): ...\n@task\ndef pay_all(order_ids: list[int]): ...\n",
    )
    row, rows, other, key, keys, listed, declared = project.run(SEND_ROWS).splitlines()
    assert row.endswith("Order has no JSON form: use its pk")
    assert rows.endswith(
        "QuerySet has no JSON form: use the pks of its rows: list(rows.values_list('pk', flat=True))"
    )
    assert other.endswith(
        "object has no JSON form: use a dataclass, or numbers, text, lists and dicts (celery5 docs types)"
    )
    assert key.endswith("parameter 'order_id' takes int, got Order: use its pk")
    assert keys.endswith(
        "'order_ids' takes list[int], got QuerySet: use the pks of its rows: list(rows.values_list('pk', flat=True))"
    )
    assert listed.endswith("'order_ids' takes list[int], got list: use its pk")
    assert declared.endswith("that JSON can carry (see celery5 docs types); use its pk")


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "a value": ("", {"CELERY5_CONCURRENCY": "many"}, "Error: CELERY5_CONCURRENCY='many': "),
    "a name": ("", {"CELERY5_CONCURENCY": "3"}, "Error: CELERY5_CONCURENCY is no setting: did you mean"),
    "a broker": (
        "",
        {"CELERY5_BROKER": "redos://x"},
        "Error: module 'shop.celery5' fails while it is imported: ",
    ),
    "an option": (
        "App('a b')\n",
        {},
        "Error: module 'shop.celery5' fails while it is imported: Misconfigured: ",
    ),
    "a task": (
        "@app.task(base=object)\ndef sell(): ...\n",
        {},
        "Error: module 'shop.celery5' fails while it is imported: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_app_that_is_refused_is_one_line_of_error_when_settings_import_it(
    project: Project, case: str
) -> None:
    text, env, line = REFUSED[case]
    project.write("shop/__init__.py", "from .celery5 import app\n")
    project.write("shop/celery5.py", f"from celery5 import App\napp = App('till')\n{text}")
    for words in (["check"], ["celery5", "info"], ["runserver", "--noreload"]):
        ended = manage_alone(project, *words, **env)
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
        assert ended.stderr.startswith(line)
    assert manage_alone(project, "check", "--traceback", **env).stderr.startswith("Traceback")


def test_error_of_code_in_the_django_shell_keeps_its_traceback(project: Project) -> None:
    ended = manage_alone(project, "shell", "-c", "from celery5 import App; App('a b')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert "celery5.errors.Misconfigured: application name 'a b'" in ended.stderr.splitlines()[-1]


def manage_alone(project: Project, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run `manage.py` in an interpreter of its own, which ends as Python ends: with `sys.excepthook`."""
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=project.folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


def test_the_environment_file_of_the_page_on_systemd_is_enough_for_a_unit(
    project: Project, tmp_path: Path
) -> None:
    """The units for single processes run `/usr/bin/env celery5` in the home directory of the user."""
    page = (HERE / "docs/guide/systemd.md").read_text()
    section = page.partition("## A Django project\n")[2].partition("\n## ")[0]
    lines = section.partition('shop.env"\n')[2].partition("```")[0]
    lines = lines.replace("/srv/shop/.venv", sys.prefix).replace("/srv/shop", str(project.folder))
    variables = dict(line.split("=", 1) for line in lines.splitlines())
    home = tmp_path / "home"
    home.mkdir()
    command = ["/usr/bin/env", "celery5", "task", "list"]
    done = subprocess.run(
        command,
        cwd=home,
        env={"HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "orders.tasks.count" in done.stdout
