"""Historian: an application whose jobs write down when they begin and end, in a file that outlives everybody.

Its workers are real processes that the tests kill, stop and starve.
"""

import asyncio
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections import deque
from itertools import repeat
from pathlib import Path

import trio

from celery5 import App, RetryPolicy, current_job
from celery5.health import BreakerPolicy
from celery5.tasks import Box

app = App(os.environ.get("HISTORY_APP", "historian"))


def note(what: str, worker: int | None = None) -> None:
    """One line, written in one piece: job, what, the worker's process, attempt."""
    job = current_job()
    assert job is not None
    line = f"{job.id} {what} {worker or os.getpid()} {job.attempt} {time.time():.6f}\n"
    file = os.open(os.environ["HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


@app.task(name="nap")
async def nap(seconds: float) -> int:
    """Sleep; gives the process that it slept in."""
    note("begin")
    await trio.sleep(seconds)
    note("end")
    return os.getpid()


@app.task(name="narrow", limit=2)
async def narrow(seconds: float) -> int:
    """Sleep where two may at once."""
    note("begin")
    await trio.sleep(seconds)
    note("end")
    return os.getpid()


@app.task(name="paced", rate_limit="20/1s")
async def paced(seconds: float) -> int:
    """Sleep, no more than so many in a second."""
    note("begin")
    await trio.sleep(seconds)
    return os.getpid()


@app.task(name="fail")
async def fail() -> None:
    """Fail."""
    note("begin")
    raise ValueError("no")


@app.task(name="quiet")
async def quiet(n: int) -> int:
    """Leave no trace in the history; gives what it got."""
    return n


@app.task(name="block")
async def block(seconds: float) -> int:
    """Block the event loop, as no job should."""
    note("begin")
    time.sleep(seconds)  # noqa: ASYNC251  what it is for
    note("end")
    return os.getpid()


@app.task(name="gate")
async def gate(path: str) -> int:
    """Wait for a file to appear."""
    note("begin")
    while not Path(path).exists():  # noqa: ASYNC240  the gate is another process's
        await trio.sleep(0.01)
    note("end")
    return os.getpid()


@app.task(name="gate_gpu", resources={"gpu": 1})
async def gate_gpu(path: str) -> int:
    """The same, with a GPU."""
    note("begin")
    while not Path(path).exists():  # noqa: ASYNC240
        await trio.sleep(0.01)
    note("end")
    return os.getpid()


@app.task(name="gate_asyncio", loop="asyncio")
async def gate_asyncio(path: str) -> int:
    """The same on asyncio."""
    note("begin")
    while not Path(path).exists():  # noqa: ASYNC240
        await asyncio.sleep(0.01)
    note("end")
    return os.getpid()


@app.task(name="gate_thread")
def gate_thread(path: str) -> int:
    """The same in a thread."""
    note("begin")
    while not Path(path).exists():
        time.sleep(0.01)
    note("end")
    return os.getpid()


@app.task(name="hoard")
async def hoard(size: int) -> int:
    """Take this many bytes of memory, for ever."""
    note("begin")
    _HOARD.append(b"x" * size)
    note("end")
    return os.getpid()


_HOARD: list[bytes] = []


@app.task(name="die")
async def die() -> None:
    """Take the worker down."""
    note("begin")
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A result that takes the worker down when it is encoded: after the task has returned, before anybody knows."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def model_dump_json(self, **_options: object) -> None:
        os.kill(self._worker, signal.SIGKILL)


def act(acts: list[str], worker: int | None = None) -> object:
    """Do what is written for this run of the job, the last of it for all further ones; gives which run it was."""
    job = current_job()
    assert job is not None
    worker = worker or os.getpid()
    note("begin", worker)
    runs = Path(os.environ["HISTORY"]).read_text().count(f"{job.id} begin ")
    match acts[min(runs, len(acts)) - 1]:
        case "die":
            os.kill(worker, signal.SIGKILL)
        case "fail":
            raise ValueError(f"run {runs}")
        case "return and die":
            return Deadly(worker)
    return runs


@app.task(name="act_trio")
async def act_trio(acts: list[str]) -> object:
    """On Trio."""
    return act(acts)


@app.task(
    name="guarded",
    breaker=BreakerPolicy(threshold=1, reset=float(os.environ.get("GUARDED_RESET", "0.3"))),
    retry_policy=RetryPolicy(max_retries=0),
)
async def guarded(acts: list[str]) -> object:
    """On Trio, behind a circuit breaker that trips when it fails once."""
    return act(acts)


@app.task(name="act_asyncio", loop="asyncio")
async def act_asyncio(acts: list[str]) -> object:
    """On asyncio."""
    return act(acts)


@app.task(name="act_thread")
def act_thread(acts: list[str]) -> object:
    """In a thread."""
    return act(acts)


@app.task(name="act_boxed", boxed=True)
def act_boxed(acts: list[str]) -> object:
    """In a box, whose parent is the worker."""
    return act(acts, os.getppid())


@app.task(name="nest", boxed=True)
def nest(path: str) -> None:
    """In a box: start a process that takes no notice of anything, say who is there, and wait with it."""
    note("begin", os.getppid())
    child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP; while :; do sleep 60; done"])
    Path(f"{path}.new").write_text(f"{os.getpid()} {child.pid}")
    os.rename(f"{path}.new", path)
    child.wait()


NEST = r"""
    read -r hello; echo '{"type":"ready","version":1}'
    read -r run; path=$(printf '%s' "$run" | sed 's/.*"path":"\([^"]*\)".*/\1/')
    sh -c "trap '' TERM HUP; while :; do sleep 60; done" &
    echo "$$ $!" >"$path.new"; mv "$path.new" "$path"; wait
"""


@app.task(name="nest_in_shell", boxed=Box(["sh", "-c", NEST]))
def nest_in_shell(path: str) -> None:
    """The same in a box that knows nothing of celery5, and does not hear that its worker has gone."""
    raise NotImplementedError


@app.task(name="poison")
async def poison(seconds: float) -> None:
    """Take the worker down after a while."""
    note("begin")
    await trio.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="hold")
async def hold(seconds: float) -> int:
    """Hold the interpreter's lock and do nothing, as C code may."""
    note("begin")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    note("end")
    return os.getpid()


@app.task(name="hold_thread")
def hold_thread(seconds: float) -> int:
    """The same in a thread."""
    note("begin")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    note("end")
    return os.getpid()


def freeze(how: str, seconds: float, pid: int = 0) -> int:
    """Keep every thread of this process from running Python code, as C code may, and say that it has begun."""
    note("begin", pid or os.getpid())
    if how == "regex":  # for longer than any test lasts; in the main thread it handles signals
        re.match("(a+)+$", "a" * 60 + "b")
    elif how == "loop":  # for ever, and handles none
        deque(repeat(None), maxlen=0)
    else:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    note("end", pid or os.getpid())
    return os.getpid()


@app.task(name="freeze_trio")
async def freeze_trio(how: str, seconds: float) -> int:
    """On the loop of the worker."""
    return freeze(how, seconds)


@app.task(name="freeze_child")
async def freeze_child(how: str, seconds: float) -> None:
    """On the loop of the worker, in a task that the job has started."""

    async def child() -> None:
        freeze(how, seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)


@app.task(name="freeze_asyncio", loop="asyncio")
async def freeze_asyncio(how: str, seconds: float) -> int:
    """On the asyncio loop."""
    return freeze(how, seconds)


@app.task(name="freeze_thread")
def freeze_thread(how: str, seconds: float) -> int:
    """In a thread."""
    return freeze(how, seconds)


@app.task(name="freeze_boxed", boxed=True)
def freeze_boxed(how: str, seconds: float) -> int:
    """In a box."""
    return freeze(how, seconds, os.getppid())


@app.task(name="wait_thread")
def wait_thread(seconds: float) -> int:
    """Wait in a thread, without the lock."""
    note("begin")
    time.sleep(seconds)
    note("end")
    return os.getpid()


@app.task(name="churn")
async def churn(seconds: float) -> int:
    """Hold the interpreter's lock and use it."""
    note("begin")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000_000))
    note("end")
    return os.getpid()


@app.task(name="leave")
async def leave(code: int) -> None:
    """Take the worker down with an exit code."""
    note("begin")
    os._exit(code)


@app.task(name="deaf")
async def deaf(seconds: float) -> None:
    """Take no notice of being cancelled."""
    note("begin")
    with trio.CancelScope(shield=True):
        await trio.sleep(seconds)


@app.task(name="linger", loop="asyncio")
async def linger(seconds: float) -> None:
    """Leave a thread behind that nobody can end."""
    note("begin")
    await asyncio.to_thread(time.sleep, seconds)


@app.task(name="bequeath")
def bequeath() -> None:
    """Fork a process that lives on, with all files that the worker has open, and take the worker down."""
    note("begin")
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(5)
    os._exit(0)


@app.task(name="spawn")
def spawn() -> int | None:
    """Fork a process that computes, and end it with SIGTERM; gives its exit code."""
    note("begin")
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def compute() -> None:
        begun.set()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass

    child = context.Process(target=compute)
    child.start()
    begun.wait(20)  # a signal that comes while a process is being forked is lost
    child.terminate()
    child.join(20)
    code = child.exitcode
    child.kill()
    return code


@app.task(name="crash_executors")
async def crash_executors() -> None:
    """Cancel all executors of the worker, which ends it by its own error."""
    own = trio.lowlevel.current_task().parent_nursery
    assert own is not None
    above = own.parent_task.parent_nursery
    assert above is not None
    above.cancel_scope.cancel()
    await trio.sleep(60)


@app.task(name="crash_loop")
async def crash_loop() -> None:
    """Break the event loop of the worker."""

    async def fail() -> None:
        raise ValueError("in a system task")

    trio.lowlevel.spawn_system_task(fail)
    await trio.sleep(60)
