"""Mistakes: what is said to celery5 wrongly is refused in one line that says what to say instead."""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from celery5 import App, AsyncResult, BrokerUnavailable, Misconfigured, chain, fork, gather, revoke, wait
from celery5.cli.main import cli
from celery5.cli.standalone.processes import start
from celery5.cli.terminal.errors import CELERY_FLAG_HINTS, EXIT_USAGE, run_reporting_errors
from celery5.config.settings import Settings
from celery5.protocol.job.job import Options
from celery5.tasks.declaration import TaskOptions

app = App("mistakes", broker="redis://127.0.0.1:1/0", backlog=0)


@app.task
def double(a: int) -> int:
    return 2 * a


@pytest.mark.parametrize(
    ("option", "value"),
    [("id", "x"), ("key", "k"), ("countdown", 5), ("eta", datetime(2030, 1, 1, tzinfo=UTC))],
)
def test_what_is_for_one_call_is_refused_in_a_declaration(option: str, value: Any) -> None:
    with pytest.raises(Misconfigured, match=rf"^{option} is for one call: task.options\({option}=...\)$"):
        app.task(name="other", **{option: value})(lambda: None)
    assert "other" not in app.tasks
    assert double.options(**{option: value}).job(1).task == double.name


def test_an_option_that_is_not_known_is_answered_with_the_page_that_lists_all() -> None:
    message = "^task option 'colour' is not known; all options: celery5 docs tasks$"
    with pytest.raises(Misconfigured, match=message):
        app.task(colour=1)  # type: ignore[call-overload]
    with pytest.raises(Misconfigured, match=message):
        double.options(colour=1)  # type: ignore[call-arg]
    page = (Path(__file__).parents[3] / "docs/guide/tasks.md").read_text()
    names = {*Options.__struct_fields__, *TaskOptions.__annotations__}
    assert [name for name in names if f"`{name}" not in page] == []


def test_a_setting_that_is_not_known_is_answered_with_the_page_that_lists_all() -> None:
    with pytest.raises(Misconfigured, match=r"'colour' is not known; all settings: celery5 docs settings$"):
        _ = App("shop", colour=1).settings  # type: ignore[call-arg]
    page = (Path(__file__).parents[3] / "docs/guide/settings.md").read_text()
    assert [name for name in Settings.__struct_fields__ if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("wrong", "right"), [("nmae", "name"), ("dedupe", "deduplicate"), ("max_retry", "max_retries")]
)
def test_an_option_that_is_misspelt_is_answered_with_the_nearest(wrong: str, right: str) -> None:
    message = f"'{wrong}' is not known; did you mean '{right}'[?] all options: celery5 docs tasks$"
    with pytest.raises(Misconfigured, match=message):
        app.task(**{wrong: 1})  # type: ignore[call-overload]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A free task in a module that two applications include."""
    module = ModuleType("mistakes_free")
    exec("from celery5 import task\n@task\ndef shared(n: int) -> int:\n    return n\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return vars(module)["shared"]


@pytest.mark.parametrize("way", ["send_many", "send_jobs"])
def test_a_task_of_one_application_is_not_sent_through_another(way: str, free: Any) -> None:
    other = App("other", broker="redis://127.0.0.1:1/0", include="mistakes_free", backlog=0)
    third = App("third", broker="redis://127.0.0.1:1/0", include="mistakes_free", backlog=0)

    def send(through: App, task: Any) -> None:
        through.send_many([task.s(1)]) if way == "send_many" else through.send_jobs([task.job(1)])

    with pytest.raises(
        Misconfigured, match=r"double is of application 'mistakes', not of 'other': send it there, or"
    ):
        send(other, double)
    # A free task is of both that include it, whichever has found it first.
    for through in (other, third):
        with pytest.raises(BrokerUnavailable):
            send(through, free)
        with pytest.raises(BrokerUnavailable):
            send(through, free.options(queue="else"))
    with pytest.raises(Misconfigured, match=r"shared is of application '(other|third)', not of 'mistakes'"):
        send(app, free)


@app.task
def mail(archive: str, order: int, locale: str = "de") -> None: ...


ROOM = "if the first one was left out, write partial(...) in place of s(...), or pass those with a default by keyword"
END = ", or write a >> b, which passes no value"


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (mail.s(250, "en"), f"('archive' takes str, got int): {ROOM}; else leave it out{END}"),
        (mail.s("a.zip", 250), f"has all its arguments: {ROOM}; else leave it out{END}"),
        (mail.s("a.zip", 250, "en"), f"has all its arguments: leave the first one out{END}"),
        (mail.s(archive="a.zip", order=250), f"has all its arguments: leave the first one out{END}"),
        (double.s(1) >> double.s(2), f"has all its arguments: leave the first one out{END}"),
    ],
)
def test_call_with_all_its_arguments_behind_a_step_is_refused_with_both_cures(step: Any, says: str) -> None:
    for compose in (lambda: double.s(1) | step, lambda: chain(double.s(1), step), lambda: fork(step, step)):
        with pytest.raises(Misconfigured, match=f"{re.escape(says)}$"):
            compose()
    for partial in cast("list[Any]", [mail.s(250, locale="en"), mail.partial(250, "en")]):
        assert (double.s(1) | partial).tree is not None


def test_what_is_no_signature_and_what_is_no_job_is_not_sent() -> None:
    handle: AsyncResult[Any] = app.result("x")
    job, given = double.job(1), cast("Any", None)
    for given, says in [
        (double.s(1), r"send_many takes a list, got a signature: write send_many\(\[task.s\(...\)\]\)"),
        (5, "send_many takes a list, got 5"),
        ("abc", "send_many takes a list, got 'abc'"),
        ([handle], r"signatures, got <AsyncResult x>: it was sent already; write task.s\(...\), not delay"),
        ([job], "send it with send_jobs"),
        ([double], r"send_many takes signatures, got a task: write task.s\(...\)"),
    ]:
        with pytest.raises(TypeError, match=says):
            app.send_many(given)  # type: ignore[arg-type]
    for given, says in [
        (job, r"send_jobs takes a list, got .*: write send_jobs\(\[task.job\(...\)\]\)"),
        ([double.s(1)], "send_jobs takes jobs, got a signature: send it with send_many"),
        ([job.to_bytes()], r"make it a job with Job.from_bytes\(...\)"),
        ([None], r"send_jobs takes jobs, got None: write task.job\(...\)"),
    ]:
        with pytest.raises(TypeError, match=says):
            app.send_jobs(given)  # type: ignore[arg-type]


def test_a_generator_of_signatures_is_sent_like_a_list() -> None:
    with pytest.raises(BrokerUnavailable):
        app.send_many(double.s(n) for n in range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", CELERY_FLAG_HINTS)
def test_a_flag_of_celerys_is_answered_with_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_reporting_errors(lambda: cli.main(["worker", "start", flag, "4"], standalone_mode=False))
    assert code == EXIT_USAGE
    printed = capsys.readouterr().err
    assert printed.startswith("Error: No such option")
    assert flag in printed
    assert printed.endswith(f"; {CELERY_FLAG_HINTS[flag]}\n")
    for ours in re.findall(r"--[a-z-]+", CELERY_FLAG_HINTS[flag]):
        assert ours in {name for param in start.params for name in param.opts}


def test_an_id_is_a_text_and_a_task_is_a_task() -> None:
    with pytest.raises(TypeError, match="a job's id is a text, got 5"):
        app.result(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a job's id is a text, got <AsyncResult x>"):
        app.find(app.result("x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="task is 'zzz': give the task itself, not its name"):
        app.result("x", task="zzz")  # type: ignore[arg-type]
    with pytest.raises(Misconfigured, match="application name 5: use 1 to 200 printable characters"):
        App(5)  # type: ignore[arg-type]


def test_a_rate_is_a_number_or_a_text_as_on_the_command_line() -> None:
    for said in ("50/s", "100/m", 5, 0.5, "7"):
        with pytest.raises(BrokerUnavailable):
            app.dlq.replay(rate=said)
    for wrong, says in [
        ("fast", "'fast' is not a rate: write 50/s"),
        (0, "rate is 0: give a number"),
        (b"5", "rate is b'5'"),
    ]:
        with pytest.raises(Misconfigured, match=says):
            app.dlq.replay(rate=wrong)  # type: ignore[arg-type]


def test_the_relay_of_the_example_says_how_it_is_called() -> None:
    words = [sys.executable, "-m", "celery5.examples.outbox.relay"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr[:53]) == (
        1,
        "Usage: python -m celery5.examples.outbox.relay DATABA",
    )


def test_wait_refuses_other_things_than_handles_and_number_limits() -> None:
    handle: AsyncResult[Any] = app.result("x")
    for ask in (gather, wait, revoke):
        name = ask.__name__
        with pytest.raises(
            TypeError, match=rf"^{name} takes a list of handles, got <AsyncResult x>: write {name}\("
        ):
            ask(cast("Any", handle))
        with pytest.raises(
            TypeError, match=rf"^{name} takes handles of jobs, got 'x'; app.result\(id\) makes one"
        ):
            ask(cast("Any", [handle, "x"]))
    for limit in ("1", True):
        with pytest.raises(TypeError, match=f"timeout is {limit!r}: give seconds, or None"):
            handle.get(timeout=cast("Any", limit))
        with pytest.raises(TypeError, match=f"timeout is {limit!r}: give seconds, or None"):
            gather([handle], timeout=cast("Any", limit))
