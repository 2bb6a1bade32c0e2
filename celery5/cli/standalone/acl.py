"""Print the users of Redis that an application needs (`acl`)."""

import click

from celery5.broker.permissions import ALL_ROLES, make_user
from celery5.cli.terminal.output import echo, format_table, to_json
from celery5.cli.terminal.target import Target


@click.command()
@click.argument("role", required=False)
@click.option("--user", metavar="NAME", default="", help="The name of the user; default: APP-ROLE.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def acl(target: Target, role: str | None, *, user: str, wants_json: bool) -> None:
    """Print the ACL of Redis for ROLE: what its scripts and commands need, and nothing else.

    Put a password in place of CHANGE-ME and give the line to redis-cli: for each node of a cluster, for each server
    that sentinels watch, and that of the role `sentinel` for each sentinel. Without ROLE the roles are listed. No
    broker is asked.
    """
    app = target.load()
    if role is None:
        users = [make_user(app.name, name) for name in ALL_ROLES]
        rows: list[dict[str, object]] = [
            {"role": acl_user.role, "commands": len(acl_user.commands), "for": acl_user.description}
            for acl_user in users
        ]
        echo(to_json(users) if wants_json else format_table(rows, empty=""))
        return
    made = make_user(app.name, role, user)
    if wants_json:
        echo(to_json(made))
    else:
        on, *rules = made.rules
        echo(f"ACL SETUSER {made.user} {on} >CHANGE-ME {' '.join(rules)}")
