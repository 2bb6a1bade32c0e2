"""Box: the process of a Python box: `python -m celery5.processes.box`, started by a worker (C62).

Floor: processes. Reads: frames on its stdin. Writes: frames on what was its stdout; what user code prints, to stderr.

One thread reads what the worker says; the main thread runs one job after another (`runners/in_box.py`). When the
worker's end of the pipe is closed it ends; when that happens in the middle of a job its worker is dead, and it kills
itself and whatever the job has started.
"""

import contextlib
import faulthandler
import importlib
import io
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, cast

from celery5.app import App, default_app
from celery5.errors import BadArguments, CeleryError
from celery5.protocol.envelope import Failure
from celery5.protocol.frames import (
    VERSION,
    Cancel,
    FromBox,
    Hello,
    Home,
    Line,
    Ready,
    Run,
    SoftLimit,
    answer_of,
    frame,
    read_to_box,
)
from celery5.protocol.verdict import Outcome, Reason, Refused
from celery5.runners.box_launcher import end_with
from celery5.runners.ending import failure_of
from celery5.runners.in_box import InBox
from celery5.stdlib_log import routed
from celery5.task import Task

NAME = "celery5-box"


class Wire:
    """The two pipes to the worker, out of user code's reach: its stdin is empty, and what it prints goes to stderr."""

    def __init__(self) -> None:
        self.incoming: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out = os.dup(1)
        self._lock = threading.Lock()
        self.undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.dup2(2, 1)
        stdout: object = sys.stdout
        if isinstance(stdout, io.TextIOWrapper):
            cast("io.TextIOWrapper[Any]", stdout).reconfigure(line_buffering=True)

    def say(self, said: FromBox) -> None:
        """Write one frame, from any thread. Ends the process when nobody reads it any more."""
        left = memoryview(frame(said))
        try:
            with self.undisturbed(), self._lock:
                while left:
                    left = left[os.write(self._out, left) :]
        except OSError:
            _end_all()

    def tell(self, event: str, level: Any, /, **fields: Any) -> None:
        """A line for the worker's log, from what celery5 itself says here."""
        self._line(Line(level=level, event=event, fields=_plain(fields)))

    def take(self, message: dict[str, Any]) -> None:
        """A line for the worker's log, from Python's own."""
        said, logger, level = (str(message.pop(name, "")) for name in ("message", "logger", "level"))
        message.pop("message_type", None)
        self._line(Line(message=said, level=cast("Any", level), logger=logger, fields=_plain(message)))

    def _line(self, line: Line) -> None:
        with contextlib.suppress(TypeError, ValueError):
            self.say(line)


def main() -> None:
    """Be a box until the worker ends it."""
    end_with(int(sys.argv[1]))
    # Ended by force, it says where it was.
    faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)
    wire = Wire()
    hello = read_to_box(wire.incoming.readline())
    if not isinstance(hello, Hello) or hello.python is None:
        sys.exit("a box is started by a worker of celery5, which says hello")
    app = _app_of(hello.python)
    inside, runs = InBox(wire.tell), queue.SimpleQueue[Run | None]()
    wire.undisturbed = inside.undisturbed
    threading.Thread(target=_listen, args=(wire, inside, runs), name=NAME, daemon=True).start()
    wire.say(Ready(VERSION, ("soft-limit", "cancel")))
    with routed(wire.take, "info"):
        for run in iter(runs.get, None):
            outcome = _run(app, inside, run)
            inside.finish()
            with contextlib.suppress(Exception):  # a stream of the user's own
                sys.stdout.flush()
            wire.say(answer_of(outcome, run.id))


def _listen(wire: Wire, inside: InBox, runs: "queue.SimpleQueue[Run | None]") -> None:
    """In a thread of its own: what the worker says."""
    for line in wire.incoming:
        match read_to_box(line):
            case Run() as run:
                inside.begin(run.id)
                runs.put(run)
            case SoftLimit() | Cancel() as said:
                inside.hear(said)
            case _:
                pass
    if inside.busy:
        _end_all()
    runs.put(None)


def _end_all() -> None:
    """The worker is gone: nobody wants this, nor what the job has started."""
    os.killpg(0, signal.SIGKILL)


def _app_of(home: Home) -> App:
    """The worker's application, as it is here."""
    sys.path[:] = [*home.path, *(each for each in sys.path if each not in home.path)]
    importlib.import_module(home.module)
    app = next(_apps(home), None)
    if app is None:
        sys.exit(
            f"module {home.module!r} has no application {home.app!r} when a box imports it: make it at the top of a "
            "module"
        )
    app.module = home.module
    app.configure(**home.settings)
    app.load()
    return app


def _apps(home: Home) -> Iterator[App]:
    for module in (sys.modules[home.module], *list(sys.modules.values())):
        yield from (
            each for each in list(vars(module).values()) if isinstance(each, App) and each.name == home.app
        )
    if home.app == default_app().name:
        yield default_app()


def _run(app: App, inside: InBox, run: Run) -> Outcome:
    """One job's outcome."""
    if run.task not in app.tasks:
        text = f"no task {run.task!r} in its box: is it declared when the box imports module {app.module!r}?"
        return Refused(Reason.UNKNOWN_TASK, Failure(type="UnknownTask", message=text))
    task: Task[Any, Any] = app.tasks[run.task]
    try:
        args, kwargs = task.parameters.decode(run.args, run.kwargs)
    except BadArguments as error:
        return Refused(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
    except (Exception, SystemExit) as error:  # the user's code: __post_init__, a validator
        return Refused(Reason.BAD_ARGUMENTS, failure_of(error))
    function = task.deduplicate if run.policy and task.deduplicate is not None else task.function
    return inside.perform(run, task.loop, function, args, kwargs)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON has."""
    known = str | int | float | bool | None
    return {name: each if isinstance(each, known) else repr(each) for name, each in fields.items()}


if __name__ == "__main__":
    try:
        main()
    except CeleryError as error:
        sys.exit(str(error))
