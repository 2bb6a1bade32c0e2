"""Show an application in the terminal, like htop (`top`)."""

import shutil
import sys
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import interrupted_by_sigterm, require_rich
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured

if TYPE_CHECKING:
    from celery5.cli.top.sources import TopSources

WIDTH_OF_PIPE = 120
"""Columns of a screen that is printed once, where there is no terminal and COLUMNS is not set."""


# By hand, since it is a screen with keys.
@click.command()
@click.option(
    "--since",
    type=Duration(60, 21600),
    metavar="SPAN",
    default="1h",
    show_default=True,
    help="Count the attempts of tasks from 15m or 2h ago on; at most 6h.",
)
@click.option(
    "--interval",
    type=Duration(0.2, 3600),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="How often it is read.",
)
@click.option("--once", is_flag=True, help="Print one screen and end.")
@click.option("--json", "wants_json", is_flag=True, help="For programs: print one overview and end.")
@click.pass_obj
def top(target: Target, *, since: float, interval: float, once: bool, wants_json: bool) -> None:
    """Show queues, tasks, workers, dead letters and running jobs, and act on them by keys.

    Press ? for the keys, and q to quit. Red is what needs a person.
    """
    if not wants_json:
        require_rich("celery5 top", extra="top")
        if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise Misconfigured("celery5 top needs a terminal: add --once for one screen, or --json")
    app = target.load()
    if wants_json:
        echo(to_json(app.metrics.overview(since=since)))
        return
    from celery5.cli.top.sources import TopSources

    sources = TopSources(app, since=since)
    if once:
        _print_screen(sources)
        return
    from celery5.cli.top.session import TopSession

    with interrupted_by_sigterm():
        TopSession(sources, interval=interval).run()


def _print_screen(sources: "TopSources") -> None:
    from rich.console import Console

    from celery5.cli.top.screen import draw_once, make_text
    from celery5.cli.top.tables import View

    width = shutil.get_terminal_size((WIDTH_OF_PIPE, 24)).columns
    console = Console(width=width, highlight=False)
    for line in draw_once(sources.read(View.QUEUES, ""), width):
        console.print(make_text(line), soft_wrap=True)
