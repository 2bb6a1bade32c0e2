"""Show what alerts fire, and silence them (`alert`)."""

from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, format_cell, format_table, format_time, to_json, to_one_line
from celery5.cli.terminal.target import Target

if TYPE_CHECKING:
    from celery5.observability.alerts import AlertState
    from celery5.protocol.observability.alerting import AlertRule, AlertTransition


@click.group(no_args_is_help=False)
def alert() -> None:
    """See what alerts fire and have fired, and silence them."""


@alert.command("list")
@click.option("--check", is_flag=True, help="Exit with code 1 if an alert fires that is not silenced.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_context
def list_alerts(context: click.Context, /, *, check: bool, wants_json: bool) -> None:
    """Show each rule, and each of its alerts that is pending or fires."""
    target: Target = context.obj
    states = target.load().alerts.list()
    if wants_json:
        echo(to_json(states))
    else:
        echo(format_table([_make_row(state) for state in states], empty="there are no rules of alerts"))
    if check and any(state.fires for state in states):
        context.exit(EXIT_FAILED)


@alert.command()
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def rules(target: Target, /, *, wants_json: bool) -> None:
    """Show the rules: those of the application, of its settings, and those built in."""
    found = target.load().alerts.rules()
    if wants_json:
        echo(to_json(found))
    else:
        echo(format_table([_make_rule_row(rule) for rule in found], empty="there are no rules of alerts"))


@alert.command()
@click.argument("name")
@click.option(
    "--for",
    "seconds",
    type=Duration(min=1),
    metavar="SPAN",
    default="1h",
    show_default=True,
    help="90 (seconds), 15m, 2h, 7d.",
)
@click.option("--why", default="", help="Why, for others to read.")
@click.pass_obj
def silence(target: Target, /, name: str, *, seconds: float, why: str) -> None:
    """Notify nobody of the alerts of the rule NAME for some time; of all rules: '*'."""
    silenced = target.load().alerts.silence(name, seconds, why)
    echo(f"{to_one_line(name)}: silenced until {format_time(silenced.until)}")


@alert.command()
@click.argument("name")
@click.pass_context
def unsilence(context: click.Context, /, name: str) -> None:
    """End the silence of the rule NAME."""
    target: Target = context.obj
    if target.load().alerts.unsilence(name):
        echo(f"{to_one_line(name)}: not silenced any more")
    else:
        echo(f"{to_one_line(name)} was not silenced", err=True)
        context.exit(EXIT_FAILED)


@alert.command()
@click.option("--count", type=click.IntRange(min=1), default=50, show_default=True, help="Alerts at most.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def history(target: Target, /, *, count: int, wants_json: bool) -> None:
    """Show which alerts have fired and resolved: the newest first, of the last 500."""
    found = target.load().alerts.history(count=count)
    if wants_json:
        echo(to_json(found))
    else:
        echo(format_table([_make_history_row(one) for one in found], empty="no alert has fired"))


@alert.command()
@click.pass_context
def test(context: click.Context, /) -> None:
    """Send a test notification to the webhook, from this machine."""
    from celery5.observability.webhook import WebhookRefused

    target: Target = context.obj
    try:
        app = target.load()
        name = app.alerts.test()
    except WebhookRefused as error:
        echo(f"the notification did not arrive: {to_one_line(str(error))}", err=True)
        context.exit(EXIT_FAILED)
    app.audit.record_sending("alert:test", name)
    echo(f"sent {name}")


def _make_row(state: "AlertState") -> dict[str, object]:
    return {
        "alert": state.name,
        "subject": state.subject,
        "status": state.status,
        "severity": state.severity,
        "since": "" if state.since is None else format_time(state.since),
        "what": state.description,
        "silenced until": "" if state.silence is None else format_time(state.silence.until),
        "not delivered": "" if state.undelivered is None else state.undelivered.description,
    }


def _make_rule_row(rule: "AlertRule") -> dict[str, object]:
    condition = rule.condition
    names = [name for name in (condition.queue, condition.task, condition.stream, condition.group) if name]
    return {
        "alert": rule.name,
        "measures": condition.measure,
        "of": ", ".join(names) or "all",
        "above": format_cell(condition.above),
        "for": f"{rule.for_:g} s",
        "resolves at": f"{condition.resolves_at:g}",
        "severity": rule.severity,
    }


def _make_history_row(one: "AlertTransition") -> dict[str, object]:
    return {
        "at": format_time(one.at),
        "alert": one.name,
        "subject": one.subject,
        "change": f"{one.change}, silenced" if one.silenced else one.change,
        "severity": one.severity,
        "what": one.description,
    }
