"""Task: declaring, calling, sending differently, and who owns a task that was declared with no application."""

import functools
import importlib
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import pytest

import celery5
from celery5 import App, Misconfigured, Retry, RetryPolicy, default_app
from celery5.errors import BadArguments, DuplicateTask, MessageTooLarge, UnknownTask
from celery5.protocol.job.job import Options, SendOptions
from celery5.protocol.job.messages import read_command
from celery5.runners.context import CURRENT_JOB
from celery5.tasks import CurrentJob, Signature, Task
from celery5.tasks.task import CoroutineTask, FunctionTask
from tests.pure.job.names import steady

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


async def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def double(a: int) -> int:
    """Double."""
    return 2 * a


@pytest.fixture
def app() -> App:
    """An application that is not connected to anything: nobody listens on that port."""
    return App("shop", broker="redis://127.0.0.1:1/0")


def test_a_task_is_declared_bare_or_with_options(app: App) -> None:
    bare, called, named = (
        app.task(add),
        app.task(queue="cpu", max_retries=1)(double),
        app.task(name="sum")(add),
    )
    assert [type(task) for task in (bare, called, named)] == [CoroutineTask, FunctionTask, CoroutineTask]
    assert [task.name for task in (bare, called, named)] == [f"{__name__}.add", f"{__name__}.double", "sum"]
    assert set(app.tasks) == {bare.name, called.name, "sum"}
    assert called.send_options.queue == "cpu"
    assert called.policy == RetryPolicy(max_retries=1)
    assert app.tasks["sum"] is named


def test_a_task_looks_like_its_function(app: App) -> None:
    task = app.task(add)
    assert (task.__doc__, task.__name__, task.__module__) == ("Add.", "add", __name__)
    assert inspect.signature(task) == inspect.signature(add)
    assert repr(task) == f"<Task {__name__}.add>"


async def test_calling_a_task_runs_its_function_here(app: App) -> None:
    assert await app.task(add)(2, b=3) == 5
    assert app.task(double)(4) == 8


def test_the_kind_follows_from_the_function(app: App) -> None:
    assert app.task(add).kind == "trio"
    assert app.task(loop="asyncio", name="other")(add).kind == "asyncio"
    assert app.task(double).kind == "thread"


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("options", "function", "says"),
    [
        ({}, generator, "is a generator function: a task returns one value"),
        ({}, asynchronous_generator, "is a generator function: a task returns one value"),
        ({"loop": "asyncio"}, double, "is not async: loop='asyncio' is for async def"),
        ({"loop": "uvloop"}, add, "loop is 'uvloop': give 'trio' or 'asyncio'"),
        (
            {"quue": "a"},
            add,
            "task option 'quue' is not known; did you mean 'queue'[?] all options: celery5 docs tasks",
        ),
        ({"queue": "a b"}, add, "queue 'a b'"),
        ({"max_retries": -1}, add, "max_retries is -1"),
        (
            {"on_error": "skp"},
            add,
            "^on_error is 'skp': give fail, continue, skip or hold; did you mean 'skip'",
        ),
        ({"ignore": "REVOKED"}, add, "ignore is 'REVOKED': give a set of end states, such as"),
        (
            {"ignore": {"REVOKEDD"}},
            add,
            "ignore has 'REVOKEDD': give some of DEAD, .*; did you mean 'REVOKED'",
        ),
        ({"ignore": {5}}, add, "ignore has 5: give some of DEAD"),
        ({"undo": 5}, add, "undo is 5: give the task that undoes this one"),
        ({"dynamic": "no"}, add, "dynamic is 'no': give True or False"),
        ({}, UUID, "@task takes a function, got <class"),
        ({}, 5, "@task takes a function, got 5"),
        ({}, functools.partial(add, 1), r"give it one with @task\(name=...\)"),
    ],
    ids=steady,
)
def test_a_declaration_that_makes_no_sense_is_refused_at_once(
    app: App, options: dict[str, Any], function: Any, says: str
) -> None:
    with pytest.raises(Misconfigured, match=says):
        app.task(**options)(function)
    assert not app.tasks


def test_a_partial_with_a_name_is_a_task(app: App) -> None:
    task = app.task(name="add one")(functools.partial(add, 1))
    assert task.kind == "trio"
    assert bytes(read_command(task.job(b=5).message).kwargs) == b'{"b":5}'


def test_two_functions_under_one_name_are_refused_and_one_function_twice_is_not(app: App) -> None:
    app.task(name="t")(add)
    app.task(name="t")(add)
    with pytest.raises(DuplicateTask, match="two tasks are named 't': give one of them @task"):
        app.task(name="t")(double)


def test_options_give_a_copy_and_leave_the_task_alone(app: App) -> None:
    task = app.task(max_retries=1)(add)
    copy = task.options(queue="slow", countdown=5, expires=60, ignore_result=True, backoff=2)
    assert type(copy) is type(task)
    assert (copy.name, copy.app, copy.function) == (task.name, app, add)
    assert (task.send_options.queue, task.job(1).queue, task.job(1).at) == (None, "default", "")
    job = copy.job(1)
    assert (job.queue, job.at, job.ignore_result) == ("slow", "+5000", True)
    command = read_command(job.message)
    assert command.retry == RetryPolicy(max_retries=1, backoff=2)
    assert command.expires == pytest.approx(command.sent + 60)
    assert task.policy == RetryPolicy(max_retries=1)
    with pytest.raises(Misconfigured, match="not both"):
        copy.options(eta=NOON)
    with pytest.raises(Misconfigured, match="'when' is not known"):
        task.options(when=1)  # type: ignore[call-arg]
    assert app.tasks[task.name] is task


def test_a_job_needs_no_broker_and_is_new_each_time(app: App) -> None:
    task = app.task(add)
    first, second = task.job(1, b=2), task.s(1, b=2).job()
    assert first.id != second.id
    command = read_command(first.message)
    assert (command.id, command.task, command.attempt) == (first.id, task.name, 1)
    assert (bytes(command.args), bytes(command.kwargs)) == (b"[1]", b'{"b":2}')
    assert first.queue == "default"
    with pytest.raises(BadArguments, match=r"add: parameter 'a' takes int, got str"):
        task.job("1")  # type: ignore[arg-type]


def test_task_has_the_policy_of_its_application_unless_it_overrides_it() -> None:
    app = App("shop", retry_policy=RetryPolicy(max_retries=7, jitter=False))
    assert app.task(add).policy.max_retries == 7
    assert app.task(backoff=3)(double).policy == RetryPolicy(max_retries=7, backoff=3, jitter=False)
    assert read_command(app.tasks[f"{__name__}.add"].job(1).message).retry is None
    with pytest.raises(Misconfigured, match="max_retries is -1"):
        App("shop", retry_policy=RetryPolicy(max_retries=-1))


def test_a_message_over_the_limit_is_refused(app: App) -> None:
    small = App("shop", message_limit=1024)
    task = small.task(name="t")(lambda text: text)
    assert len(task.job("a" * 900).message) <= 1024
    with pytest.raises(MessageTooLarge, match=r"^t: \d+ bytes are over the limit of 1024: pass a reference"):
        task.job("a" * 1024)


def test_a_signature_shows_the_call(app: App) -> None:
    signature = app.task(add).s(1, b=2)
    assert isinstance(signature, Signature)
    assert repr(signature) == f"{__name__}.add(1, b=2)"
    with pytest.raises(AttributeError):
        signature.more = 1  # type: ignore[attr-defined]


def test_an_unknown_task_names_the_nearest_one(app: App) -> None:
    app.task(add)
    with pytest.raises(UnknownTask, match=rf"no task '{__name__}.ad' here; did you mean '{__name__}.add'\?"):
        app.signature(f"{__name__}.ad")
    with pytest.raises(UnknownTask, match=r"no task 'zzz' here; declared: "):
        app.tasks["zzz"]
    assert app.signature(f"{__name__}.add", 1).job().task == f"{__name__}.add"
    assert "zzz" not in app.tasks
    assert len(app.tasks) == 1


@pytest.mark.parametrize("name", ["", "a b", "a{b", "a}b", "a:b", "a\n"])
def test_an_application_needs_a_name_for_its_keys(name: str) -> None:
    with pytest.raises(Misconfigured, match="application name"):
        App(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://me:secret@host", "rediss://me:***@host"),
        ("redis://host:1/0?password=secret&db=2", "redis://host:1/0?password=***&db=2"),
        ("unix://me:secret@/tmp/a.sock?db=1", "unix://me:***@/tmp/a.sock?db=1"),
        ("unix:///tmp/a@b.sock", "unix:///tmp/a@b.sock"),
    ],
)
def test_an_application_never_shows_its_password(url: str, shown: str) -> None:
    assert repr(App("shop", broker=url)) == f"<App 'shop' at {shown}>"


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of free tasks under its own name, so that nobody owns them yet."""
    name = f"free_tasks_{uuid4().hex}"
    shutil.copy(Path(__file__).with_name("free_tasks.py"), tmp_path / f"{name}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(name)
    del sys.modules[name]


def test_a_free_task_belongs_to_the_application_that_includes_its_module(free: ModuleType) -> None:
    app = App("includes", include=[free.__name__])
    assert free.charge.has_no_app
    app.load()
    assert free.charge.app is free.remind.app is app
    assert set(app.tasks) == {f"{free.__name__}.charge", f"{free.__name__}.remind"}
    assert free.remind.job().queue == "mail"
    assert free.remind("me") == "dear me"


def test_a_free_task_finds_the_application_that_includes_it_without_loading(free: ModuleType) -> None:
    app = App("includes", include=[free.__name__])
    assert free.charge.app is app
    assert list(app.tasks) == [f"{free.__name__}.charge"]


def test_a_free_task_belongs_to_the_application_whose_module_imports_it(
    free: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_test_task.py").write_text(
        f"from celery5 import App\nfrom {free.__name__} import charge\napp = App('imports')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    shop = importlib.import_module("shop_of_test_task")
    try:
        assert free.charge.app is shop.app
        shop.app.load()
        assert list(shop.app.tasks) == [f"{free.__name__}.charge"]
    finally:
        del sys.modules["shop_of_test_task"]


def test_a_free_task_that_nobody_owns_belongs_to_the_default_application(free: ModuleType) -> None:
    assert free.charge.app is default_app()
    assert default_app().name == "celery5"
    assert free.charge.job(1).task in default_app().tasks
    copy = free.remind.options(queue="x")
    assert isinstance(copy, Task)
    assert copy.app is free.remind.app is default_app()


def test_two_applications_may_have_the_same_task_names(app: App) -> None:
    other = App("other")
    assert other.task(add).app is other
    assert app.task(add).app is app


def test_importing_celery5_and_declaring_tasks_imports_no_event_loop_and_no_client() -> None:
    code = (
        "import sys\nfrom celery5 import App\napp = App('a')\n"
        "@app.task\nasync def f(x: int) -> int: return x\n"
        "f.job(1)\n"
        "print(sorted({'trio', 'asyncio', 'redis', 'eliot', 'click', 'dependencies'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert completed.stdout.strip() == "[]"


@pytest.mark.parametrize("how", [["shop.py"], ["-m", "shop"]])
def test_a_task_of_a_script_has_the_name_by_which_a_worker_imports_it(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "shop.py").write_text(
        "from celery5 import App, task\napp = App('a')\n"
        "@app.task\ndef f() -> int: return 1\n"
        "@task\ndef g() -> int: return 1\n"
        "if __name__ == '__main__':\n    print(f.name, g.name, g.app.name)\n"
    )
    root = str(Path(celery5.__file__).parents[1])
    completed = subprocess.run(
        [sys.executable, *how],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert completed.stdout.split() == ["shop.f", "shop.g", "a"]


def test_a_bound_task_leaves_its_job_out_of_what_is_sent(app: App) -> None:
    @app.task(bind=True, deduplicate=lambda n: False)
    def bound(self: CurrentJob, n: int) -> str:
        """Bound."""
        return f"{self.task} {self.attempt} {n}"

    assert json.loads(bound.job(3).message)["args"] == [3]
    assert bound.__doc__ == "Bound."
    for wrong in ((), ("x",), (1, 2)):
        with pytest.raises(BadArguments, match="bound"):
            bound.job(*wrong)
    assert bound(3) == f"{bound.name} 1 3", (
        "called like a function it gets a job that stands for the running one"
    )

    @app.task(bind=True)
    def again(self: CurrentJob) -> None:
        self.retry(countdown=5)

    with pytest.raises(Retry) as caught:
        again()
    assert caught.value.countdown == 5


async def test_a_bound_coroutine_is_given_the_running_job_or_one_that_stands_for_it(app: App) -> None:
    @app.task(bind=True)
    async def bound(self: CurrentJob, *, n: int = 1) -> tuple[CurrentJob, int]:
        return self, n

    alone, n = await bound(n=5)
    assert (alone.task, alone.attempt, alone.sections, n) == (bound.name, 1, None, 5)
    running = CurrentJob("id", "other", "queue", 3, "worker")
    token = CURRENT_JOB.set(running)
    try:
        assert (await bound())[0] is running
    finally:
        CURRENT_JOB.reset(token)


def test_one_function_may_be_bound_twice_under_one_name_and_two_may_not(app: App) -> None:
    def bound(self: CurrentJob) -> None: ...
    def other(self: CurrentJob) -> None: ...

    app.task(bind=True, name="it")(bound)
    app.task(bind=True, name="it")(bound)
    with pytest.raises(DuplicateTask):
        app.task(bind=True, name="it")(other)


@pytest.mark.parametrize("function", [lambda: 1, lambda *jobs: 1, lambda *, job: 1])
def test_a_bound_task_without_a_place_for_its_job_is_refused(app: App, function: Any) -> None:
    with pytest.raises(
        Misconfigured, match="task it: bind=True needs a first parameter, for the running job"
    ):
        app.task(bind=True, name="it")(function)


def test_a_backoff_of_ones_own_is_the_tasks_or_the_applications() -> None:
    app = App("shop", retry_backoff=lambda n: 1, retry_policy={"max_retries": 1, "interval_step": 5})
    plain, own = app.task(double), app.task(name="own", retry_backoff=lambda n: 2)(double)
    assert plain.backoff is not None
    assert own.backoff is not None
    assert (plain.backoff(0), own.backoff(0), own.options(queue="a").backoff) == (1, 2, own.backoff)
    assert plain.policy == RetryPolicy(max_retries=1, backoff=0, step=5, cap=0.2, jitter=False)
    assert App("other").task(double).backoff is None
    for say in (lambda: App("shop", retry_backoff=5), lambda: app.task(retry_backoff="a.b")(double)):  # type: ignore[arg-type, call-overload]
        with pytest.raises(Misconfigured, match=r"^retry_backoff is "):
            say()
    with pytest.raises(
        Misconfigured, match=r"retry_backoff is for a declaration: @app.task\(retry_backoff=...\)"
    ):
        plain.options(retry_backoff=lambda n: 1)  # type: ignore[call-arg]


def test_type_checkers_know_every_option() -> None:
    assert sorted(SendOptions.__annotations__) == sorted(Options.__struct_fields__)


READS = {"copy", "fromkeys", "get", "items", "keys", "values"}
"""The public methods of a dict that change nothing."""


def test_no_method_of_a_dict_changes_the_tasks_of_an_application() -> None:
    app = App("steady", broker="redis://nobody")
    app.task(add)
    before = dict(app.tasks)
    (name,) = before
    arguments: dict[str, tuple[Any, ...]] = {"pop": (name,), "setdefault": ("new", None), "update": ({},)}
    for method in {name for name in dir(dict) if not name.startswith("_")} - READS:
        with pytest.raises(TypeError, match="read-only"):
            getattr(app.tasks, method)(*arguments.get(method, ()))
    with pytest.raises(TypeError, match="read-only"):
        app.tasks["new"] = before[name]
    with pytest.raises(TypeError, match="read-only"):
        del app.tasks[name]
    with pytest.raises(TypeError, match="read-only"):
        app.tasks |= {}
    assert dict(app.tasks) == before
