"""Show and check the settings of an application, and where each comes from (`config`)."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.cli.terminal.flags import SETTING_FLAGS
from celery5.cli.terminal.output import echo, format_cell, format_table, to_json
from celery5.cli.terminal.target import Target
from celery5.config.settings import get_descriptions

if TYPE_CHECKING:
    from celery5.app import App

DEFAULT_FILE = "cluster.toml"
F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=False)
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


@config.command()
@click.option(
    "--cluster", "file", metavar="FILE", default="", help="A cluster description; default: cluster.toml here."
)
@setting_flags
@click.pass_obj
def check(target: Target, /, *, file: str, **flags: Any) -> None:
    """Check all settings, wherever they are set, what the application declares, and the cluster description, if there
    is one; exits with 2 when one cannot be used, and names it.

    Settings that are allowed, but probably a mistake, are reported as warnings.
    """
    from celery5.config.configuration import check_usable, list_warnings
    from celery5.config.settings import get_origins
    from celery5.processes import foreground

    app = _load_configured(target, flags)
    check_usable(app.settings, app.name, app.settings.broker)
    for warning in list_warnings(app.settings, app.configuration, list(app.tasks), os.environ):
        echo(f"Warning: {format_cell(warning)}", err=True)
    origins = get_origins(app)
    foreground.check(app)
    if file or os.path.exists(DEFAULT_FILE):
        _check_cluster(app, file)
    set_count = sum(origin.origin != "default" for origin in origins)
    echo(f"{len(origins)} settings, {set_count} of them set: all can be used")


def _check_cluster(app: "App", file: str) -> None:
    """Check the cluster description as a Controller would. Raises Misconfigured."""
    from celery5.config.settings import find_unknown_variables
    from celery5.processes.controller import ClusterOptions, load_cluster
    from celery5.processes.platform_factory import make_platform
    from celery5.protocol.cluster.description import build_members

    cluster = load_cluster(app, ClusterOptions("", file))
    make_platform(cluster, app.name, os.environ)
    environments = [cluster.environment, *(group.environment for group in cluster.groups)]
    for variables in (*environments, *(host.environment for host in cluster.hosts.values())):
        for name in find_unknown_variables(variables):
            echo(
                f"Warning: {format_cell(f'{name} is in {file or DEFAULT_FILE}, and is no setting')}", err=True
            )
    count = len(build_members(cluster))
    echo(
        f"{file or DEFAULT_FILE}: {count} member{'s' * (count != 1)}, as described: their code was not loaded"
    )


def _load_configured(target: Target, flags: dict[str, Any]) -> "App":
    app = target.load(serves=True)
    if source := flags.pop("where"):
        app.use_config(source)
    app.configure(**flags)
    return app
