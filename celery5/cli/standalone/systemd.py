"""Copy the unit files that came with this version to where systemd reads them (`systemd`)."""

import os
from importlib.resources import files
from pathlib import Path

import click

from celery5.cli.terminal.output import CommandGroup, echo, echo_hint
from celery5.errors import Misconfigured


@click.group(cls=CommandGroup, no_args_is_help=False)
def systemd() -> None:
    """Units for systemd: one for each kind of process, to run for a user or for the system."""


@systemd.command()
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--yes", is_flag=True, help="Replace files that differ without asking: those of an older version, say."
)
@click.option(
    "--dry-run", is_flag=True, help="Print each unit and where it would be written, and write nothing."
)
def install(folder: Path | None, *, yes: bool, dry_run: bool) -> None:
    """Copy the units to FOLDER, by default those of your user, ~/.config/systemd/user.

    /etc/systemd/system is the folder of the system's units. Options of your own belong into drop-ins (systemctl edit),
    which this command leaves alone. Nothing is enabled or started.
    """
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    target = folder or configuration / "systemd" / "user"
    units = {path.name: path.read_bytes() for path in sorted(_folder().iterdir()) if path.is_file()}
    differing = [
        name for name, unit in units.items() if (target / name).exists() and _differs(target / name, unit)
    ]
    if dry_run:
        for name, unit in units.items():
            is_there = (target / name).exists()
            change = (
                "would be replaced" if name in differing else "is there already" if is_there else "is new"
            )
            echo(f"# {target / name} {change}\n{unit.decode()}")
        return
    if differing and not yes:
        click.confirm(f"Replace {', '.join(differing)} in {target}?", abort=True, err=True)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, unit in units.items():
            (target / name).write_bytes(unit)
            echo(str(target / name))
    except OSError as error:
        raise Misconfigured(f"{target}: the units cannot be written there: {error.strerror}") from None
    user = "" if folder else "--user "
    echo_hint(f"Next: systemctl {user}daemon-reload; celery5 docs systemd has the rest", err=True)


def _folder() -> Path:
    return Path(str(files("celery5"))) / "systemd"


def _differs(file: Path, unit: bytes) -> bool:
    return file.read_bytes() != unit
