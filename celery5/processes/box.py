"""Box: the process of a Python box: `python -m celery5.processes.box`, started by a worker (C62).

One thread reads what the worker says; the main thread runs one job after another (`runners/boxes/in_box.py`). When the
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
from celery5.logs.stdlib_log import captured_logging
from celery5.protocol.boxes.frames import (
    VERSION,
    BoxHello,
    BoxHome,
    BoxLogLine,
    BoxReady,
    CancelJob,
    FromBox,
    RunJob,
    SoftLimitReached,
    decode_to_box,
    encode_frame,
    to_box_reply,
)
from celery5.protocol.job.envelope import Failure
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Reason
from celery5.runners.boxes.in_box import BoxMainThread
from celery5.runners.boxes.launcher import die_with_parent
from celery5.runners.outcome import make_failure
from celery5.tasks.task import Task

NAME = "celery5-box"


class BoxPipes:
    """The two pipes to the worker, out of user code's reach: its stdin is empty, and what it prints goes to stderr."""

    def __init__(self) -> None:
        self.incoming: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out = os.dup(1)
        self._lock = threading.Lock()
        self.defer_errors: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.dup2(2, 1)
        stdout: object = sys.stdout
        if isinstance(stdout, io.TextIOWrapper):
            cast("io.TextIOWrapper[Any]", stdout).reconfigure(line_buffering=True)

    def send(self, said: FromBox) -> None:
        """Write one frame, from any thread. Ends the process when nobody reads it any more."""
        left = memoryview(encode_frame(said))
        try:
            with self.defer_errors(), self._lock:
                while left:
                    left = left[os.write(self._out, left) :]
        except OSError:
            _end_all()

    def send_event(self, event: str, level: Any, /, **fields: Any) -> None:
        """A line for the worker's log, from what celery5 itself says here."""
        self._line(BoxLogLine(level=level, event=event, fields=_plain(fields)))

    def send_log_record(self, message: dict[str, Any]) -> None:
        """A line for the worker's log, from Python's own."""
        said, logger, level = (str(message.pop(name, "")) for name in ("message", "logger", "level"))
        message.pop("message_type", None)
        self._line(BoxLogLine(message=said, level=cast("Any", level), logger=logger, fields=_plain(message)))

    def _line(self, line: BoxLogLine) -> None:
        with contextlib.suppress(TypeError, ValueError):
            self.send(line)


def main() -> None:
    """Be a box until the worker ends it."""
    die_with_parent(int(sys.argv[1]))
    # Ended by force, it says where it was.
    faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)
    wire = BoxPipes()
    hello = decode_to_box(wire.incoming.readline())
    if not isinstance(hello, BoxHello) or hello.python is None:
        sys.exit("a box is started by a worker of celery5, which says hello")
    app = _app_of(hello.python)
    inside, runs = BoxMainThread(wire.send_event), queue.SimpleQueue[RunJob | None]()
    wire.defer_errors = inside.defer_errors
    threading.Thread(target=_listen, args=(wire, inside, runs), name=NAME, daemon=True).start()
    wire.send(BoxReady(VERSION, ("soft-limit", "cancel")))
    with captured_logging(wire.send_log_record, "info"):
        for run in iter(runs.get, None):
            outcome = _run(app, inside, run)
            inside.end_job()
            with contextlib.suppress(Exception):  # a stream of the user's own
                sys.stdout.flush()
            wire.send(to_box_reply(outcome, run.id))


def _listen(wire: BoxPipes, inside: BoxMainThread, runs: "queue.SimpleQueue[RunJob | None]") -> None:
    """In a thread of its own: what the worker says."""
    for line in wire.incoming:
        match decode_to_box(line):
            case RunJob() as run:
                inside.start_job(run.id)
                runs.put(run)
            case SoftLimitReached() | CancelJob() as said:
                inside.on_message(said)
            case _:
                pass
    if inside.is_busy:
        _end_all()
    runs.put(None)


def _end_all() -> None:
    """The worker is gone: nobody wants this, nor what the job has started."""
    os.killpg(0, signal.SIGKILL)


def _app_of(home: BoxHome) -> App:
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


def _apps(home: BoxHome) -> Iterator[App]:
    for module in (sys.modules[home.module], *list(sys.modules.values())):
        yield from (
            each for each in list(vars(module).values()) if isinstance(each, App) and each.name == home.app
        )
    if home.app == default_app().name:
        yield default_app()


def _run(app: App, inside: BoxMainThread, run: RunJob) -> Outcome:
    """One job's outcome."""
    if run.task not in app.tasks:
        text = f"no task {run.task!r} in its box: is it declared when the box imports module {app.module!r}?"
        return PermanentFailure(Reason.UNKNOWN_TASK, Failure(type="UnknownTask", message=text))
    task: Task[Any, Any] = app.tasks[run.task]
    try:
        args, kwargs = task.parameters.decode(run.args, run.kwargs)
    except BadArguments as error:
        return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
    except (Exception, SystemExit) as error:  # the user's code: __post_init__, a validator
        return PermanentFailure(Reason.BAD_ARGUMENTS, make_failure(error))
    function = task.deduplicate if run.policy and task.deduplicate is not None else task.function
    return inside.run_job(run, task.loop, function, args, kwargs)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON has."""
    known = str | int | float | bool | None
    return {name: each if isinstance(each, known) else repr(each) for name, each in fields.items()}


if __name__ == "__main__":
    try:
        main()
    except CeleryError as error:
        sys.exit(str(error))
