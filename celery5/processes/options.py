"""Options: how a process is to run, whatever its kind."""

from collections.abc import Callable, Mapping

import msgspec

from celery5.app import App
from celery5.config.scaling import merge_budgets
from celery5.logs.log import LogWriter
from celery5.protocol.scaling.budget import Budget, check_task_budgets, take_all
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.reloader import ReloadSignal
from celery5.services.worker.recycling import RestartMode


def _nothing() -> None:
    """Nobody has to know."""


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What processes of all kinds are started with."""

    # What it is called; each incarnation adds a part of its own. "": by host and process id.
    name: str = ""
    # The whole name of the first incarnation, when the caller wants to know it.
    incarnation: str = ""
    # Whether a change of the configuration takes effect without a restart of the process.
    reload: bool = True
    # It runs beside another kind in one process: that one speaks to systemd.
    shares_process: bool = False
    # How many processes of this kind one parent keeps: their status ports are next to each other.
    processes: int = 1
    # Another process of ours has logged already what is logged once for all of them.
    skips_startup_warnings: bool = False
    # Where its log goes; None: to whatever destination eliot has.
    log_writer: LogWriter | None = None
    # What probes and metrics read; None: one of its own.
    process_status: ProcessStatus | None = None
    # The commands that it has performed, by id, with the time of each: kept over incarnations, none is done twice.
    performed_commands: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    # Whether and how the process is replaced by a fresh one.
    restart_mode: RestartMode = msgspec.field(default_factory=RestartMode)
    # Sent when a signal asks for the configuration to be read again.
    reload_signal: ReloadSignal = msgspec.field(default_factory=ReloadSignal)
    # Called when a step does not end: this process will not be whole again.
    on_stuck: Callable[[], None] = _nothing


def resolve_budgets(app: App) -> dict[str, Budget]:
    """Return how many jobs of each kind may run at once: what the application says, else its setting `budgets`, else
    the number of slots from the settings. Tasks with budgets of their own follow, and those that take resources.

    Raises:
        Misconfigured: A budget is for no task, or leaves no slot for others.
    """
    budgets = merge_budgets(app.settings, app.budgets)
    for name, task in app.tasks.items():
        if task.takes_resources and name not in budgets:
            budgets[name] = Budget(
                minimum=0, maximum=budgets[task.kind].max_slots, cooldown=0.0, strategy=take_all
            )
    find_task_kinds(app, budgets)
    return budgets


def find_task_kinds(app: App, budgets: Mapping[str, Budget]) -> dict[str, str]:
    """Return the kinds of the tasks that have budgets of their own. Raises Misconfigured."""
    return check_task_budgets(budgets, {name: task.kind for name, task in app.tasks.items()})
