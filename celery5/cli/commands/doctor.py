"""Doctor: the command that looks whether all is well with an application, its broker and this machine."""

from collections import Counter
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, format_cell, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError, Misconfigured
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from celery5.protocol.health.broker_diagnosis import Finding


@click.command()
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.option(
    "--limit",
    type=Duration(0.1, 600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each check may take.",
)
@click.pass_obj
def doctor(target: Target, *, wants_json: bool, limit: float) -> int:
    """Look at the application, its settings, broker, keys and workers, at systemd's units, and at Python.

    A line for each: ok, warn or fail, and what to do. Exits with 1 when one fails.
    """
    from celery5.config.settings import InvalidSettings
    from celery5.doctor.examination import get_checks, get_host_checks, run_checks
    from celery5.protocol.health.broker_diagnosis import Finding

    found: list[Finding] = []
    try:
        checks = get_checks(target.load(serves=True))
    except (Misconfigured, BrokerError) as error:
        if not target.name:
            raise
        why = get_error_text(error)
        which = "settings" if isinstance(error, InvalidSettings) else "application"
        found.append(Finding(which, "fail", why, "correct it: all else needs the application"))
        checks = get_host_checks()
    for each in found:
        _show(each, wants_json)
    for each in run_checks(checks, limit=limit):
        _show(each, wants_json)
        found.append(each)
    if wants_json:
        echo(to_json(found))
    else:
        counts = Counter(each.state for each in found)
        echo(f"\n{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")
    return EXIT_FAILED if any(each.state == "fail" for each in found) else 0


def _show(each: "Finding", wants_json: bool) -> None:
    """A line as soon as it is known, and below it what to do."""
    if wants_json:
        return
    echo(f"{each.state:4}  {each.check:12}  {format_cell(each.says)}")
    if each.state != "ok" and each.remedy:
        echo(f"{'':20}{format_cell(each.remedy)}")
