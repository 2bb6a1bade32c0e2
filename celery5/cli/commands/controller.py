"""Start and control the Controllers of an application's processes (`controller`)."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from celery5.cli.commands.worker import get_replies, make_timeout_flag
from celery5.cli.terminal.flags import Duration, broker_flag, configure, queue_names, serving_flags
from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group, perform
from celery5.cli.terminal.output import as_called, echo, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerUnavailable, CeleryError, Misconfigured
from celery5.operations.processes import PROCESS_OPERATIONS
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration, format_shortest
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply
    from celery5.protocol.cluster.change_progress import MemberVersions

OWN_FLAGS = frozenset({"name", "burst", "status_port", "status_host", "config"})
"""Flags of the Controller's own process, which its members do not get."""
FLAG_DEFAULTS: Mapping[str, Any] = {"reload": True}
"""The default values of flags: members get only flags with other values."""
PROGRESS_WORDS = {
    "started": "starting",
    "stopped": "stopping",
    "restarted": "restarting",
    "settings": "changed in the description",
    "canaries": "trying, before the others follow",
}
"""Words for people for what has only begun when a Controller answers."""
BROKER_ENDED_AFTER = 2.0
"""Seconds after which an unreachable broker of a Controller counts as ended, not as restarting."""


class ClusterCommandFailed(CeleryError):
    """The Controller did not do a command, or the cluster is not as it should be."""


def _report_unreadable_replies(show: Callable[[Finished], None]) -> Callable[[Finished], None]:
    """End a command with one line when an answer has an unexpected form: answers are not signed."""

    @wraps(show)
    def run(finished: Finished) -> None:
        try:
            show(finished)
        except CeleryError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ClusterCommandFailed(
                "an answer cannot be read: another version sent it, or something that is not a Controller "
                f"({type(error).__name__}: {error})"
            ) from error

    return run


@_report_unreadable_replies
def _show_status(finished: Finished) -> None:
    """Print the members of the cluster. Raises ClusterCommandFailed when one is not as it should be."""
    replies = get_replies(finished.result)
    if finished.wants_json:
        echo(to_json([_to_json_fields(reply) for reply in replies]))
    else:
        for reply in replies:
            if reply.ok:
                echo(_format_members(reply))
    _raise_for_failures(replies)
    faults = [reply.answer["line"] for reply in replies if not reply.answer["whole"]]
    if faults:
        raise ClusterCommandFailed("; ".join(faults))


def _find_own_broker(app: "App", asked: Any, _errors: object) -> bool:
    """Return whether a Controller runs the broker, which then ends, too."""
    return any(answer.get("runs_broker") for answer in _ask_members(app, asked))


@_report_unreadable_replies
def _show_stop(finished: Finished) -> None:
    """Print that the Controllers have ended, once they have. Raises ClusterCommandFailed."""
    replies, wait = get_replies(finished.result), finished.flags["wait"]
    _raise_for_failures(replies)
    if wait and not _have_ended(finished, wait):
        raise ClusterCommandFailed(f"the stop was requested, and it has not ended after {wait:g} s")
    if finished.wants_json:
        echo(to_json([_to_json_fields(reply) for reply in replies]))
    else:
        echo("stopped" if wait else "stopping")


@_report_unreadable_replies
def _show_changes(finished: Finished) -> None:
    """Print what Controllers have begun, and wait until it is done. Raises ClusterCommandFailed."""
    replies, wait = get_replies(finished.result), finished.flags["wait"]
    fields = [_to_json_fields(reply) for reply in replies]
    if finished.wants_json and not (wait and all(reply.ok for reply in replies)):
        echo(to_json(fields))
    elif not finished.wants_json:
        for reply in replies:
            if reply.ok:
                echo(f"{to_one_line(reply.worker)}  {to_one_line(_format_changes(reply.answer))}")
    _raise_for_failures(replies)
    if not wait:
        return
    outcome = _wait_until_up(finished, wait)
    if finished.wants_json:
        echo(to_json([{**controller, "outcome": outcome} for controller in fields]))
    else:
        for line in _format_outcome(outcome):
            echo(to_one_line(line))
    if outcome.failure:
        raise ClusterCommandFailed(outcome.failure)


class ChangeOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a change has ended that was waited for."""

    is_done: bool
    # Why it has failed, or is not done; "" when it is done.
    failure: str = ""
    # When it is done: how many members have loaded which file, where they say so.
    code: Mapping[str, int] = {}
    # When it is not: which version the members run; None where no Controller says so.
    versions: "MemberVersions | None" = None
    # What a person does to go back.
    to_go_back: str = ""


_VERSION_WORDS = {
    "new": "the new version runs in",
    "old": "the old version runs in",
    "in_transition": "starting or stopping",
    "not_running": "not running",
    "unchanged": "not changed",
}
"""What stands before the members of each kind."""


def _format_outcome(outcome: ChangeOutcome) -> list[str]:
    """Return how a change has ended, in lines for people."""
    if outcome.is_done:
        code = [
            f"code: {file} ({format_count(count, 'member')})" for file, count in sorted(outcome.code.items())
        ]
        return [*code, "done"]
    versions = {} if outcome.versions is None else msgspec.structs.asdict(outcome.versions)
    lines = [
        f"{words}: {join_names(versions[kind])}"
        for kind, words in _VERSION_WORDS.items()
        if versions.get(kind)
    ]
    return [*lines, f"to go back: {outcome.to_go_back}"] if outcome.to_go_back else lines


def _describe_way_back(verb: str, wait: float, *, taken_back: bool) -> str:
    """Return what a person does to have the old version again."""
    former = "the former code" if verb == "restart" else "the former cluster description"
    if taken_back:
        return f"no member runs the new version; put {former} back, or mend the new version, before the next {verb}"
    again = as_called(f"celery5 controller {verb} --wait {format_shortest(wait)}")
    return f"put {former} back, then {again}"


def _make_view(show: Callable[[Finished], object], **options: Any) -> CommandView:
    parameters = {
        "timeout": make_timeout_flag(),
        "how": None,
    }  # a Controller ends its members in order in any case
    return CommandView(show=show, parameters=parameters, **options)


_END_FLAG = click.Option(
    ["--wait"],
    type=Duration(0, 3600),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the end is waited for.",
)
_DONE_FLAG = click.Option(
    ["--wait"],
    type=Duration(0, 86_400),
    default=0.0,
    metavar="SECONDS",
    help="Return when it is done, and fail when it is not after so long; without it, when it has begun.",
)
controller = make_group(
    "controller",
    "The controller keeps an application's processes alive.",
    PROCESS_OPERATIONS,
    {
        "status": _make_view(
            _show_status,
            help="Show how the members of the cluster are. Fails when one is not as it should be.",
        ),
        "stop": _make_view(
            _show_stop,
            before=_find_own_broker,
            flags=(_END_FLAG,),
            asks=False,
            help="Have the Controller end all members in order, and itself; returns when that is done.",
        ),
        "reload": _make_view(
            _show_changes,
            flags=(_DONE_FLAG,),
            help="Have the Controller read the cluster description again. Only what has changed is restarted, "
            "one member of a group at a time.",
        ),
        "restart": _make_view(
            _show_changes,
            flags=(_DONE_FLAG,),
            asks=False,
            help="Have these members restarted, or all, one of a group at a time, without a pause.",
        ),
        "scale": _make_view(_show_changes, flags=(_DONE_FLAG,)),
    },
)


# By hand, since it runs a process until that is stopped.
@controller.command()
@click.option("--development", is_flag=True, help="Everything in one process, with its own private server.")
@click.option("--watch", is_flag=True, help="With --development: restart when a Python file here changes.")
@click.option(
    "--cluster",
    "file",
    metavar="FILE",
    default="",
    help="The cluster description; default: cluster.toml here, else one worker.",
)
@click.option(
    "--dashboard/--no-dashboard",
    "with_dashboard",
    default=True,
    help="With --development: serve the dashboard, too, and print its address; default: do.",
)
@broker_flag
@serving_flags
@click.pass_obj
def start(
    target: Target, /, *, development: bool, watch: bool, file: str, with_dashboard: bool, **values: Any
) -> int:
    """Keep the application's processes alive until stopped: those in the cluster description.

    Flags are those of all members, where the description says nothing else. The first SIGTERM or Ctrl-C ends them in
    order, the second one at once; SIGHUP has the description read again.
    """
    if watch:
        return _watch(development=development)  # without the application: each start loads it again
    app = target.load(serves=True)
    if development:
        return _develop(app, file, values, with_dashboard=with_dashboard)
    if values["burst"]:
        raise Misconfigured("--burst is for workers: a Controller starts again what ends")
    flags = {
        name: value
        for name, value in values.items()
        if name not in OWN_FLAGS and value not in (None, FLAG_DEFAULTS.get(name))
    }
    if values["config"]:
        flags["config"] = values["config"]
    if "queues" in flags:
        flags["queues"] = queue_names(flags["queues"])
    options = configure(app, values)
    from celery5.processes.controller import ClusterOptions, serve

    _ = app.connections.endpoint  # a URL that cannot be parsed is an error at once
    return serve(app, options, ClusterOptions(target.name, file, flags))


def _watch(*, development: bool) -> int:
    """Run this command without the flag, and restart it when the code changes."""
    if not development:
        raise click.UsageError("--watch needs --development; otherwise run `controller restart`")
    from celery5.processes.code_watch import run_with_restart

    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--watch"]
    return run_with_restart([sys.executable, *arguments], Path.cwd())


def _develop(app: "App", file: str, values: dict[str, Any], *, with_dashboard: bool) -> int:
    if file or values.pop("broker"):
        raise Misconfigured(
            "a development controller is one process with its own server: leave --cluster and --broker out"
        )
    if app.config == "redis" and not os.environ.get("CELERY5_BROKER"):
        app.use_config(None)  # a server of its own begins with an empty hash
    options = configure(app, values)
    from celery5.processes.development import serve

    return serve(app, options, with_dashboard=with_dashboard)


def _have_ended(finished: Finished, seconds: float) -> bool:
    """Return whether the Controllers ended within `seconds`. A broker that one of them runs ends last of all."""
    deadline, unreachable_since, runs_broker = time.monotonic() + seconds, None, finished.before
    stopped = {reply.worker for reply in get_replies(finished.result)}
    while time.monotonic() < deadline:
        try:
            if stopped.isdisjoint(_list_live_controllers(finished.app)) and not runs_broker:
                return True
            unreachable_since = None
        except BrokerUnavailable:
            if not runs_broker:
                raise
            unreachable_since = unreachable_since or time.monotonic()
            if time.monotonic() - unreachable_since > BROKER_ENDED_AFTER:
                return True
        time.sleep(0.1)
    return False


def _list_live_controllers(app: "App") -> list[str]:
    from celery5.broker.calls import cluster

    return [get_inbox_name(name) for name in app.perform(cluster.list_live_processes(app.keys, "controller"))]


def _wait_until_up(finished: Finished, seconds: float) -> ChangeOutcome:
    """Wait until every member is as it should be, the change has failed, see `judge_change`, or the time is over.

    Of a command that names members only those count.
    """
    from celery5.protocol.cluster.change_progress import ChangeProgress, judge_change

    deadline, progress, last = time.monotonic() + seconds, ChangeProgress(), None
    named = getattr(finished.asked, "members", None)
    begun = [reply.answer for reply in get_replies(finished.result) if reply.ok]
    has_canaries = any("canaries" in answer for answer in begun)
    change = next(
        (answer["change"] for answer in begun if "change" in answer and not answer.get("stands_by")), None
    )
    while time.monotonic() < deadline:
        try:
            answers = _ask_members(finished.app, finished.asked)
        except BrokerUnavailable:  # a broker of the cluster's own may be restarted, too
            answers = []
        for answer in answers:
            if answer["leads"]:
                progress = judge_change(answer, named=named, change=change, has_canaries=has_canaries)
                last = answer
                if progress.failure:
                    return _describe_failure(finished, progress.failure, last, taken_back=progress.taken_back)
                if progress.is_done:
                    return ChangeOutcome(is_done=True, code=_count_code(answer["members"], named))
        time.sleep(0.2)
    pending = ", ".join(progress.pending) or "no Controller says so"
    failure = f"the command was sent, and is not done after {seconds:g} s: {pending}"
    return _describe_failure(finished, failure, last, taken_back=False)


def _count_code(members: Sequence[Mapping[str, Any]], named: Container[str] | None) -> Counter[str]:
    """Return how many members have loaded which file, where they say so."""
    return Counter(
        member["code"]
        for member in members
        if member.get("code") and (named is None or member["name"] in named)
    )


def _describe_failure(
    finished: Finished, failure: str, answer: Mapping[str, Any] | None, *, taken_back: bool
) -> ChangeOutcome:
    """Return how a change has ended that has failed or is not done.

    Args:
        finished: The command.
        failure: Why.
        answer: What the leading Controller has said last of its members; None for nothing.
        taken_back: Whether the change was taken back.
    """
    from celery5.protocol.cluster.change_progress import list_versions

    verb = click.get_current_context().info_name or ""
    if verb == "scale":  # it has no versions
        return ChangeOutcome(is_done=False, failure=failure)
    begun = [reply.answer for reply in get_replies(finished.result) if reply.ok]
    canaries = {name for made in begun for name in made.get("canaries", ())}
    # When the canaries have passed, any member may be restarted: the answer to the command is older.
    changed = {name for made in begun for kind in ("started", "restarted") for name in made.get(kind, ())}
    versions = None
    if answer is not None:
        versions = list_versions(
            answer, changed=None if canaries else changed, canaries=canaries, taken_back=taken_back
        )
    way_back = _describe_way_back(verb, finished.flags["wait"], taken_back=taken_back)
    return ChangeOutcome(is_done=False, failure=failure, versions=versions, to_go_back=way_back)


def _ask_members(app: "App", asked: Any) -> list[Mapping[str, Any]]:
    """Return what the Controllers that are asked, and answer, say of their members."""
    operation = next(
        candidate
        for candidate in PROCESS_OPERATIONS
        if (candidate.noun, candidate.verb) == ("controller", "status")
    )
    replies = perform(app, operation, operation.parameters(to=asked.to, timeout=asked.timeout))
    return [reply.answer for reply in replies if reply.ok]


def _format_changes(answer: Mapping[str, Any]) -> str:
    """Return the members that a command has started, stopped and so on, as one line of text."""
    if answer.get("stands_by"):
        return "stands by: it does so when it leads"
    if "groups" in answer:  # of `scale`
        return ", ".join(f"{group}: {count}" for group, count in answer["groups"].items())
    changes = [
        f"{PROGRESS_WORDS.get(change, change)}: {', '.join(names)}"
        for change, names in answer.items()
        if names and change != "change"  # its number is for programs
    ]
    return "; ".join(changes) or "nothing has changed"


def _raise_for_failures(replies: "list[Reply]") -> None:
    """Raise ClusterCommandFailed with the reasons of those that failed; a reason of several is stated once."""
    failed: dict[str, list[str]] = {}
    for reply in replies:
        if not reply.ok:
            failed.setdefault(f"({reply.reason}): {reply.why}", []).append(reply.worker)
    if failed:
        raise ClusterCommandFailed(
            "; ".join(f"{', '.join(names)} did not do it {why}" for why, names in failed.items())
        )


def _to_json_fields(reply: "Reply") -> dict[str, Any]:
    if not reply.ok:
        return {"controller": reply.worker, "ok": False, "reason": reply.reason, "why": reply.why}
    answer: dict[str, Any] = reply.answer
    return {"controller": reply.worker, "ok": True, **answer}


def _format_recycling(member: Mapping[str, Any]) -> str:
    """Return why a member is being recycled, or for which one it works, for people; "" for neither, or not known."""
    why, replaces = member.get("recycling", ""), member.get("replaces", "")
    in_place = f"in place of {replaces}, which is recycled" if replaces else ""
    return f"recycling: {why}" if why else in_place


def _format_members(reply: "Reply") -> str:
    """Return a line about the cluster, and below it a line for each member of a Controller."""
    rows = [
        {
            "member": member["name"],
            "host": member["host"] or "here",
            "pid": "" if member.get("pid") is None else member["pid"],
            "is": member["phase"],
            "for": "" if member["for"] is None else format_duration(member["for"]),
            "died": member["deaths"],
            "restarts": member["restarts"],
            "reported": "" if member["status_age"] is None else format_age(0.0, member["status_age"]),
            "status": member["trouble"] or _format_recycling(member) or member["status"],
        }
        for member in reply.answer["members"]
    ]
    leader = reply.answer["leader"]
    since = format_duration(max(0.0, time.time() - leader["since"]))
    leads = f"leads for {since}: " if reply.answer["leads"] else ""
    line = reply.answer["line"] if reply.answer["whole"] else reply.answer["line"].partition("; ")[0]
    head = f"{to_one_line(reply.worker)}: {leads}{to_one_line(line)}"
    return f"{head}\n{format_table(rows, empty='no members')}" if leads or rows else head
