"""Define the `celery5` command and the tree of its commands.

A command's module is imported when the command is used, and with it the operations that the command is made from. The
user's modules are imported only when a command that needs them runs. A probe imports neither Trio nor the Redis client.
"""

import atexit
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING

import click

import celery5
from celery5.cli.terminal.errors import EXIT_USAGE, run_reporting_errors
from celery5.cli.terminal.output import INVOCATION, WHOLE_SENTENCE, Invocation, echo
from celery5.cli.terminal.target import Target
from celery5.lazy_modules import without_garbage_collection

if TYPE_CHECKING:
    from celery5.logs.printed_lines import MemberOutput

COMMANDS: Mapping[str, str] = {
    "acl": "Print the ACL of Redis for ROLE: what its scripts and commands need, and nothing else.",
    "alert": "See what alerts fire and have fired, and silence them.",
    "audit": "See what operators and programs have done to queues, tasks and processes.",
    "autoscale": "See how many workers there should be, and how far they read ahead.",
    "bulk": "Bulk actions replay, purge, revoke or retry many jobs or runs by themselves.",
    "completion": "Print the code that makes SHELL complete celery5's commands.",
    "config": "Show and check the settings of an application.",
    "controller": "The controller keeps an application's processes alive.",
    "dashboard": "The dashboard shows an application in a browser, and does what commands do.",
    "demo": "Index the files of FOLDER with real jobs, by default those of Python's standard library.",
    "dlq": "Dead-letter queues keep the jobs that failed for good.",
    "docs": "Print PAGE of the documentation of this version, such as tasks; without PAGE list all.",
    "doctor": "Look at the application, its settings, broker, keys and workers, at systemd's units, and at Python.",
    "event": "An event says that something happened; tasks subscribe to events.",
    "health": "Say whether workers do well; exit with 0 if they do, with 1 if not.",
    "info": "Show the queues, what is in them, who works on them, the streams and their groups, and the Routers, "
    "Schedulers, Controllers and publishers that live.",
    "keys": "Keys sign the commands that workers take.",
    "kubernetes": "Manifests for Kubernetes: to run the application's processes there.",
    "metrics": "How jobs end, run and wait; rules for Prometheus and a dashboard for Grafana.",
    "migrate": "Read the Celery project SOURCE, a file or a folder, and show what becomes of it on celery5.",
    "publisher": "A Publisher takes jobs from the processes of a host, keeps them, and publishes them.",
    "queue": "Queues hold jobs until a worker takes them.",
    "router": "Routers take in events and data, and make jobs of them.",
    "schedule": "Schedules send the jobs of periodic tasks.",
    "scheduler": "Schedulers publish periodic tasks, and decide what is decided for a whole cluster.",
    "stream": "A stream keeps records in the order of their keys; processors read it.",
    "systemd": "Units for systemd: one for each kind of process, to run for a user or for the system.",
    "task": "Jobs that were sent, and what is imposed on tasks.",
    "top": "Show queues, tasks, workers, dead letters and running jobs, and act on them by keys.",
    "worker": "Start workers, and send them commands.",
    "workflow": "Runs of workflows.",
}
"""The commands and groups of commands that have a module, by name, with the first sentence of their help.

`celery5 --help` shows these sentences without importing any command. Every other noun of an operation is a group of
commands, too, and needs no module: its help is what the module of its operations says of itself.
"""
STANDALONE: Mapping[str, str] = {
    "acl": "acl",
    "completion": "completion",
    "dashboard": "dashboard",
    "demo": "demo",
    "docs": "docs",
    "doctor": "info",
    "health": "health",
    "info": "info",
    "keys": "keys",
    "kubernetes": "kubernetes",
    "migrate": "migrate",
    "publisher": "processes",
    "router": "processes",
    "scheduler": "processes",
    "systemd": "systemd",
    "top": "top",
    "worker": "processes",
}
"""The commands that are not made from operations, and their modules in `celery5.cli.standalone`."""
COMPLETION_VARIABLE = "_CELERY5_COMPLETE"
"""The variable that a shell sets while it completes a command, by click's convention."""
CHILD = "CELERY5_PARENT"
"""The variable that a Controller sets for its members. It repeats PARENT_VARIABLE of `protocol/cluster/members.py`,
since a probe must import as little as possible."""
THREADS_LIMIT = 2.0
"""Seconds for which the process waits for remaining threads when a command is done."""


def get_module_name(command: str) -> str:
    """Return the name of the module of a command in `COMMANDS`."""
    module = STANDALONE.get(command)
    return f"celery5.cli.standalone.{module}" if module else f"celery5.cli.commands.{command}"


class CommandTree(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return list_all_commands()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None.

        An unknown name imports all commands, so that click can suggest a similar one.
        """
        for name in (cmd_name,) if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                with without_garbage_collection():
                    self.add_command(getattr(import_module(get_module_name(name)), name))
                if COMPLETION_VARIABLE in os.environ:
                    import_module("celery5.cli.standalone.completion").add_name_completion(
                        self.commands[name]
                    )
        if cmd_name not in self.commands and cmd_name in _list_nouns():
            from celery5.cli.terminal.operation_commands import make_group_of

            self.add_command(make_group_of(cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and the summaries of all commands, as click does, but without importing them."""
        texts = {**_list_nouns(), **COMMANDS}
        names = sorted(texts)
        rows = [
            (name, click.Command(name, help=texts[name]).get_short_help_str(WHOLE_SENTENCE)) for name in names
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command as click does. The error for a command of another library's names that of celery5."""
        second = "".join(args[1:2])
        is_runnels = args[:1] == ["worker"] and ":" in second
        if args and (is_runnels or args[0] not in COMMANDS) and (hint := _find_hint(args)):
            raise click.UsageError(f"No such command {args[is_runnels]!r}{hint}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, click.Group) and second and not second.startswith("-"):
            is_known = command.get_command(ctx, second) is not None
            if not is_known and (hint := _find_hint(rest, args[0])):
                raise click.UsageError(f"No such command {second!r}{hint}", ctx)
        return name, command, rest


def list_all_commands() -> list[str]:
    """Return the names of all commands, sorted."""
    return sorted({*COMMANDS, *_list_nouns()})


def _list_nouns() -> Mapping[str, str]:
    """Return the nouns of all operations, with the help of a group of commands."""
    with without_garbage_collection():
        from celery5.operations.table import OPERATIONS

    return {
        operation.noun: (sys.modules[operation.function.__module__].__doc__ or "").strip()
        for operation in OPERATIONS.values()
    }


def _find_hint(words: list[str], group: str = "") -> str:
    from celery5.hints import find_command_hint

    return find_command_hint(words, group)


@click.group(
    cls=CommandTree, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "-A",
    "--app",
    "target",
    metavar="MODULE[:APP]",
    envvar="CELERY5_APP",
    default="",
    show_envvar=True,
    help="The application: a module, and its App when it has several.",
)
@click.option(
    "--app-name",
    metavar="NAME",
    envvar="CELERY5_APP_NAME",
    default="",
    show_envvar=True,
    help="The application's name, for commands that do not need its code.",
)
@click.version_option(celery5.__version__, message="celery5 %(version)s")
@click.pass_context
def cli(context: click.Context, target: str, app_name: str) -> None:
    """Run Python functions somewhere else, soon, and surely."""
    source = context.get_parameter_source
    by_flag = click.core.ParameterSource.COMMANDLINE
    if source("target") is source("app_name") is by_flag:
        raise click.UsageError(
            "-A loads the application's code, --app-name does without it: give only one of them"
        )
    without_code = bool(app_name) and (not target or source("app_name") is by_flag)
    context.obj = Target("", app_name, target) if without_code else Target(target, "", app_name)
    named = ("--app-name", app_name) if without_code else ("-A", target)
    by_flags = by_flag in (source("target"), source("app_name")) and not INVOCATION.get().has_application
    INVOCATION.set(
        INVOCATION.get()._replace(flags=named if by_flags else (), list_commands=list_all_commands)
    )
    if context.invoked_subcommand is None:
        echo(context.get_help(), err=True)
        context.exit(EXIT_USAGE)


def _name_output(words: Sequence[str]) -> "MemberOutput | None":
    """Have each line that this process prints name it, if these words start a member of a Controller."""
    name = next((name for flag, name in pairwise(words) if flag == "--name"), "")
    if not (name and "NOTIFY_SOCKET" in os.environ):
        return None
    from celery5.logs.printed_lines import MemberOutput

    output = MemberOutput(name, words, os.environ)
    output.start()
    return output


def _report_failure(error: str, *, output: "MemberOutput | None") -> bool:
    """Report the error that ends this process to the Controller or systemd that started it, if any.

    Return whether it is in the log then: a Controller logs why its member has ended.
    """
    if output is not None:
        output.note_failure(error)
    if "NOTIFY_SOCKET" in os.environ:
        from celery5.protocol.cluster.members import format_failure_status
        from celery5.services.process.systemd_notify import notify_with_retry, read_notify_settings

        notify_with_retry(
            read_notify_settings(os.environ, os.getpid())["address"], f"STATUS={format_failure_status(error)}"
        )
    return output is not None


def main(
    arguments: Sequence[str] | None = None,
    program: str = "celery5",
    *,
    shown_program: str = "",
    has_application: bool = False,
) -> None:
    """Run one command and exit with its code. As the first process of a container, run it in a child.

    Threads that jobs have left behind, with `asyncio.to_thread` for example, cannot be ended, and the interpreter
    would wait for them for ever. So the process exits after THREADS_LIMIT seconds.

    Args:
        arguments: The words of the command; default: those of this process.
        program: What help calls the program.
        shown_program: What shown commands begin with; default: `program`.
        has_application: Whether the program has put the application's flag into `arguments` itself.
    """
    INVOCATION.set(Invocation(shown_program or program, (), has_application, list_all_commands))
    if os.getpid() == 1:
        import_module("celery5.processes.lifecycle.first_process").stand_above()
    output = None
    if CHILD in os.environ:
        import_module("celery5.cli.terminal.flags").end_with_parent()
        output = _name_output(sys.argv[1:] if arguments is None else arguments)
    code = run_reporting_errors(
        lambda: cli.main(arguments, prog_name=program, standalone_mode=False),
        on_failure=partial(_report_failure, output=output),
    )
    if threading.active_count() > 1:  # daemons, too: the interpreter waits for an executor's threads
        timer = threading.Timer(THREADS_LIMIT, os._exit, (code,))
        timer.daemon = True
        timer.start()
        atexit.register(timer.cancel)  # runs after the threads have ended
    sys.exit(code)
