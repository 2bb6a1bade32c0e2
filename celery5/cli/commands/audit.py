"""Show who has done what (`audit`)."""

from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo, format_cell, format_time
from celery5.operations.cluster import CLUSTER_OPERATIONS
from celery5.protocol.audit import AuditEntry


def _to_fields(entries: list[AuditEntry]) -> list[dict[str, object]]:
    names = AuditEntry.__struct_fields__
    return [{"at": entry.at, **{name: getattr(entry, name) for name in names}} for entry in entries]


def _show_next_page(finished: Finished) -> None:
    entries: list[AuditEntry] = finished.result
    if not finished.wants_json and len(entries) == finished.asked.limit:
        echo(f"for older actions: --before {entries[-1].id}", err=True)


def _make_row(entry: AuditEntry) -> dict[str, object]:
    return {
        "at": format_time(entry.at),
        "who": entry.who,
        "from": entry.source if not entry.job else f"{entry.source}, job {entry.job}",
        "action": entry.action,
        "target": entry.target,
        "filter": ", ".join(f"{name}={format_cell(value)}" for name, value in entry.filter.items()),
        "count": "" if entry.count is None else entry.count,
        "outcome": entry.outcome,
    }


audit = make_group(
    "audit",
    "See what operators and programs have done to queues, tasks and processes.",
    CLUSTER_OPERATIONS,
    {
        "list": CommandView(
            row=_make_row, empty="no actions are recorded", value=_to_fields, after=_show_next_page
        )
    },
)
