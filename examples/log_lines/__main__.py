"""Make log files, send them, and check the totals: `python -m celery5.examples.log_lines make|send|check FOLDER`."""

import argparse
import sys
from pathlib import Path

from celery5.errors import CeleryError
from celery5.examples.log_lines import app, streams
from celery5.examples.log_lines.folder import count_plainly, list_parts, make_files
from celery5.examples.log_lines.totals import wait_for_totals


def make(arguments: argparse.Namespace) -> None:
    """Write log files of made-up hosts."""
    make_files(arguments.folder, hosts=arguments.hosts, minutes=arguments.minutes, lines=arguments.lines)


def send(arguments: argparse.Namespace) -> None:
    """Send the parts of all files. It may be killed, and repeated: no line counts twice."""
    count = sum(1 for _ in streams.parts.send_many(list_parts(arguments.folder.absolute())))
    sys.stdout.write(f"{count} parts sent\n")


def check(arguments: argparse.Namespace) -> None:
    """Wait until each line is counted, and compare the totals with a plain count."""
    expected = count_plainly(arguments.folder.absolute())
    differences = wait_for_totals(app, expected, within=arguments.within)
    for difference in differences[:20]:
        sys.stdout.write(f"{difference}\n")
    if differences:
        sys.exit(f"Error: {len(differences)} totals differ from a plain count")
    lines, errors, alerts = (
        counter.total() for counter in (expected.lines, expected.errors, expected.alerts)
    )
    sys.stdout.write(f"{lines} lines, {errors} errors, {alerts} alerts: as a plain count says\n")


def parse_arguments() -> argparse.Namespace:
    """Return the command, as the function `run`, and its arguments."""
    parser = argparse.ArgumentParser(prog="python -m celery5.examples.log_lines")
    commands = parser.add_subparsers(required=True)
    for function in (make, send, check):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("folder", type=Path)
        if function is make:
            for name, default in (("hosts", 5), ("minutes", 30), ("lines", 400)):
                command.add_argument(f"--{name}", type=int, default=default)
        if function is check:
            command.add_argument("--within", type=float, default=30.0, help="Seconds while nothing changes.")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse_arguments()
    try:
        chosen.run(chosen)
    except (CeleryError, OSError) as error:
        sys.exit(f"Error: {error}")
