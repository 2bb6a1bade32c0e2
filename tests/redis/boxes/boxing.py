"""Boxing: boxed tasks, in a module that their boxes can import; what they do is written in their arguments."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import trio
import trio.lowlevel

from celery5 import (
    App,
    Reject,
    Retry,
    RetryPolicy,
    SoftTimeLimitExceeded,
    current_job,
    optional,
    poisonous,
    progress,
    retry,
)
from celery5.tasks import INJECTED, Box, CurrentJob, Resource

SHELL = str(Path(__file__).with_name("shell_box.sh"))


@dataclass
class Seen:
    """What a job knows of itself."""

    pid: int
    job: str
    task: str
    queue: str
    attempt: int
    worker: str


def make(name: str, url: str | None = None, **settings: Any) -> App:
    """The application, as the worker has it and as its boxes do."""
    app = App(name, broker=url, **settings)
    for function in (add, seen, act, count, echo):
        app.task(name=function.__name__, boxed=True)(function)
    for coroutine in (seen_trio, act_trio):
        app.task(name=coroutine.__name__, boxed=True)(coroutine)
    for coroutine in (seen_asyncio, act_asyncio):
        app.task(name=coroutine.__name__, boxed=True, loop="asyncio")(coroutine)
    app.task(name="bound", boxed=True, bind=True)(bound)
    app.task(name="opened", boxed=True)(opened)
    app.task(name="break_fragile", boxed=True)(break_fragile)
    app.task(name="opened_async", boxed=True, loop="asyncio")(opened_async)
    app.task(name="deduplicated", boxed=True, deduplicate=_unwanted)(deduplicated)
    app.task(name="on_gpu", boxed=True, resources={"gpu": 1})(on_gpu)
    app.task(name="crash_on_gpu", boxed=True, resources={"gpu": 1})(crash_on_gpu)
    app.task(name="limited", boxed=Box(memory=400 * 2**20, cpu=1))(limited)
    app.task(name="shell", boxed=Box(["sh", SHELL]))(shell)
    return app


def add(x: int, y: int = 1) -> int:
    """A sum."""
    return x + y


def open_file() -> Iterator[list[int]]:
    """A resource: the process in which it was opened, and how often it was used. It leaves a file when it is closed."""
    uses = [os.getpid()]
    yield uses
    Path(os.environ["BOXING_CLOSED"]).write_text(str(len(uses)))


async def open_loop() -> AsyncIterator[list[int]]:
    """A resource of an event loop."""
    asyncio.get_running_loop()
    yield [os.getpid()]


def open_fragile() -> Iterator[list[str]]:
    """A resource that a job may break."""
    yield []


def is_whole(fragile: list[str]) -> bool:
    """Return whether no job has broken it."""
    return not fragile


Fragile = Annotated[
    list[str],
    Resource(
        open_fragile, check=is_whole, check_interval=0.001, retry=RetryPolicy(backoff=0.001, jitter=False)
    ),
]


def break_fragile(fragile: Fragile = INJECTED) -> list[str]:
    """Return the changes of earlier jobs to the resource, and break it."""
    found = list(fragile)
    fragile.append("broken")
    time.sleep(0.002)
    return found


def opened(uses: Annotated[list[int], Resource(open_file)] = INJECTED) -> list[int]:
    """Use a resource."""
    uses.append(len(uses))
    return uses


async def opened_async(
    uses: Annotated[list[int], Resource(open_file)] = INJECTED,
    own: Annotated[list[int], Resource(open_loop)] = INJECTED,
) -> list[list[int]]:
    """Use a resource of the box, and one of this job."""
    uses.append(len(uses))
    own.append(len(own))
    return [uses, own]


def on_gpu() -> tuple[str | None, tuple[int, ...], dict[str, float], int, float, float]:
    """What it sees of GPUs, its process, and when it began and ended."""
    job, began = current_job(), time.time()
    assert job is not None
    time.sleep(0.05)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible, job.devices, dict(job.resources), os.getpid(), began, time.time()


def crash_on_gpu() -> None:
    """Take the box down."""
    os._exit(3)


def echo(value: Any, fails: bool = False) -> Any:
    """The value, as a result or in an error."""
    progress(1, 2, str(value)[:500] if isinstance(value, str) else "half")
    if fails:
        raise ValueError(value)
    return value


def seen() -> Seen:
    """In the main thread."""
    return _seen()


async def seen_trio() -> Seen:
    """On Trio."""
    await trio.lowlevel.checkpoint()
    return _seen()


async def seen_asyncio() -> Seen:
    """On asyncio."""
    await asyncio.sleep(0)
    return _seen()


def count(path: str) -> str:
    """Report progress until there is a file."""
    for number in range(10_000):  # more than the worker would like to read
        progress(number, 10_000)
    progress(3, 4, "nearly there")
    while not Path(path).exists():
        time.sleep(0.01)
    return "counted"


def bound(self: CurrentJob, x: int) -> tuple[str, int]:
    """The job itself."""
    return self.id, x


def deduplicated(n: int) -> int:
    """Only even ones."""
    return n


def limited(what: str) -> Any:
    """With so much memory and processor time and no more."""
    return _act(what)


def act(what: str) -> Any:
    """Do what is written, in the main thread."""
    return _act(what)


async def act_trio(what: str) -> Any:
    """On Trio."""
    if what == "cancel itself":
        nursery = trio.lowlevel.current_task().parent_nursery
        assert nursery is not None
        nursery.cancel_scope.cancel()
        await trio.sleep(60)
    return await _rest(trio.sleep, what) if what.startswith("sleep") else _act(what)


async def act_asyncio(what: str) -> Any:
    """On asyncio."""
    return await _rest(asyncio.sleep, what) if what.startswith("sleep") else _act(what)


def shell(what: str, n: int = 1) -> Any:
    """What shell_box.sh does."""
    raise NotImplementedError


def _seen() -> Seen:
    job = current_job()
    assert job is not None
    return Seen(os.getpid(), job.id, job.task, job.queue, job.attempt, job.worker)


def _unwanted(n: int) -> str:
    job = current_job()
    assert job is not None
    return "it is odd" if n % 2 else ""


async def _rest(sleep: Any, what: str) -> str:
    told = what.split()[1]
    _tell(told, str(os.getpid()))
    try:
        await sleep(60)
    except Exception as error:  # the soft limit
        return f"{type(error).__name__} caught"
    finally:
        _tell(f"{told}.ended", "")
    return "slept"


def _act(what: str) -> Any:
    verb, *words = what.split()
    return _ACTS[verb](*words)


def _tell(path: str, words: str) -> None:
    """All at once, for those who look whether it is there."""
    Path(f"{path}.new").write_text(words)
    os.rename(f"{path}.new", path)


def _sleep(told: str) -> str:
    _tell(told, str(os.getpid()))
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded as error:
        return f"{type(error).__name__} caught"
    finally:
        _tell(f"{told}.ended", "")
    return "slept"


def _deaf(told: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    _tell(told, f"{os.getpid()} {child.pid}")
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def _print(count: str) -> int:
    for n in range(int(count)):
        print(f'{{"type":"result","value":{n}}}')  # noqa: T201
    os.write(1, b"straight to the descriptor\n")
    return sys.stdin.read().count("x")


def _log() -> None:
    logging.getLogger("boxing").warning("careful with %s", "that", extra={"shelf": 3})
    with optional():
        raise ValueError("never mind")


def _log_much(size: str) -> None:
    text = "x" * int(size)
    logging.getLogger("boxing").warning(text)
    logging.getLogger("boxing").warning("much", extra={"shelf": text, "shelves": [text]})


def _kill(number: str) -> None:
    sys.stderr.write("last words\n")
    os.kill(os.getpid(), int(number))


def _exit(code: str) -> None:
    sys.stderr.write("last words\n")
    os._exit(int(code))


def _fail() -> None:
    raise KeyError("nothing there")


def _escape(name: str) -> None:
    cancelled: Any = trio.Cancelled
    errors: dict[str, Any] = {
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
        "Cancelled": lambda: cancelled._create(source="unknown"),
    }
    raise errors[name]()


def _section() -> int:
    job = current_job()
    assert job is not None
    with retry(max_retries=2, backoff=0.01, jitter=False, name="lookup"):
        if job.attempt < 3:
            raise ConnectionError("not yet")
    return job.attempt


def _poison() -> None:
    with poisonous():
        raise ValueError("never again")


def _again() -> int:
    job = current_job()
    assert job is not None
    if job.attempt == 1:
        raise Retry(countdown=0.01)
    return job.attempt


def _reject() -> None:
    raise Reject("not today")


def _burn() -> None:
    while True:
        pass


def _grab() -> int:
    return len(bytearray(1000 * 2**20))


def _large(count: str) -> str:
    return "x" * int(count)


def _fork() -> str:
    return "parent" if os.fork() else "child"


_ACTS: dict[str, Any] = {
    "sleep": _sleep,
    "deaf": _deaf,
    "print": _print,
    "log": _log,
    "log_much": _log_much,
    "kill": _kill,
    "exit": _exit,
    "fail": _fail,
    "escape": _escape,
    "section": _section,
    "poison": _poison,
    "again": _again,
    "reject": _reject,
    "burn": _burn,
    "grab": _grab,
    "large": _large,
    "fork": _fork,
}

app = make(os.environ.get("BOXING_APP", "boxing"))
for name in filter(None, [os.environ.get("BOXING_MIDDLEWARE")]):
    app.add_middleware(resolve_name(name)())
