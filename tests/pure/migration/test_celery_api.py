"""Celery's public API, as its modules list it: `celery5 migrate` changes or answers each name, or celery5 has it."""

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.config.settings import Settings
from celery5.migration.files.findings import CeleryUse
from celery5.migration.rewrite import migrate_project
from celery5.tasks import CurrentJob
from celery5.tasks.declaration import TaskOptions
from tests.house.sources import HERE
from tests.pure.migration.test_rewriting import GENERAL

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")
amqp: Any = pytest.importorskip("celery.app.amqp")
canvas: Any = pytest.importorskip("celery.canvas")
commands: Any = pytest.importorskip("celery.bin.celery")
control: Any = pytest.importorskip("celery.app.control")
defaults: Any = pytest.importorskip("celery.app.defaults")
exceptions: Any = pytest.importorskip("celery.exceptions")
results: Any = pytest.importorskip("celery.result")
signals: Any = pytest.importorskip("celery.signals")
states: Any = pytest.importorskip("celery.states")
tasks: Any = pytest.importorskip("celery.app.task")

HEAD = """from celery import Celery, chain, chord, group, shared_task
from celery.result import AsyncResult

app = Celery("shop")


@app.task
def add(x, y=1): ...


"""
BOUND = f"{HEAD}@app.task(bind=True)\ndef one(self):\n"
INTERNAL = {
    *("add_around", "signature_from_request", "subtask_from_request"),
    *("TYPES", "append_to_list_option", "extend_list_option", "flatten_links", "from_dict", "register_type"),
    *("reprcall", "prepare_steps", "unchain_tasks", "supports_native_join", "backend", "Mailbox"),
    *("IS_WINDOWS", "IS_macOS", "SYSTEM", "Pickler", "builtin_fixups", "either", "oid", "thread_oid"),
    *("amqp_cls", "backend_cls", "control_cls", "events_cls", "loader_cls", "log_cls", "registry_cls"),
    *("task_cls", "create_task_cls", "subclass_with_self", "type_checker"),
    *("SERIES", "VERSION", "VERSION_BANNER", "version_info", "version_info_t", "maybe_patch_concurrency"),
    *("execute", "log", "messaging", "registry", "uuid"),
}
"""Names that Celery's own reference does not describe."""
ours = App("api")


@ours.task
def add(x: int, y: int = 1) -> int:
    return x + y


def public(one: Any, *others: Any) -> set[str]:
    """Return the public names of an object that no other one has."""
    return {name for name in dir(one) if not name.startswith("_")} - {n for o in others for n in dir(o)}


def find_uses(folder: Path, lines: Iterable[str], head: str, name: str) -> list[list[CeleryUse]]:
    """Return what `celery5 migrate` finds at each line."""
    lines = list(lines)
    (folder / name).write_text(head + "\n".join(lines) + "\n")
    uses: list[list[CeleryUse]] = [[] for _ in lines]
    for file in migrate_project(folder).report.files:
        for use in file.findings:
            number = use.line - 1 - head.count("\n")
            if 0 <= number < len(lines):
                uses[number].append(use)
    return uses


def find_unanswered(
    folder: Path, lines: Mapping[str, str], *, head: str = HEAD, name: str = "tasks.py"
) -> list[str]:
    """Return the names of lines of which nothing is said, or only which page to read."""
    uses = find_uses(folder, lines.values(), head, name)
    is_answered = [any(use.advice and use.advice != GENERAL for use in found) for found in uses]
    left = {name for name, answered in zip(lines, is_answered, strict=True) if not answered}
    return sorted(left - INTERNAL)


def is_method(cls: Any, name: str) -> bool:
    value = inspect.getattr_static(cls, name, None)  # an attribute that is read may warn
    return callable(value) or isinstance(value, classmethod | staticmethod)


def write_uses(of: str, cls: Any, names: Iterable[str]) -> dict[str, str]:
    """Return a statement for each name: the call of a method, or an attribute that is read."""
    return {
        name: f"{of}.{name}()" if is_method(cls, name) else f"print({of}.{name})" for name in sorted(names)
    }


def find_missing(folder: Path, of: str, cls: Any, names: Iterable[str], our: Any) -> list[str]:
    """Return the names of an object that are neither answered nor names of what celery5 has for it."""
    found = find_unanswered(folder, write_uses(of, cls, names))
    return [name for name in found if name not in public(our)]


OPTIONS = """
    name base bind pydantic pydantic_strict pydantic_context pydantic_dump_kwargs queue exchange routing_key
    delivery_mode autoretry_for dont_autoretry_for retry_kwargs retry_backoff retry_backoff_max retry_jitter
"""
SENDING = """
    queue exchange routing_key delivery_mode priority serializer compression retry retry_policy headers connection
    publisher add_to_parent immutable correlation_id args kwargs
"""


def test_options_of_a_declaration_are_answered(tmp_path: Path) -> None:
    values = {name: value for name, value in vars(tasks.Task).items() if not name.startswith("_")}
    names = {name for name, value in values.items() if not callable(value) and not hasattr(value, "__get__")}
    assert len(names) > 20
    lines = {name: f"@app.task({name}=value)" for name in sorted({*names, *OPTIONS.split()})}
    spaced = {
        f"{name} {part}": text
        for name, line in lines.items()
        for part, text in ((1, line), (2, "def t(): ..."))
    }
    left = [name[:-2] for name in find_unanswered(tmp_path, spaced) if name.endswith(" 1")]
    assert [name for name in left if name not in (*TaskOptions.__optional_keys__, "bind", *INTERNAL)] == []


def test_options_of_a_call_are_changed_or_answered(tmp_path: Path) -> None:
    sent = (
        inspect.signature(tasks.Task.apply_async).parameters,
        inspect.signature(amqp.AMQP.as_task_v2).parameters,
    )
    names = {*SENDING.split(), *sent[0], *sent[1]} - {"self", "options", "name"}
    assert find_unanswered(tmp_path, {name: f"add.apply_async({name}=value)" for name in sorted(names)}) == []


def test_names_of_a_task_of_celery5_are_left(tmp_path: Path) -> None:
    lines = [f"print(add.{name})" for name in sorted(public(add))]
    uses = find_uses(tmp_path, lines, HEAD, "tasks.py")
    assert [use.name for found in uses for use in found] == []


def test_names_of_a_task_are_answered(tmp_path: Path) -> None:
    names = public(tasks.Task)
    assert find_missing(tmp_path, "add", tasks.Task, names, add) == []
    read = {name: f"    print(self.{name})" for name in names}
    assert set(find_unanswered(tmp_path, read, head=BOUND)) <= public(CurrentJob)
    read = {name: f"    print(self.request.{name})" for name in public(tasks.Context)}
    assert find_unanswered(tmp_path, read, head=BOUND) == []


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("add.s(1)", "Signature"),
        ("group(add.s(1))", "group"),
        ("chain(add.s(1), add.s())", "_chain"),
        ("chord([add.s(1)], add.s())", "_chord"),
        ("add.chunks([1], 2)", "chunks"),
    ],
)
def test_names_of_the_canvas_are_answered(tmp_path: Path, made: str, name: str) -> None:
    cls = getattr(canvas, name)
    assert find_missing(tmp_path, made, cls, public(cls, dict), add.s(1)) == []


@pytest.mark.parametrize(
    ("made", "name"), [("add.delay(1)", "AsyncResult"), ("group(add.s(1)).apply_async()", "GroupResult")]
)
def test_names_of_a_result_are_answered(tmp_path: Path, made: str, name: str) -> None:
    cls = getattr(results, name)
    assert find_missing(tmp_path, made, cls, public(cls), ours.result("x")) == []


def test_names_of_the_application_are_answered(tmp_path: Path) -> None:
    assert find_missing(tmp_path, "app", celery.Celery, public(celery.Celery), ours) == []


def test_names_of_remote_control_are_answered(tmp_path: Path) -> None:
    names = public(control.Control)
    assert find_missing(tmp_path, "app.control", control.Control, names, ours.control) == []
    head = f"{HEAD}workers = app.control.inspect(['w1'])\n"
    asked = {name: f"workers.{name}()" for name in public(control.Inspect) - {"app"}}
    assert find_unanswered(tmp_path, asked, head=head) == []


def test_signals_are_answered(tmp_path: Path) -> None:
    names = [*signals.__all__, "import_modules", "user_preload_options"]
    head = f"from celery.signals import {', '.join(names)}\n{HEAD}"
    connected = {name: f"{name}.connect(print)" for name in names}
    assert find_unanswered(tmp_path, connected, head=head) == []
    head = f"from celery import signals\n{HEAD}"
    connected = {name: f"signals.{name}.connect(print)" for name in names}
    assert find_unanswered(tmp_path, connected, head=head) == []


def test_settings_are_changed_or_answered(tmp_path: Path) -> None:
    names = [name for name, _ in defaults.flatten(defaults.NAMESPACES)]
    assert len(names) > 150
    left = find_unanswered(tmp_path, {name: f"app.conf.{name} = value" for name in names})
    assert [name for name in left if name not in Settings.__struct_fields__] == []
    lines = {name: f"CELERY_{name.upper()} = value" for name in names}
    left = find_unanswered(tmp_path, lines, head="INSTALLED_APPS = []\n", name="settings.py")
    assert [name for name in left if name not in Settings.__struct_fields__] == []


MODULES = """
    app.task apps.worker backends.base beat bin.base bootsteps canvas concurrency contrib.abortable contrib.migrate
    contrib.pytest contrib.rdb contrib.testing.worker events events.state exceptions fixups.django loaders.base local
    platforms result schedules security signals states utils.log worker
"""


def test_imports_are_changed_or_answered(tmp_path: Path) -> None:
    lines = {name: f"from celery import {name}" for name in celery.__all__ if not name.startswith("_")}
    for module in (canvas, exceptions, results, states):
        lines |= {
            f"{module.__name__}.{name}": f"from {module.__name__} import {name}" for name in module.__all__
        }
    lines |= {module: f"from celery.{module} import thing{n}" for n, module in enumerate(MODULES.split())}
    assert find_unanswered(tmp_path, lines, head="") == []


def test_pages_that_advice_names_are_there() -> None:
    files = [HERE / "celery5" / "hints.py", *(HERE / "celery5" / "migration").glob("*.py")]
    text = " ".join(re.sub(r'"\s+f?"', "", file.read_text()) for file in files)
    pages = set(re.findall(r"celery5 docs ([a-z][\w-]*)", text))
    assert len(pages) > 8
    assert [page for page in pages if not (HERE / "docs" / "guide" / f"{page}.md").exists()] == []


def test_commands_are_translated(tmp_path: Path) -> None:
    lines = {
        f"inspect {name}": f"celery -A shop inspect {name}" for name in public(control.Inspect) - {"app"}
    }
    for name, command in commands.celery.commands.items():
        lines[name] = f"celery -A shop {name}"
        inner = getattr(command, "commands", {})
        lines |= {f"{name} {word}": f"celery -A shop {name} {word}" for word in inner}
    assert len(lines) > 30
    assert find_unanswered(tmp_path, lines, head="# of the shop\n", name="shop.sh") == []
