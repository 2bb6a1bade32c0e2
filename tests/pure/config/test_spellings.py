"""Spellings: who writes a name of Celery's or Fennel's is told ours."""

import importlib
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import celery5
from celery5 import App, Misconfigured, Retry, chord
from celery5.cli.main import COMMANDS, cli
from celery5.cli.terminal.errors import EXIT_USAGE, run_reporting_errors
from celery5.config.settings import Settings
from celery5.hints import CELERY, FENNEL, NameKind, find_hint
from celery5.protocol.job.job import Options
from celery5.runners.context import CELERY_EQUIVALENTS
from celery5.tasks import CurrentJob
from celery5.tasks.declaration import TaskOptions

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
app = App("spellings")


@app.task
def add(a: int, b: int) -> int:
    return a + b


THINGS: Mapping[NameKind, Any] = {
    "task": add,
    "signature": add.s(1, 2),
    "workflow": add.s(1, 2) | add.s(3),
    "result": app.result("x"),
    "app": app,
    "control": app.control,
}
ATTRIBUTES = [
    (thing, name) for table in (CELERY, FENNEL) for thing in THINGS for name in table.get(thing, ())
]


@pytest.mark.parametrize(("thing", "name"), ATTRIBUTES)
def test_an_attribute_of_old_is_refused_with_its_name_today(thing: NameKind, name: str) -> None:
    assert name not in dir(THINGS[thing])
    with pytest.raises(AttributeError, match=re.escape(find_hint(thing, name))) as caught:
        getattr(THINGS[thing], name)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert "Did you mean: '" not in shown  # a second guess of Python itself, after the hint


@pytest.mark.parametrize("thing", THINGS)
def test_any_other_attribute_is_just_not_there(thing: NameKind) -> None:
    one = THINGS[thing]
    with pytest.raises(AttributeError, match=f"^'{type(one).__name__}' object has no attribute 'colour'$"):
        one.colour  # noqa: B018
    with pytest.raises(AttributeError) as caught:
        getattr(one, "colour")  # noqa: B009  a checker knows better
    assert (caught.value.name, caught.value.obj) == ("colour", one)


def test_a_signature_is_not_called() -> None:
    with pytest.raises(TypeError, match=r"a signature is sent, not called: write .delay\(\), .start\(\), or"):
        add.s(1, 2)()  # type: ignore[operator]
    with pytest.raises(
        TypeError, match=r"write chord\(header, body\).start\(\), not chord\(header\)\(body\)$"
    ):
        chord([add.s(1, 2)])(add.partial(1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^a workflow is started, not called: write .start\(\)$"):
        (add.s(1, 2) | add.s(3))()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("thing", "name"), [item for item in ATTRIBUTES if item[0] in ("signature", "workflow")]
)
def test_what_is_named_instead_of_a_method_is_one_of_the_object(thing: NameKind, name: str) -> None:
    hint = CELERY[thing][name]
    for method in re.findall(r"(?<![.\w])(\w+)\(", hint.replace("task(", "").replace("get()", "")):
        assert callable(getattr(THINGS[thing], method)), hint


def test_partial_that_celery_would_send_says_what_it_lacks() -> None:
    for partial in (add.s(b=2), add.s(b=2) | add.s(b=3)):
        with pytest.raises(Misconfigured, match=r"lacks .*: give it, or put this behind another step"):
            partial.apply_async()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CELERY_EQUIVALENTS)
def test_the_running_job_knows_what_celery_calls_it(name: str) -> None:
    job = CurrentJob("id", "shop.t", "default", 2, "worker")
    assert name not in CurrentJob.__struct_fields__
    with pytest.raises(
        AttributeError,
        match=re.escape(
            f"for Celery's {name} there is {CELERY_EQUIVALENTS[name]} (see celery5 docs from-celery"
        ),
    ):
        getattr(job, name)
    with pytest.raises(AttributeError, match=r"^'CurrentJob' object has no attribute 'colour'$"):
        getattr(job, "colour")  # noqa: B009  a checker knows better
    assert re.search(rf"\b{name}\b", (GUIDE / "from-celery.md").read_text())


def test_a_bound_task_of_old_is_tried_again_as_it_was() -> None:
    job, why = CurrentJob("id", "shop.t", "default", 1, "worker"), ConnectionError("busy")
    with pytest.raises(Retry) as caught:
        raise job.retry(exc=why, countdown=5, max_retries=2)
    assert (caught.value.__cause__, caught.value.countdown, caught.value.max_retries) == (why, 5, 2)
    with pytest.raises(Misconfigured, match="exc is 'busy': give the error itself"):
        job.retry(exc="busy")  # type: ignore[arg-type]


def test_options_and_settings_of_old_are_refused_with_their_name_today() -> None:
    with pytest.raises(Misconfigured, match="for Celery's acks_late there is nothing: jobs are always"):
        add.options(acks_late=True)  # type: ignore[call-arg]
    with pytest.raises(Misconfigured, match="for Fennel's retries there is max_retries"):
        add.options(retries=3)  # type: ignore[call-arg]
    with pytest.raises(Misconfigured, match="for Celery's worker_prefetch_multiplier there is nothing"):
        App("spellings", worker_prefetch_multiplier=1)  # type: ignore[call-arg]
    with pytest.raises(Misconfigured, match="for Fennel's redis_url there is broker"):
        App("spellings", redis_url="redis://127.0.0.1")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    # Those that are packages here, too, are found.
    "name",
    [name for name in CELERY["module"] if name not in ("bootsteps", "contrib")],
)
def test_importing_a_name_of_old_says_its_name_today(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(find_hint("module", name))):
        exec(f"from celery5 import {name}")


@pytest.mark.parametrize(
    "name", ["schedules", "signals", "beat", "exceptions", "utils.log", "contrib.abortable"]
)
def test_importing_a_module_of_old_says_what_there_is_today(name: str) -> None:
    said = find_hint("module", name.partition(".")[0])
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)) as caught:
        importlib.import_module(f"celery5.{name}")
    assert said
    assert caught.value.name == f"celery5.{name.partition('.')[0]}"


def test_a_module_that_nobody_ever_had_is_just_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'celery5\.colour'$"):
        importlib.import_module("celery5.colour")


@pytest.mark.parametrize("words", CELERY["command"])
def test_a_command_of_old_is_refused_with_its_name_today(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_reporting_errors(
        lambda: cli.main(["-A", "shop", *words.split()], "celery5", standalone_mode=False)
    )
    printed = capsys.readouterr().err
    assert code == EXIT_USAGE
    assert printed.startswith(f"Error: No such command {words.split()[0]!r}; for Celery's {words} there is ")
    assert find_hint("command", words) in printed


@pytest.mark.parametrize(
    ("typed", "theirs"),
    [
        ("worker inspect", "inspect"),
        ("worker inspect active", "inspect active"),
        ("worker registered", "inspect registered"),
        ("worker rate_limit shop.add 10/m", "control rate_limit"),
        ("worker status", "status"),
        ("queue inspect", "inspect"),
        ("inspect --json active", "inspect active"),
        ("inspect -d active", "inspect active"),
        ("multi start w1", "multi"),
        ("purge -f", "purge"),
        ("list bindings", "list"),
        ("amqp queue.purge mail", "amqp"),
    ],
)
def test_a_command_of_old_is_found_after_a_group_and_beside_options(
    typed: str, theirs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_reporting_errors(lambda: cli.main(typed.split(), "celery5", standalone_mode=False))
    printed = capsys.readouterr().err
    assert (code, printed.count("\n")) == (EXIT_USAGE, 1)
    assert find_hint("command", theirs) in printed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("worker -l info", "here it is --log-level after celery5 worker start"),
        ("worker --log-level info", "options of a worker come after celery5 worker start"),
        ("worker -A shop", "it comes before the command: celery5 -A module[:app] COMMAND"),
        ("worker start -l info", "here it is --log-level\n"),
    ],
)
def test_the_options_of_celerys_worker_are_answered_with_their_place(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_reporting_errors(lambda: cli.main(typed.split(), "celery5", standalone_mode=False))
    assert said in capsys.readouterr().err


def test_every_group_and_command_of_celery_is_answered() -> None:
    names = "active reserved scheduled registered stats ping revoked active_queues conf report query_task"
    control = (
        "revoke rate_limit time_limit shutdown add_consumer cancel_consumer pool_grow pool_shrink autoscale"
    )
    alone = "inspect control purge events beat flower multi result call status shell list amqp logtool graph upgrade"
    typed = [f"inspect {name}" for name in names.split()] + [f"control {name}" for name in control.split()]
    assert [words for words in (*typed, *alone.split()) if words not in CELERY["command"]] == []


def test_every_command_that_is_named_instead_takes_its_words() -> None:
    said = " ".join(CELERY["command"].values()) + " " + " ".join(CELERY["app"].values())
    named = re.findall(
        r"celery5 ((?:-A \w+ )?[a-z]+(?: (?!and\b|whose\b|removes\b|on\b|or\b)[a-z-]+)?)", said
    )
    assert len(named) > 20
    for words in named:
        cli.main([*words.split(), "--help"], standalone_mode=False)


def test_any_other_name_is_just_not_in_celery5() -> None:
    with pytest.raises(AttributeError, match=r"^module 'celery5' has no attribute 'colour'$"):
        getattr(celery5, "colour")  # noqa: B009  a checker knows better
    with pytest.raises(ImportError, match="cannot import name 'colour'"):
        exec("from celery5 import colour")
    assert not hasattr(celery5, "colour")


def test_no_name_of_old_is_one_of_ours() -> None:
    assert not set(CELERY["command"]) & set(COMMANDS)
    assert not set(CELERY["module"]) & set(celery5.__all__)
    for table in (CELERY, FENNEL):
        assert not set(table.get("option", ())) & {*Options.__struct_fields__, *TaskOptions.__annotations__}
        assert not set(table.get("setting", ())) & set(Settings.__struct_fields__)


WITHOUT_RARE_NAMES: frozenset[NameKind] = frozenset(
    ("setting", "command", "signal", "workflow", "result option")
)
"""What the page itself has in full; the rare names of other things are on a page with Celery's words."""


@pytest.mark.parametrize(("page", "table"), [("from-celery", CELERY), ("from-fennel", FENNEL)])
def test_the_guide_has_every_name(page: str, table: Mapping[NameKind, Mapping[str, str]]) -> None:
    text = (GUIDE / f"{page}.md").read_text()
    families = tuple(re.findall(r"`(\w+_)\*`", text))
    rare = (GUIDE / "celery-words.md").read_text() if table is CELERY else ""
    rare = rare.partition("## Names that few projects use")[2]
    names = {
        word
        for thing, names in table.items()
        for name in names
        for word in name.split()
        if thing in WITHOUT_RARE_NAMES or not re.search(rf"`(?:\w+\.)?{re.escape(word)}`", rare)
    }
    beginnings = {name[:-1] for name in names if name.endswith("*")}
    assert [name for name in sorted(beginnings) if name not in text] == []
    assert [
        name
        for name in sorted(names)
        if not name.endswith("*") and not re.search(rf"\b{name}\b", text) and not name.startswith(families)
    ] == []


def test_what_is_named_instead_is_there() -> None:
    said = " ".join(ours for table in (CELERY, FENNEL) for names in table.values() for ours in names.values())
    assert [name for name in re.findall(r"\bapp\.(\w+)", said) if not hasattr(app, name)] == []
    assert [name for name in re.findall(r"\btask\.(\w+)\(", said) if not hasattr(add, name)] == []
    assert [
        name for name in re.findall(r"\bresult\.(\w+)", said) if not hasattr(THINGS["result"], name)
    ] == []
    single = [
        ours
        for table in (CELERY, FENNEL)
        for ours in table.get("setting", {}).values()
        if ours.isidentifier()
    ]
    assert set(single) <= set(msgspec.structs.asdict(Settings()))
