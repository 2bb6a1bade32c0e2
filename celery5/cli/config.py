"""Config: the commands that show what the settings are, and where each was said, and that check them.

Floor: cli. Reads: the environment, the configuration. Writes: stdout.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.cli.said import as_json, cell, echo, table
from celery5.cli.serving import SETTINGS
from celery5.cli.target import Target
from celery5.settings import descriptions

if TYPE_CHECKING:
    from celery5.app import App

FILE = "cluster.toml"
F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=False)
def config() -> None:
    """What the settings of an application are, and where each was said."""


def setting_flags(command: F) -> F:
    """Add the flags that are settings: what `worker start` would make of them."""
    explained = descriptions()
    for name in reversed(SETTINGS):
        flag = f"--{name.replace('_', '-')}"
        if name in ("inbox", "inbox_signatures"):
            command = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=explained[name])(command)
        else:
            command = click.option(flag, metavar="VALUE", help=explained[name])(command)
    where = click.option("--config", "where", metavar="WHERE", help="A module, a .toml file, or 'redis'.")
    return where(command)


@config.command()
@click.option("--origin", "wants_origin", is_flag=True, help="Say of each where it was said.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@setting_flags
@click.pass_obj
def show(target: Target, /, *, wants_origin: bool, wants_json: bool, **said: Any) -> None:
    """Show every setting and its value, passwords masked.

    With the flags of `celery5 worker start` it shows what a worker with them would have.
    """
    from celery5.origins import origins

    found = origins(_configured(target, said))
    if wants_json:
        echo(as_json(found))
        return
    rows: list[dict[str, object]] = [
        {
            "setting": each.setting,
            "value": "" if each.value is None else each.value,
            **({"origin": each.origin} if wants_origin else {}),
        }
        for each in found
    ]
    echo(table(rows, nothing=""))


@config.command()
@click.option(
    "--cluster", "file", metavar="FILE", default="", help="A cluster description; default: cluster.toml here."
)
@setting_flags
@click.pass_obj
def check(target: Target, /, *, file: str, **said: Any) -> None:
    """Check all settings, wherever they were said, what the application declares, and the cluster description, if there
    is one; exits with 2 when one cannot be used, and says which.

    What is allowed and hardly meant is told as a warning.
    """
    from celery5.configuration import usable
    from celery5.origins import oddities, origins
    from celery5.processes import fitness

    app = _configured(target, said)
    settings = usable(app.settings, app.name, app.settings.broker)
    for each in oddities(settings, os.environ):
        echo(f"Warning: {cell(each)}", err=True)
    found = origins(app)
    fitness.check(app)
    if file or os.path.exists(FILE):
        _check_cluster(app, file)
    chosen = sum(each.origin != "default" for each in found)
    echo(f"{len(found)} settings, {chosen} of them said: all can be used")


def _check_cluster(app: "App", file: str) -> None:
    """Read the description as a Controller would. Raises Misconfigured."""
    from celery5.origins import strange_variables
    from celery5.processes.controller import ClusterOptions, describe
    from celery5.processes.platforms import platform_of
    from celery5.protocol.cluster import members

    cluster = describe(app, ClusterOptions("", file))
    platform_of(cluster, app.name, os.environ)
    said = [cluster.environment, *(each.environment for each in cluster.groups)]
    for variables in (*said, *(each.environment for each in cluster.hosts.values())):
        for each in strange_variables(variables):
            echo(f"Warning: {cell(f'{each} is in {file or FILE}, and is no setting')}", err=True)
    count = len(members(cluster))
    echo(f"{file or FILE}: {count} member{'s' * (count != 1)} can be started")


def _configured(target: Target, said: dict[str, Any]) -> "App":
    app = target.load(serves=True)
    if where := said.pop("where"):
        app.use_config(where)
    app.configure(**said)
    return app
