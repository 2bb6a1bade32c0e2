"""Manage the keys that sign commands to workers, and which senders are trusted (`keys`)."""

from pathlib import Path

import click

from celery5.cli.terminal.output import CommandGroup, echo, echo_hint, format_table, to_json
from celery5.cli.terminal.target import Target


@click.group(cls=CommandGroup, no_args_is_help=False)
def keys() -> None:
    """Keys sign the commands that workers take."""


@keys.command()
@click.option("--authority", is_flag=True, help="Make a new authority, too, which vouches for the key.")
@click.pass_obj
def new(target: Target, *, authority: bool) -> None:
    """Make a new key to sign with; workers on this host take it up without a restart.

    The old one is still trusted: celery5 keys revoke ends that.
    """
    keyring = target.load().control.keyring
    keyring.renew(authority=authority)
    echo(f"{keyring.folder / 'mine.pem'} is new")


@keys.command()
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, *, wants_json: bool) -> None:
    """Show where the keys are, and each certificate there."""
    keyring = target.load().control.keyring
    certificates = keyring.list_certificates()
    if wants_json:
        echo(to_json({"folder": str(keyring.folder), "certificates": certificates}))
        return
    echo(f"{keyring.folder}\n")
    rows: list[dict[str, object]] = [
        {
            "role": certificate.role + (" (revoked)" if certificate.revoked else ""),
            "until": certificate.until,
            "subject": certificate.subject,
            "fingerprint": certificate.fingerprint,
        }
        for certificate in certificates
    ]
    echo(format_table(rows, empty="no keys yet: the first command that is signed makes them"))


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def trust(target: Target, file: Path) -> None:
    """Trust the certificates in FILE (PEM): those of authorities, or of single senders.

    Processes take their commands from then on. Certificates that were revoked are removed from the denylist.
    """
    for fingerprint, lifted in target.load().control.keyring.trust_file(file).items():
        echo(f"trusted: {fingerprint}{' (it was revoked: that is lifted)' if lifted else ''}")


@keys.command()
@click.argument("what", metavar="FINGERPRINT|FILE")
@click.pass_obj
def revoke(target: Target, what: str) -> None:
    """Take no more commands from a certificate: put its fingerprint on the denylist."""
    keyring = target.load().control.keyring
    for fingerprint in keyring.revoke(what):
        echo(f"revoked: {fingerprint}")
    if remedy := keyring.get_remedy():
        echo_hint(
            f"commands signed with {keyring.folder / 'mine.pem'} are refused here from now on, until: {remedy}"
        )
