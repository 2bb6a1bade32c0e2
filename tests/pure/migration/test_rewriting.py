"""Rewriting: what becomes of each thing of Celery's, a line at a time."""

import ast
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from celery5.limits import Rate
from celery5.migration.files.findings import FileReport
from celery5.migration.rewrite import migrate_project
from celery5.migration.values.rates import translate_rate

GENERAL = "see celery5 docs from-celery"
"""What is said of a name that nothing is known of."""
HEAD = """
import celery
from celery import chain, chord, group, shared_task
from shop.celery import app


@shared_task
def add(x, y=1): ...


@shared_task
def total(values): ...


"""


def migrate(folder: Path, text: str, *, head: str = HEAD, name: str = "tasks.py") -> FileReport:
    """Return what becomes of a module."""
    (folder / name).write_text(head + text)
    (report,) = migrate_project(folder).report.files
    return report


CALLS = [
    ("add.apply_async((1, 2))", "add.delay(1, 2)"),
    ("add.apply_async()", "add.delay()"),
    ("add.apply_async([1], {'y': 2}, countdown=5)", "add.options(countdown=5).delay(1, y=2)"),
    ("add.apply_async(args, kwargs)", "add.delay(*args, **kwargs)"),
    ("add.apply_async(args=None, kwargs={'if': 1})", "add.delay(**{'if': 1})"),
    ("add.apply_async((1,), task_id=name, queue=None)", "add.options(id=name).delay(1)"),
    ("add.apply_async((1,), retry=False, shadow='x', serializer='json')", "add.delay(1)"),
    ("add.apply_async_on_commit((1,), countdown=3)", "add.options(countdown=3).delay_on_commit(1)"),
    ("add.s(1).apply_async(countdown=3)", "add.options(countdown=3).delay(1)"),
    ("add.s(1).set(queue='slow')", "add.options(queue='slow').s(1)"),
    ("add.signature((1, 2), countdown=3)", "add.options(countdown=3).s(1, 2)"),
    ("add.delay(1).get()", "add.delay(1).get(timeout=None)"),
    ("add.delay(1).get(timeout=3)", "add.delay(1).get(timeout=3)"),
    ("add.delay(1).revoke(terminate=True)", "add.delay(1).revoke()"),
    ("add.delay(1).task_id", "add.delay(1).id"),
    ("add.AsyncResult(name)", "add.app.result(name, task=add)"),
    ("app.AsyncResult(name)", "app.result(name)"),
    (
        "app.send_task('shop.add', (1,), queue='q')",
        "app.signature('shop.add').task.options(queue='q').delay(1)",
    ),
    ("app.send_task('shop.add', kwargs={'x': 1})", "app.signature('shop.add', x=1).delay()"),
    ("app.signature('shop.add', kwargs={'x': 1})", "app.signature('shop.add', x=1)"),
    (
        "chain(add.s(1), app.signature('shop.end', args=(2,), queue='q', immutable=True))()",
        "(add.s(1) >> app.signature('shop.end').task.options(queue='q').s(2)).start()",
    ),
    ("chain(add.s(1) | total.s())()", "chain(add.s(1) | total.s()).start()"),
    ("app.control.revoke(name, terminate=True)", "app.result(name).revoke()"),
    ("chain(add.s(1), add.s(2))()", "chain(add.s(1), add.partial(2)).start()"),
    ("chain(add.s(1), total.s()).delay()", "chain(add.s(1), total.s()).start()"),
    ("chain(add.s(1), add.si(2), total.s()).apply_async()", "(add.s(1) >> add.s(2) | total.s()).start()"),
    (
        "chain(\n    add.s(1),\n    add.si(2),\n    total.s(),\n).apply_async()",
        "(\n    add.s(1)\n    >> add.s(2)\n    | total.s()\n).start()",
    ),
    ("(add.si(1) | add.si(2))()", "(add.s(1) >> add.s(2)).start()"),
    ("chain([add.s(1), total.s()])", "chain(*[add.s(1), total.s()])"),
    (
        "group(add.si(i) for i in range(3))().get()",
        "group(add.s(i) for i in range(3)).start().get(timeout=None)",
    ),
    ("celery.chain(add.s(1), total.s()).delay()", "chain(add.s(1), total.s()).start()"),
    ("chord([add.s(1)])(total.s())", "chord([add.s(1)], total.s()).start()"),
    ("chord([add.s(1)], total.si([])).delay()", "(group([add.s(1)]) >> total.s([])).start()"),
    ("chord(group(add.s(1)), total.si([]))()", "(group(add.s(1)) >> total.s([])).start()"),
    ("add.starmap([(1, 2)])()", "add.starmap([(1, 2)]).start()"),
]


@pytest.mark.parametrize(("before", "after"), CALLS)
def test_call_is_rewritten(tmp_path: Path, before: str, after: str) -> None:
    report = migrate(tmp_path, f"value = {before}\n")
    assert f"value = {after}\n" in report.text


BY_HAND = [
    ("add.apply_async((1,), link=total.s())", "link", "(task.s(...) | total.s()).start()"),
    ("add.apply_async((1,), link_error=total.s())", "link_error", "on_failure"),
    ("add.apply_async((1,), priority=3)", "priority", "high"),
    ("add.apply_async((1,), **options)", "apply_async(**options)", "task.options"),
    ("chain(add.s(1), total.s()).apply_async(link_error=total.s())", "link_error", "start(on_failure=task)"),
    (
        "chain(add.s(1), total.s()).apply_async(queue='q', countdown=3)",
        "apply_async(queue=, countdown=)",
        "start(), which takes id",
    ),
    ("(add.s(1) | total.s()).apply_async(link=total.s())", "link", "a | b"),
    ("(add.s(1) | total.s()).set(queue='q')", "set() of a workflow", "start(), which takes id"),
    ("(add.s(1) | total.s()).delay(3)", "delay() of a workflow", "start()"),
    ("(add.s(1) | total.s()).apply()", "apply() of a workflow", "start(), and get()"),
    ("add.run(1)", "run()", "task(...)"),
    ("chain(*[add.si(1), add.si(2)])", "si in a list", ">>"),
    ("chain(add.s(1), total.s())(3)", "a signature that is called", "start()"),
    ("add.chunks(zip(a, b), 10)", "chunks", "starmap"),
    ("add.delay(1).ready()", "result.ready()", "wait([result], timeout=0)"),
    ("add.delay(1).state", "result.state", "result.status()"),
    ("add.delay(1).get(propagate=False)", "get(propagate=)", "gather"),
    ("add.s(1).delay().get(propagate=False)", "get(propagate=)", "except TaskFailed"),
    ("app.control.broadcast('x')", "control.broadcast", "app.control.send"),
    ("app.control.inspect().active()", "control.inspect", "app.control.send"),
    ("add.apply((1,))", "apply()", "task(...)"),
    ("app.conf.beat_schedule['x']", "app.conf", "app.configure(...)"),
    ("add.apply_async((1,), eta=datetime.now())", "eta=datetime.now()", "datetime.now(UTC)"),
]


@pytest.mark.parametrize(("before", "name", "advice"), BY_HAND)
def test_what_cannot_be_rewritten_stays_and_is_named_with_its_line(
    tmp_path: Path, before: str, name: str, advice: str
) -> None:
    report = migrate(tmp_path, f"value = {before}\n")
    (found,) = [found for found in report.of_kind("by hand") if found.name == name]
    assert advice in found.advice
    assert found.line == HEAD.count("\n") + 1
    assert report.text.splitlines()[found.line_after - 1].startswith("value = ")
    assert before.split("(")[0] in report.text


DECORATORS = [
    ("@shared_task", "@task"),
    ("@shared_task()", "@task"),
    ("@app.task(bind=False, name='x')", "@app.task(name='x')"),
    ("@app.task(acks_late=True, track_started=True, queue='q')", "@app.task(queue='q')"),
    (
        "@app.task(autoretry_for=(OSError,), retry_backoff=True)",
        "@app.task(autoretry_for=(OSError,), max_retries=3)",
    ),
    ("@app.task(max_retries=0)", "@app.task(max_retries=0)"),
    ("@app.task(max_retries=5)", "@app.task(max_retries=5, dont_autoretry_for=[Exception])"),
    ("@app.task(rate_limit='10/m')", '@app.task(rate_limit=Rate("1/6s", per="worker"))'),
    ("@app.task(rate_limit='600/m')", '@app.task(rate_limit=Rate("10/s", per="worker"))'),
    ("@app.task(rate_limit='10/s')", "@app.task(rate_limit=Rate('10/s', per=\"worker\"))"),
    ("@app.task(rate_limit=10)", '@app.task(rate_limit=Rate("10/s", per="worker"))'),
    ("@app.task(rate_limit=None)", "@app.task"),
    *((f"@app.task(rate_limit={none})", "@app.task") for none in ("0", "0.0", "'0/s'", "'0'", '"0.0/m"')),
    ("@app.task(rate_limit='0.5/m')", "@app.task(rate_limit=Rate('0.5/m', per=\"worker\"))"),
    ("@app.task(rate_limit='100/h')", '@app.task(rate_limit=Rate("1/36s", per="worker"))'),
    ("@app.task(rate_limit=0.5)", '@app.task(rate_limit=Rate("0.5/s", per="worker"))'),
    ("@app.task(rate_limit='10')", '@app.task(rate_limit=Rate("10/s", per="worker"))'),
    ("@app.task(rate_limit=' 5 / m')", '@app.task(rate_limit=Rate("1/12s", per="worker"))'),
    ("@app.task(throws=(KeyError,))", "@app.task(dont_autoretry_for=(KeyError,))"),
    (
        "@app.task(default_retry_delay=9, max_retries=0)",
        "@app.task(backoff=9, cap=9, jitter=False, max_retries=0)",
    ),
    (
        "@app.task(autoretry_for=(OSError,), retry_kwargs={'max_retries': 2, 'countdown': 4})",
        "@app.task(autoretry_for=(OSError,), max_retries=2, backoff=4, cap=4, jitter=False)",
    ),
    (
        "@app.task(autoretry_for=(OSError,), retry_backoff=5, retry_kwargs={'max_retries': 7, 'countdown': 3})",
        "@app.task(autoretry_for=(OSError,), backoff=5, max_retries=7)",
    ),
    (
        "@app.task(autoretry_for=(OSError,), retry_backoff=False, retry_jitter=True, default_retry_delay=9, "
        "retry_kwargs={'max_retries': 7, 'countdown': 3})",
        "@app.task(autoretry_for=(OSError,), max_retries=7, backoff=3, cap=3, jitter=False)",
    ),
    ("@app.task(serializer='json')", "@app.task"),
]


RATES = {
    **dict.fromkeys(("'fast'", "'1e3/s'", "'9999999/s'", "True"), "by hand"),
    **dict.fromkeys(("-1", "settings.RATE", "f'{n}/m'", "read()"), "decide"),
}


@pytest.mark.parametrize("rate", RATES)
def test_rate_that_celery_or_the_files_do_not_tell_is_named(tmp_path: Path, rate: str) -> None:
    text = f"@app.task(rate_limit={rate})\ndef one(): ...\n"
    for head in (HEAD, HEAD.replace("celery", "celery5").replace("shared_task", "task")):
        report = migrate(tmp_path, text, head=head)
        (found,) = [use for use in report.findings if use.name == "rate_limit"]
        assert found.kind == RATES[rate]
        assert f": {rate} is " in found.advice


LIMITS = [
    "0.5/m",
    "100/h",
    "10/s",
    "10",
    "7.5",
    10,
    0.5,
    0.1,
    "600/m",
    "7/m",
    "40/m",
    "61/m",
    "100/m",
    "1000/m",
    "7/h",
]
"""Rates of Celery."""


@pytest.mark.parametrize("rate", LIMITS)
def test_rate_admits_as_many_jobs_in_the_long_run_as_celery(rate: object) -> None:
    limits = pytest.importorskip("celery.utils.time")
    text = translate_rate(rate)
    assert text
    ours = Rate(text).validate("t")
    assert ours.count / ours.span == pytest.approx(limits.rate(rate), rel=0.001)


@pytest.mark.parametrize("rate", LIMITS)
def test_migrated_rate_lets_no_more_begin_at_once_than_celery_in_a_second(rate: object) -> None:
    limits = pytest.importorskip("celery.utils.time")
    ours = Rate(translate_rate(rate) or "").validate("t")
    assert ours.count <= max(1, math.ceil(limits.rate(rate)))
    assert ours.span >= 1 or rate == "7.5"


@pytest.mark.parametrize(("before", "after"), DECORATORS)
def test_declaration_is_rewritten(tmp_path: Path, before: str, after: str) -> None:
    report = migrate(tmp_path, f"{before}\ndef one(): ...\n")
    assert f"{after}\ndef one(): ...\n" in (report.text or HEAD)


@pytest.mark.parametrize(
    "call",
    [
        "sms.apply_async((1,), queue='urgent')",
        "sms.s(1).apply_async(queue='urgent')",
        "sms.s(1).set(queue=QUEUE)",
        "sms.options(queue=OWN).delay(1)",
        "sms.signature((1,), queue='urgent')",
        "app.send_task('shop.tasks.sms', (1,), queue='urgent')",
    ],
)
def test_call_that_sends_a_task_with_a_rate_to_another_queue_stays_and_is_named(
    tmp_path: Path, call: str
) -> None:
    text = f"@app.task(rate_limit='5/s', queue='mail')\ndef sms(x): ...\n\nvalue = {call}\n"
    report = migrate(tmp_path, text)
    (found,) = report.of_kind("by hand")
    assert "of sms, which has a rate_limit" in found.name
    assert "@app.task(queue=...)" in found.advice
    assert f"value = {call}\n" in report.text
    report = migrate(tmp_path, re.sub("'urgent'|QUEUE|OWN", "'mail'", text))
    assert not report.of_kind("by hand")
    assert "queue" not in report.text.rpartition("value = ")[2] or "options" in call


OPTIONS = (
    "autoretry_for=(OSError,)", "retry_backoff=5", "retry_backoff=True", "retry_backoff=0", "retry_backoff_max=60",
    "retry_jitter=False", "retry_kwargs={'max_retries': 7, 'countdown': 3}", "default_retry_delay=9", "max_retries=4",
    "throws=(KeyError,)", "dont_autoretry_for=(KeyError,)", "bind=True", "acks_late=True", "rate_limit='10/m'",
    "time_limit=60", "on_failure=add", "serializer='json'", "priority=3", "base=Own", "**MORE",
)  # fmt: skip
"""Options of a task of Celery."""
CALL_OPTIONS = (
    "(1,)", "args=(1,)", "kwargs={'y': 2}", "kwargs={'countdown': 2}", "countdown=3", "queue='q'", "task_id='1'",
    "priority=3", "expires=4", "link=total.s()", "link_error=total.s()", "retry_policy={}", "serializer='json'",
    "**MORE",
)  # fmt: skip
"""Options of a call of Celery."""


def combine(options: Sequence[str], count: int) -> Iterator[str]:
    """Yield the arguments with every choice of so many options, each name once."""
    for chosen in itertools.combinations(options, count):
        names = [option.partition("=")[0] for option in chosen]
        if len({"args" if name == "(1,)" else name for name in names}) == count:
            yield ", ".join(sorted(chosen, key=lambda option: option.startswith("**")))


def test_every_choice_of_options_is_changed_to_valid_python(tmp_path: Path) -> None:
    made = [*combine(OPTIONS, 2), *itertools.islice(combine(OPTIONS, 3), 0, None, 5)]
    lines = [f"@app.task({options})\ndef one(self): ...\n" for options in made]
    made = [*combine(CALL_OPTIONS, 2), *itertools.islice(combine(CALL_OPTIONS, 3), 0, None, 8)]
    for sent in ("add", "add.s(1)", "chain(add.s(1), total.s())"):
        lines += [f"{sent}.apply_async({options})\n" for options in made]
    for number in range(0, len(lines), 50):  # a file with many changes takes longer than many files
        (tmp_path / f"tasks{number}.py").write_text(HEAD + "".join(lines[number : number + 50]))
    for report in migrate_project(tmp_path).report.files:
        ast.parse(report.text)
        assert [(use.line, use.name) for use in report.findings if use.name.startswith("the whole")] == []


def test_statement_whose_change_is_no_python_is_left_alone_with_the_reason(tmp_path: Path) -> None:
    kept = "@app.task(retry_backoff=5, backoff=3)\ndef one(x):\n    one.apply_async((1,))\n"
    report = migrate(tmp_path, f"value = add.apply_async((1,))\n{kept}value = one.apply_async((1,))\n")
    assert f"value = add.delay(1)\n{kept}value = one.delay(1)\n" in report.text
    (left,) = [use for use in report.findings if use.name.startswith("the whole")]
    assert (left.name, left.kind) == ("the whole statement", "by hand")
    assert "(keyword argument repeated: backoff)" in left.advice
    assert {"backoff", "apply_async", "@app.task"} <= {use.name for use in report.of_kind("by hand")}


def test_options_of_a_workflow_are_named_beside_what_else_is_made_by_hand(tmp_path: Path) -> None:
    report = migrate(tmp_path, "chain(add.s(1), total.s()).apply_async(countdown=3, link_error=add.s())\n")
    found = [use.name for use in report.of_kind("by hand")]
    assert {"apply_async(countdown=)", "link_error"} <= set(found)


@pytest.mark.parametrize("option", ["priority=3", "base=Own", "serializer='pickle'", "ignored=1"])
def test_option_without_a_counterpart_stays_so_that_it_is_refused_when_it_is_forgotten(
    tmp_path: Path, option: str
) -> None:
    report = migrate(tmp_path, f"@app.task({option}, acks_late=True)\ndef one(): ...\n")
    assert f"@app.task({option})\n" in report.text
    assert [found for found in report.of_kind("by hand") if option.partition("=")[0] in found.name]


def test_bound_task_keeps_its_retries(tmp_path: Path) -> None:
    text = """
@app.task(bind=True, default_retry_delay=60)
def one(self, x):
    try:
        print(f"{self.request.retries} {self.request.id}", self.name, self.request.hostname)
    except OSError as error:
        raise self.retry(exc=error, countdown=2 ** self.request.retries)
"""
    report = migrate(tmp_path, text)
    assert '{self.attempt - 1} {self.id}", self.task, self.worker)' in report.text
    assert "countdown=2 ** (self.attempt - 1))" in report.text
    assert "max_retries=3" in report.text
    assert "dont_autoretry_for=[Exception]" in report.text


SETTINGS = [
    ("app.conf.task_time_limit = 5", "app.configure(time_limit=5)"),
    ("app.conf['result_expires'] = 60", "app.configure(results_ttl=60)"),
    ("app.conf.update({'task_default_queue': 'q'}, task_acks_late=True)", "app.configure(default_queue='q')"),
    ("app.conf.update(CELERY_TASK_RESULT_EXPIRES=5)", "app.configure(results_ttl=5)"),
    (
        "app.conf.task_routes = {'a.*': {'queue': 'q'}, 'b': 'c'}",
        "app.configure(queue_routes={'a.*': 'q', 'b': 'c'})",
    ),
    ("app.conf.worker_concurrency = 4", "app.configure(worker_concurrency=4)"),
    ("app.autodiscover_tasks(['shop'])", "app.autodiscover(['shop'])"),
    ("app.config_from_object('shop.celeryconfig')", 'app.use_config("shop.celeryconfig")'),
]


@pytest.mark.parametrize(("before", "after"), SETTINGS)
def test_setting_is_rewritten(tmp_path: Path, before: str, after: str) -> None:
    assert f"{after}\n" in migrate(tmp_path, f"{before}\n").text


def test_module_that_is_discovered_is_included_as_celery_imports_it_itself(tmp_path: Path) -> None:
    for name in ("proj/__init__.py", "proj/jobs.py", "plain/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    report = migrate(tmp_path, "app.autodiscover_tasks(['proj.jobs', 'plain'])\n")
    assert "\napp.extend_include(['proj.jobs'])\napp.autodiscover(['plain'])\n" in report.text


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("test_shop.py", HEAD),
        ("tests.py", HEAD),
        ("conftest.py", HEAD),
        ("checks.py", f"from django.test import override_settings\n{HEAD}"),
        ("checks.py", f"import unittest\n{HEAD}"),
    ],
)
def test_wait_in_a_test_is_not_made_one_without_end(tmp_path: Path, name: str, head: str) -> None:
    report = migrate(tmp_path, "value = add.delay(1).get()\n", head=head, name=name)
    assert "value = add.delay(1).get()\n" in report.text


def test_variable_that_holds_an_immutable_signature_stands_behind_the_other_operator(tmp_path: Path) -> None:
    report = migrate(tmp_path, "last = add.si(2)\nvalue = add.s(1) | last\n")
    assert "last = add.s(2)\nvalue = add.s(1) >> last\n" in report.text


def test_part_of_the_configuration_that_is_changed_in_place_is_left_whole_and_named(tmp_path: Path) -> None:
    text = """from celery.schedules import crontab
app.conf.beat_schedule['x'] = {'task': 't', 'schedule': crontab()}
app.conf.beat_schedule.update({'y': {'task': 't', 'schedule': crontab()}})
"""
    report = migrate(tmp_path, text)
    assert text in report.text
    first, second = (found for found in report.of_kind("by hand") if found.name == "beat_schedule")
    assert first.advice == second.advice
    assert first.advice.startswith(
        'app.configure(schedules={name: {"task": ..., "cron": "0 3 * * *"}}), once'
    )


@pytest.mark.parametrize(
    "call", ["app.conf.beat_schedule = {ENTRIES}\n", "app.conf.beat_schedule.update({ENTRIES})\n"]
)
def test_beat_schedule_becomes_schedules(tmp_path: Path, call: str) -> None:
    entries = """
    "a": {"task": "t", "schedule": crontab(minute="*/5", hour=[1, 2], day_of_week="mon"), "args": (1,)},
    "b": {"task": "t", "schedule": 30.0, "relative": True, "options": {"queue": "q", "expires": 3}},
"""
    text = "from celery.schedules import crontab\n" + call.replace("ENTRIES", entries)
    report = migrate(tmp_path, text)
    assert "app.configure(schedules={" in report.text
    assert '"cron": "*/5 1,2 * * mon"' in report.text
    assert '"every": 30.0' in report.text
    assert '"options": {"queue": "q", "expires": 3}' in report.text
    assert "crontab" not in report.text


@pytest.mark.parametrize(
    "when", ["solar('sunset', 1, 2)", "crontab(day_of_week=1, day_of_month=1)", "when()"]
)
def test_beat_schedule_that_has_no_counterpart_stays_and_is_named(tmp_path: Path, when: str) -> None:
    report = migrate(tmp_path, f"app.conf.beat_schedule = {{'a': {{'task': 't', 'schedule': {when}}}}}\n")
    assert "beat_schedule=" in report.text
    assert [found.advice for found in report.of_kind("by hand") if found.name == "beat_schedule"]


SETTINGS_MODULE = """from celery.schedules import crontab, solar
CELERY_BEAT_SCHEDULE = {
    "night": {"task": "t", "schedule": crontab(hour=3, minute=0)},
    "dusk": {"task": "t", "schedule": solar("sunset", 1, 2)},
}
CELERY_TASK_ROUTES = [("a.*", {"queue": "q", "routing_key": "q"}), ("b", {"queue": "r", "priority": 3}), {"c": "d"}]
"""


def test_entry_without_a_counterpart_stays_in_the_old_setting_and_is_named_alone(tmp_path: Path) -> None:
    report = migrate(tmp_path, SETTINGS_MODULE, head="", name="settings.py")
    names = ['beat_schedule["dusk"]', 'task_routes["b"]']
    assert [found.name for found in report.of_kind("by hand") if "[" in found.name] == names
    assert '"night": {\n        "task": "t",\n        "cron": "0 3 * * *",\n    },\n}}' in report.text
    assert (
        '\nCELERY_BEAT_SCHEDULE = {"dusk": {"task": "t", "schedule": solar("sunset", 1, 2)}}\n' in report.text
    )
    assert '\nCELERY5["queue_routes"] = {"a.*": "q", "c": "d"}\n' in report.text
    assert '\nCELERY_TASK_ROUTES = {"b": {"queue": "r", "priority": 3}}\n' in report.text
    again = migrate(tmp_path, report.text, head="", name="settings.py")
    assert again.diff == ""
    left = {found.name for found in again.of_kind("by hand")}
    assert left >= {"CELERY_BEAT_SCHEDULE", "CELERY_TASK_ROUTES"}


def test_name_that_means_something_else_in_the_file_is_imported_under_the_old_one(tmp_path: Path) -> None:
    text = "from celery import shared_task\n\n\n@shared_task\ndef one(task): ...\n"
    report = migrate(tmp_path, text, head="")
    assert report.text == text.replace(
        "from celery import shared_task", "from celery5 import task as shared_task"
    )


def test_all_else_in_a_file_stays_as_it_was_written(tmp_path: Path) -> None:
    text = "# -*- coding: utf-8 -*-\nfrom celery import shared_task  # the old one\n\nx = ( 1,\n\t2 )\n"
    text += "\n@shared_task\ndef é(): ...\n"
    report = migrate(tmp_path, text, head="")
    assert report.text == text.replace("from celery import shared_task", "from celery5 import task").replace(
        "@shared_task", "@task"
    )


def test_line_ends_of_windows_stay(tmp_path: Path) -> None:
    path = tmp_path / "tasks.py"
    path.write_bytes(b"from celery import shared_task\r\n\r\n@shared_task\r\ndef a(): ...\r\n")
    (report,) = migrate_project(tmp_path).report.files
    assert report.text.encode() == b"from celery5 import task\r\n\r\n@task\r\ndef a(): ...\r\n"


def test_project_without_an_application_is_told_how_often_jobs_are_tried(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("from celery import shared_task\n\n@shared_task\ndef a(): ...\n")
    (note,) = migrate_project(tmp_path).report.notes
    assert "RetryPolicy(max_retries=0)" in note


COMMAND_LINES = [
    ("celery -A proj worker -l INFO -c4", "celery5 -A proj worker start --log-level info --cpu-slots 4"),
    (
        "celery --app=proj.app:x worker -Q celery,mail",
        "celery5 -A proj.app worker start --queues default,mail",
    ),
    ("celery -A proj worker -B", "celery5 -A proj worker start, and celery5 -A proj scheduler start"),
    (
        "celery -A proj worker -P gevent -c 500",
        "celery5 -A proj worker start --concurrency 500, with async def tasks",
    ),
    (
        "celery -A proj worker --max-tasks-per-child=1000",
        "celery5 -A proj worker start --max-jobs 1000, where --max-jobs counts for the whole worker, not for each "
        "child: multiply it by the concurrency",
    ),
    ("celery worker -A proj -n w@box -E", "celery5 -A proj worker start --name w"),
    ("celery worker -A proj -n %n.%h", "celery5 -A proj worker start"),
    (
        "celery worker -A proj -n w@%h -E",
        "celery5 -A proj worker start, and --name w where only one worker has that name: without it the name is the "
        "host and the process",
    ),
    ("/venv/bin/celery -A proj beat -S x", "celery5 -A proj scheduler start, twice or more"),
    (
        "celery -A proj flower",
        "celery5 -A proj dashboard start and celery5 -A proj top, and /metrics for Prometheus",
    ),
    ("celery -A proj inspect ping", "celery5 -A proj worker ping"),
    ('["celery", "-A", "proj", "worker", "-Q", "a,b"]', "celery5 -A proj worker start --queues a,b"),
]


@pytest.mark.parametrize(("line", "advice"), COMMAND_LINES)
def test_command_line_is_translated(tmp_path: Path, line: str, advice: str) -> None:
    (tmp_path / "Procfile").write_text(f"# celery -A proj worker\nworker: {line}\n")
    (report,) = migrate_project(tmp_path).report.files
    ((found,),) = [report.of_kind("by hand")]
    assert (found.line, found.advice) == (2, advice)


def test_command_line_of_a_django_project_is_one_of_manage_py(tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text("")
    (tmp_path / "Procfile").write_text(
        "w: celery -A proj worker -c 4 -B\nb: celery -A proj beat\np: celery -A proj inspect ping\n"
    )
    (report,) = migrate_project(tmp_path).report.files
    assert [found.advice for found in report.of_kind("by hand")] == [
        "python manage.py celery5 worker start --cpu-slots 4, and python manage.py celery5 scheduler start",
        "python manage.py celery5 scheduler start, twice or more",
        "python manage.py celery5 worker ping",
    ]


@pytest.mark.parametrize(
    ("name", "line", "required"),
    [
        ("requirements.txt", "celery[redis]>=5.3", "celery[redis]"),
        ("requirements/base.in", "celery", "celery"),
        ("dev-requirements.txt", "celery == 5.4  # the queue", "celery"),
        ("pyproject.toml", 'dependencies = ["django>=5", "celery[redis]>=5"]', "celery[redis]"),
        ("pyproject.toml", '    "celery",', "celery"),
        ("pyproject.toml", 'celery = {extras = ["redis"], version = "^5"}', "celery"),
        ("requirements.txt", "celery5", None),
        ("requirements.txt", "celery-types==0.2", None),
        ("requirements.txt", "django-celery-beat", "django-celery-beat"),
        ("requirements.txt", "kombu>=5", "kombu"),
        ("pyproject.toml", 'dependencies = ["flower>=2"]', "flower"),
        ("pyproject.toml", 'keywords = ["celery"]', None),
        ("setup.cfg", "    celery>=5", "celery"),
        ("setup.py", 'setup(install_requires=["celery[redis]>=5"])', "celery[redis]"),
        ("environment.yml", "  - celery=5.4", "celery"),
        ("Dockerfile", "RUN pip install gunicorn 'celery[redis]==5.4'", "celery[redis]"),
        (".github/workflows/ci.yml", "      - run: pip install celery", "celery"),
        (".git/workflows/ci.yml", "      - run: pip install celery", None),
    ],
)
def test_celery_among_the_requirements_is_named(
    tmp_path: Path, name: str, line: str, required: str | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text(f"[project]\n{line}\n")
    found = [use for file in migrate_project(tmp_path).report.files for use in file.findings]
    assert [(use.line, use.name) for use in found] == ([] if required is None else [(2, required)])
    assert all(
        use.advice.startswith("celery5[")
        or (use.advice.startswith("leave it out") and "celery5" in use.advice)
        for use in found
    )


JOINED = [
    (
        "run.sh",
        "exec celery -A proj worker \\\n    --queues a,b \\\n    -c 4\n",
        "--queues a,b --cpu-slots 4",
    ),
    (
        "w.conf",
        "command=/v/bin/celery -A proj worker\n    -Q a\n    --concurrency=2\nautostart=true\n",
        "--queues a --cpu-slots 2",
    ),
    (
        "c.yml",
        "command: >\n  celery -A proj worker -l INFO\n  -Q a\nother: -x\n",
        "--log-level info --queues a",
    ),
    (
        "k.yaml",
        "command:\n  - celery\n  - -A\n  - proj\n  - worker\n  - -Q\n  - a\n- name: b\n",
        "--queues a",
    ),
    ("k.yaml", 'command: ["celery"]\nargs: ["-A", "proj", "worker", "-Q", "a"]\n', "--queues a"),
    ("Dockerfile", 'ENTRYPOINT ["celery", "-A", "proj"]\nCMD ["worker", "-Q", "a"]\n', "--queues a"),
    (".github/workflows/ci.yml", "- run: celery -A proj worker -Q a\n", "--queues a"),
    ("README.md", "Run `celery -A proj worker -Q a` here.\n", "--queues a"),
    ("package.json", '"scripts": {"w": "celery -A proj worker -Q a"}\n', "--queues a"),
    ("dev.py", 'subprocess.run(["celery", "-A", "proj", "worker", "-Q", "a"])\n', "--queues a"),
    ("dev.py", 'run("celery -A proj worker -Q a")\n', "--queues a"),
]


@pytest.mark.parametrize(("name", "text", "flags"), JOINED)
def test_command_over_several_lines_or_in_code_is_translated_whole(
    tmp_path: Path, name: str, text: str, flags: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text(text)
    ((found,),) = [report.of_kind("by hand") for report in migrate_project(tmp_path).report.files]
    assert found.advice == f"celery5 -A proj worker start {flags}"


SCRIPTS = [
    (
        "a.service",
        "ExecStart=/bin/sh -c '${CELERY_BIN} -A $CELERY_APP multi start w1'\n",
        "worker start --processes 4",
    ),
    ("celeryd", 'CELERYD_OPTS="--time-limit=300"\n', "leave it out, and the script"),
    (
        ".env.example",
        "CELERY_RESULT_BACKEND=redis://redis:6379/0\n",
        "leave it out when no code reads it any more",
    ),
    (
        "compose.yml",
        "      CELERY_RESULT_BACKEND: redis://redis:6379/0\n",
        "leave it out when no code reads it",
    ),
    (
        "compose.yml",
        '      - "CELERY_RESULT_BACKEND=redis://redis/0"\n',
        "leave it out when no code reads it",
    ),
    ("Dockerfile", "ENV CELERY_RESULT_BACKEND=redis://redis:6379/0\n", "leave it out when no code reads it"),
    ("Makefile", 'stop:\n\tpkill -f "celery worker"\n', "worker shutdown stops workers"),
]


@pytest.mark.parametrize(("name", "text", "advice"), SCRIPTS)
def test_scripts_and_their_options_are_listed_with_what_replaces_them(
    tmp_path: Path, name: str, text: str, advice: str
) -> None:
    (tmp_path / name).write_text(text)
    ((found,),) = [report.of_kind("by hand") for report in migrate_project(tmp_path).report.files]
    assert advice in found.advice


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "A celery worker runs the jobs.\n"),
        ("a.py", '"""Run celery -A proj worker now."""\n'),
        (".env", "CELERY_BROKER_URL=redis://a/0\n"),
        (".cache/a.yml", "run: celery -A proj worker\n"),
    ],
)
def test_prose_and_variables_that_celery5_also_reads_are_not_listed(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text(text)
    assert migrate_project(tmp_path).report.files == ()


def test_text_that_only_has_the_word_is_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg.toml").write_text(
        "dependencies = ['celery>=5', 'django-celery-beat']\ncelery = 'x'\n"
    )
    assert migrate_project(tmp_path).report.files == ()


def test_result_that_is_no_python_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.migration.rewrite.is_whole", lambda _text: False)
    report = migrate(tmp_path, "add.apply_async()\n")
    assert (report.text, report.diff, report.of_kind("change")) == ("", "", [])
    assert report.of_kind("by hand")


def test_every_result_is_python(tmp_path: Path) -> None:
    for before, _ in CALLS:
        text = migrate(tmp_path, textwrap.dedent(f"def f():\n    if 1:\n        value = {before}\n")).text
        ast.parse(text)


def test_base_class_is_one_line_that_names_what_it_kept_as_resource(tmp_path: Path) -> None:
    report = migrate(
        tmp_path,
        """
from celery import Task, Celery

app = Celery("shop")


class ApiTask(Task):
    _client: object = None
    retries = 3

    @property
    def client(self): ...

    def on_failure(self, *words): ...


@app.task(base=ApiTask, bind=True)
def pay(self):
    self.client.open()
    self.client.pay()
""",
        head="",
    )
    found = {finding.name: finding.advice for finding in report.of_kind("by hand")}
    names = [finding.name for finding in report.of_kind("by hand")]
    assert names.count("self.client") == 1
    assert (
        "; here: _client, retries, client; on_failure: on_failure= of the task"
        in found["class ApiTask(Task)"]
    )
    assert [name for name in names if name.startswith("ApiTask.")] == []
    for name in ("class ApiTask(Task)", "self.client"):
        assert "what it kept is a Resource" in found[name]
        assert "boot step" not in found[name]
    assert "options(on_failure=) of a call replaces" in found["class ApiTask(Task)"]


def test_imports_that_are_there_or_unused_are_not_written(tmp_path: Path) -> None:
    report = migrate(
        tmp_path,
        """
import logging
from celery import Celery
from celery.schedules import crontab
from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)
app = Celery("shop")
app.conf.beat_schedule = {"a": {"task": "shop.a", "schedule": crontab(hour=3)}}
""",
        head="",
    )
    assert report.text.count("import logging") == 1
    assert '"cron": "* 3 * * *"' in report.text
    assert "import App, RetryPolicy\n" in report.text


@pytest.mark.parametrize("operator", ["=", "+="])
def test_beat_among_installed_apps_is_named(tmp_path: Path, operator: str) -> None:
    text = f'INSTALLED_APPS {operator} ["django_celery_beat"]\n'
    report = migrate(tmp_path, text, head="", name="settings.py")
    assert [finding.name for finding in report.of_kind("by hand")] == ["django_celery_beat"]


CAUGHT = """
from celery.exceptions import MaxRetriesExceededError


@app.task(bind=True)
def sync(self, number):
    try:
        raise self.retry()
    except MaxRetriesExceededError:
        total.delay([number])
"""


def test_an_error_that_no_retry_raises_is_left_and_named(tmp_path: Path) -> None:
    report = migrate(tmp_path, CAUGHT)
    assert "except MaxRetriesExceededError:" in report.text
    (finding,) = [use for use in report.of_kind("by hand") if use.name == "MaxRetriesExceededError"]
    assert "on_failure=" in finding.advice
    caught = CAUGHT.replace("raise self.retry()", "add.delay(1).get()")
    assert "except TaskFailed:" in migrate(tmp_path, caught, name="tasks.py").text


CONFIGURED = """
import os

from celery.utils.log import get_task_logger

from shop.celery import app

log = get_task_logger(__name__)
app.conf.update(broker_url="redis://localhost:1/0", task_time_limit=3, time_limit=5)


@app.task(bind=True, acks_late=True)
def note(self):
    log.info(self.request.id)
"""


def test_statement_that_cannot_be_changed_is_named_and_the_rest_of_the_file_is_changed(
    tmp_path: Path,
) -> None:
    report = migrate(tmp_path, CONFIGURED, head="")
    (left,) = [use for use in report.of_kind("by hand") if use.name == "the whole statement"]
    assert left.line == CONFIGURED.splitlines().index("log = get_task_logger(__name__)") + 2
    assert "task_time_limit=3, time_limit=5)" in report.text
    assert "@app.task(bind=True)\ndef note(self):\n    log.info(self.id)\n" in report.text
    assert {"broker_url", "task_time_limit"} <= {use.name for use in report.of_kind("by hand")}


def test_file_whose_changes_its_encoding_cannot_hold_is_left_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "celery5.migration.rewrite.SourceFile.encode", lambda _file, text: f"{text}\udc80".encode()
    )
    report = migrate(tmp_path, CONFIGURED, head="")
    assert report.text == ""
    assert (
        report.of_kind("by hand")[0].advice
        == "it is left as it is: its encoding, utf-8, has no character for a change"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import os\n\nfrom celery.utils.log import get_task_logger\n\nfrom shop.celery import app\n\n",
            "import logging\nimport os\n\nfrom shop.celery import app\n\n",
        ),
        (
            "import abc\nfrom os import path\n\nfrom celery.utils.log import get_task_logger\n\n",
            "import abc\nimport logging\nfrom os import path\n\n",
        ),
        (
            "from os import path\nfrom celery.utils.log import get_task_logger\n\n\n",
            "import logging\nfrom os import path\n\n\n",
        ),
        (
            "from shop.celery import app\nfrom celery.utils.log import get_task_logger\n\n",
            "import logging\n\nfrom shop.celery import app\n\n",
        ),
        (
            "from celery.utils.log import get_task_logger\nfrom shop.celery import app\n\n",
            "import logging\n\nfrom shop.celery import app\n\n",
        ),
        (
            '"""A module."""\n\nfrom celery.utils.log import get_task_logger\n\n',
            '"""A module."""\n\nimport logging\n\n',
        ),
        (
            "from celery import shared_task\nfrom celery.utils.log import get_task_logger\n\n",
            "import logging\n\nfrom celery5 import task\n\n",
        ),
    ],
)
def test_logging_is_imported_where_isort_has_it_with_no_empty_line_too_many(
    tmp_path: Path, before: str, after: str
) -> None:
    task = "@shared_task\ndef a(): ...\n" if "shared_task" in before else ""
    report = migrate(tmp_path, f"{before}log = get_task_logger(__name__)\n{task}", head="")
    assert report.text == f"{after}log = logging.getLogger(__name__)\n{task.replace('shared_task', 'task')}"


SETTING_LINES = """
from celery import Celery

app = Celery("a")

app.config_from_object("django.conf:settings")

app.conf.enable_utc = True


def a(): ...
"""


def test_removed_statements_leave_the_empty_lines_of_one_place(tmp_path: Path) -> None:
    assert migrate(tmp_path, SETTING_LINES, head="").text.endswith("(max_retries=0))\n\n\ndef a(): ...\n")


def test_job_id_among_the_arguments_of_another_job_is_changed_with_them(tmp_path: Path) -> None:
    report = migrate(
        tmp_path, "@app.task(bind=True)\ndef note(self): add.apply_async((self.request.id,), countdown=2)\n"
    )
    assert "add.options(countdown=2).delay(self.id)" in report.text


def test_named_signature_with_options_gets_the_form_of_celery5(tmp_path: Path) -> None:
    report = migrate(
        tmp_path, 'from celery import signature\nsignature("jobs.other", args=(1,), queue="q").delay()\n'
    )
    assert 'app.signature("jobs.other").task.options(queue="q").s(1).delay()' in report.text
    assert "import signature" not in report.text
