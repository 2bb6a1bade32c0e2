"""Show and check the settings of an application, and where each comes from (`config`)."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from celery5.cli.terminal.flags import SETTING_FLAGS
from celery5.cli.terminal.output import CommandGroup, echo, echo_hint, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.config.settings import get_descriptions
from celery5.errors import CeleryError
from celery5.protocol.counts import format_count

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.config.member_check import GroupCheck
    from celery5.config.settings import SettingOrigin

DEFAULT_FILE = "cluster.toml"
MAX_NAMED = 12
"""The most settings that a successful check names."""
F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=CommandGroup, no_args_is_help=False)
def config() -> None:
    """Show and check the settings of an application."""


def setting_flags(command: F) -> F:
    """Add the flags of `worker start` that are settings."""
    descriptions = get_descriptions()
    for name in reversed(SETTING_FLAGS):
        flag = f"--{name.replace('_', '-')}"
        if name in ("inbox", "inbox_signatures"):
            command = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=descriptions[name])(command)
        else:
            command = click.option(flag, metavar="VALUE", help=descriptions[name])(command)
    where = click.option("--config", "where", metavar="WHERE", help="A module, a .toml file, or 'redis'.")
    return where(command)


# By hand, since its flags are settings, which apply before anything is shown.
@config.command()
@click.option("--origin", "wants_origin", is_flag=True, help="Show where each value comes from.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@setting_flags
@click.pass_obj
def show(target: Target, /, *, wants_origin: bool, wants_json: bool, **flags: Any) -> None:
    """Show every setting and its value, passwords masked.

    With the flags of `celery5 worker start` it shows what a worker with them would have.
    """
    from celery5.config.settings import get_origins

    origins = get_origins(_load_configured(target, flags))
    if wants_json:
        echo(to_json(origins))
        return
    rows: list[dict[str, object]] = [
        {
            "setting": origin.setting,
            "value": "" if origin.value is None else origin.value,
            **({"origin": origin.origin} if wants_origin else {}),
        }
        for origin in origins
    ]
    echo(format_table(rows, empty="", long="value"))


class MembersWrong(CeleryError):
    """Members of a cluster description cannot load what it says."""


class ClusterReport(NamedTuple):
    """The result of checking a cluster description."""

    file: str
    members: int
    warnings: Sequence[str]
    groups: "Sequence[GroupCheck]"


@config.command()
@click.option(
    "--cluster", "file", metavar="FILE", default="", help="A cluster description; default: cluster.toml here."
)
@click.option("--no-cluster", "skips_cluster", is_flag=True, help="Check no cluster description.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@setting_flags
@click.pass_obj
def check(target: Target, /, *, file: str, skips_cluster: bool, wants_json: bool, **flags: Any) -> None:
    """Check all settings, wherever they are set, what the application declares, and the cluster description, if there
    is one; exits with 2 when one cannot be used, and names it.

    What the members of the description would load on this host is checked, too, in a process of its own; exits with 1
    when one of them cannot. Settings that are allowed, but probably a mistake, are reported as warnings.
    """
    from celery5.app import list_unincluded
    from celery5.config.configuration import check_usable, list_warnings
    from celery5.config.settings import get_origins
    from celery5.processes import foreground
    from celery5.processes.lifecycle.loaded_code import find_code_file

    member_flags = {name: value for name, value in flags.items() if value is not None}
    app = _load_configured(target, flags)
    check_usable(app.settings, app.name, app.settings.broker)
    warnings = list_warnings(app.settings, app.configuration, list(app.tasks), os.environ)
    warnings += list_unincluded()
    origins = get_origins(app)
    foreground.check(app)
    has_cluster = not skips_cluster and bool(file or os.path.exists(DEFAULT_FILE))
    report = _check_cluster(app, target, file, member_flags) if has_cluster else None
    warnings += report.warnings if report else []
    if wants_json:
        echo(to_json(_make_answer(origins, warnings, find_code_file(app), report)))
    else:
        _print_check(origins, warnings, report)
    wrong = sum(group.members for group in report.groups if group.verdict == "wrong") if report else 0
    if report and wrong:
        raise MembersWrong(f"{report.file}: {wrong} of {_count(report.members)} would not run as described")


def _print_check(
    origins: "Sequence[SettingOrigin]", warnings: Sequence[str], report: ClusterReport | None
) -> None:
    for warning in warnings:
        echo(f"Warning: {to_one_line(warning)}", err=True)  # its end says what to do
    places = [f"{origin.setting} ({origin.origin})" for origin in origins if origin.origin != "default"]
    named = ", ".join(places[:MAX_NAMED]) + (", ..." if len(places) > MAX_NAMED else "")
    what = f"{len(places)} of them set: {to_one_line(named)}" if places else "none of them is set"
    echo_hint(
        f"{format_count(len(origins), 'setting')} can be used, {what}; values: celery5 config show --origin"
    )
    if report:
        echo(f"{report.file}: {_count(report.members)}")
    for group in report.groups if report else ():
        detail = f", {group.code}" if group.verdict == "ok" and group.code else ""
        why = f": {group.why}" if group.why else detail
        echo(f"  {group.group} ({_count(group.members)}): {group.verdict}{to_one_line(why)}")


def _make_answer(
    origins: "Sequence[SettingOrigin]", warnings: Sequence[str], code: str, report: ClusterReport | None
) -> dict[str, Any]:
    """Return what `--json` prints."""
    places = [
        {"setting": origin.setting, "origin": origin.origin}
        for origin in origins
        if origin.origin != "default"
    ]
    cluster = report and {"file": report.file, "members": report.members, "groups": report.groups}
    return {
        "settings": len(origins),
        "set": places,
        "warnings": [*warnings],
        "code": code,
        "cluster": cluster,
    }


def _count(members: int) -> str:
    return f"{members} member{'s' * (members != 1)}"


def _check_cluster(app: "App", target: Target, file: str, flags: Mapping[str, Any]) -> ClusterReport:
    """Check the cluster description as a Controller would, and what its members load. Raises Misconfigured."""
    from celery5.config.member_check import check_members
    from celery5.config.settings import find_unknown_variables
    from celery5.processes.controller import ClusterOptions, load_cluster
    from celery5.processes.platform_factory import (
        SINGLE_HOST_PLATFORMS,
        make_platform,
        resolve_platform_name,
    )
    from celery5.protocol.cluster.description import build_members

    where = file or DEFAULT_FILE
    cluster = load_cluster(app, ClusterOptions(target.name, file, flags))
    make_platform(cluster, app.name, os.environ)
    environments = [cluster.environment, *(group.environment for group in cluster.groups)]
    environments += [host.environment for host in cluster.hosts.values()]
    unknown = [name for variables in environments for name in find_unknown_variables(variables)]
    platform = resolve_platform_name(cluster.platform, os.environ)
    elsewhere = "" if platform in SINGLE_HOST_PLATFORMS else f"platform {platform} runs it"
    groups = check_members(cluster, target.name, ("config", *SETTING_FLAGS), reason_elsewhere=elsewhere)
    warnings = [f"{name} is in {where}, and is no setting" for name in unknown]
    return ClusterReport(where, len(build_members(cluster)), warnings, groups)


def _load_configured(target: Target, flags: dict[str, Any]) -> "App":
    app = target.load(serves=True)
    if source := flags.pop("where"):
        app.use_config(source)
    app.configure(**flags)
    return app
