"""Make files, start to count them, and check: `python -m celery5.examples.count_files make|start|check FOLDER`."""

import argparse
import sys
import time
from pathlib import Path

from celery5 import App
from celery5.errors import CeleryError
from celery5.examples.count_files import app
from celery5.examples.count_files.tasks import Count, count_files, count_plainly

POLL_INTERVAL = 0.5
"""Seconds between two looks at the run."""


def make(arguments: argparse.Namespace) -> None:
    """Write many small files, a thousand to a folder. The same arguments write the same files."""
    for number in range(arguments.files):
        folder = arguments.folder / f"{number // 1000:03}"
        if number % 1000 == 0:
            folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text("one more line\n" * (number % 5) + f"of file {number}\n")


def start(arguments: argparse.Namespace) -> None:
    """Start to count. It may be killed, and repeated: the same id is the same run."""
    run = count_files(arguments.folder.absolute()).start(id=arguments.id)
    sys.stdout.write(f"run {run.id} {'has begun' if run.is_new else 'had begun before'}\n")


def check(arguments: argparse.Namespace) -> None:
    """Wait until all files are counted, and compare the sum with that of a plain loop."""
    expected = count_plainly(arguments.folder.absolute())
    counted = Count(**wait_for_run(app, arguments.id, within=arguments.within))
    if counted != expected:
        sys.exit(f"Error: {counted} was counted, a plain loop finds {expected}")
    sys.stdout.write(
        f"{expected.files} files, {expected.lines} lines, {expected.words} words: as a plain loop says\n"
    )


def wait_for_run(app: App, run_id: str, *, within: float) -> dict[str, int]:
    """Return the result of a run, which is plain JSON: a handle that was found does not know the workflow's type.

    Args:
        app: The application.
        run_id: The id of the run.
        within: Seconds to wait. They begin again whenever more files are counted.
    """
    run = app.workflows.find(run_id)
    if run is None:
        sys.exit(f"Error: there is no run {run_id}: start it")
    end, seen = time.monotonic() + within, -1
    while (status := run.status()).ended is None and time.monotonic() < end:
        if status.done != seen:
            end, seen = time.monotonic() + within, status.done
            sys.stderr.write(f"{status.done} of {status.total}\n")
        time.sleep(POLL_INTERVAL)
    result: dict[str, int] = run.get(timeout=0)
    return result


def parse_arguments() -> argparse.Namespace:
    """Return the command, as the function `run`, and its arguments."""
    parser = argparse.ArgumentParser(prog="python -m celery5.examples.count_files")
    commands = parser.add_subparsers(required=True)
    for function in (make, start, check):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("folder", type=Path)
        if function is make:
            command.add_argument("--files", type=int, default=100_000)
        else:
            command.add_argument("--id", default="count-files", help="the id of the run")
        if function is check:
            command.add_argument("--within", type=float, default=30.0, help="seconds without any progress")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse_arguments()
    try:
        chosen.run(chosen)
    except (CeleryError, OSError) as error:
        sys.exit(f"Error: {error}")
