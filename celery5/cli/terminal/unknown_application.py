"""Warn if Redis has keys of other applications, and none of the one that was named: its name may be misspelt."""

from typing import TYPE_CHECKING

from celery5.cli.terminal.output import echo
from celery5.errors import BrokerError
from celery5.similar_names import did_you_mean, join_names

if TYPE_CHECKING:
    from celery5.app import App

KEYS_PER_SCAN = 1000
MAX_SCANS = 50
"""The most calls of SCAN. On a server with more keys only a part is looked at."""
MAX_NAMES = 5
"""The most other applications that the warning names."""


def warn_of_unknown_application(app: "App") -> None:
    """Print a warning if this server has keys of other applications, and none of this one."""
    try:
        names = _find_applications(app)
    except BrokerError:  # the user may lack the permission for SCAN
        return
    if app.name in names or not names:
        return
    others = f"others are {join_names(sorted(names), MAX_NAMES)}"
    advice = did_you_mean(app.name, sorted(names), otherwise=others)
    echo(f"Warning: this Redis has no keys of application {app.name!r}; {advice}", err=True)


def _find_applications(app: "App") -> set[str]:
    """Return the names of the applications that have keys; stop at this one. Raises BrokerError."""
    from celery5.broker.calls.health import scan_keys
    from celery5.broker.keys import ANY_APPLICATION_KEY, get_application_name

    names, cursor = set[str](), 0
    for _ in range(MAX_SCANS):
        cursor, keys = app.perform(scan_keys(cursor, ANY_APPLICATION_KEY, count=KEYS_PER_SCAN))
        names.update(filter(None, map(get_application_name, keys)))
        if not cursor or app.name in names:
            break
    return names
