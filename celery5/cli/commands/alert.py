"""Show what alerts fire, and silence them (`alert`)."""

from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import format_time, to_one_line
from celery5.operations.alerts import ALERT_OPERATIONS
from celery5.operations.operation import Changed
from celery5.protocol.observability.alerting import AlertRule, AlertTransition

if TYPE_CHECKING:
    from celery5.broker.calls.alerts import AlertSilence
    from celery5.observability.alerts import AlertState


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


def _make_rule_row(rule: AlertRule) -> dict[str, object]:
    condition = rule.condition
    names = [name for name in (condition.queue, condition.task, condition.stream, condition.group) if name]
    return {
        "alert": rule.name,
        "measures": condition.measure,
        "of": ", ".join(names) or "all",
        "above": f"{condition.above:g}",
        "for": f"{rule.for_:g} s",
        "resolves at": f"{condition.resolves_at:g}",
        "severity": rule.severity,
    }


def _make_history_row(transition: AlertTransition) -> dict[str, object]:
    return {
        "at": format_time(transition.at),
        "alert": transition.name,
        "subject": transition.subject,
        "change": f"{transition.change}, silenced" if transition.silenced else transition.change,
        "severity": transition.severity,
        "what": transition.description,
    }


def _format_silence(changed: Changed) -> str:
    silenced: AlertSilence = changed.value
    return f"{to_one_line(silenced.name)}: silenced until {format_time(silenced.until)}"


def _check(finished: Finished) -> None:
    """Exit with 1 if an alert fires, or nobody can judge that, where --check is given."""
    if finished.flags["check"] and any(state.fires or state.status == "unknown" for state in finished.result):
        click.get_current_context().exit(EXIT_FAILED)


alert = make_group(
    "alert",
    "See what alerts fire and have fired, and silence them.",
    ALERT_OPERATIONS,
    {
        "list": CommandView(
            row=_make_row,
            empty="there are no rules of alerts",
            flags=(
                click.Option(
                    ["--check"],
                    is_flag=True,
                    help="Exit with code 1 if an alert that is not silenced fires, or none can be judged.",
                ),
            ),
            after=_check,
        ),
        "rules": CommandView(row=_make_rule_row, empty="there are no rules of alerts"),
        "history": CommandView(row=_make_history_row, empty="no alert has fired"),
        "silence": CommandView(
            text=_format_silence,
            help="Notify nobody of the alerts of the rule NAME for some time; of all rules: '*'.",
        ),
        "test": CommandView(
            help="Send a test notification to the webhook, from this machine.",
            text=lambda changed: f"sent {changed.value}",
        ),
    },
)
