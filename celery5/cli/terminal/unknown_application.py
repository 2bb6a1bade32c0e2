"""Say which applications a server has, where nothing is there of the one that was named: its name may be misspelt."""

from typing import TYPE_CHECKING

from celery5.cli.terminal.output import echo
from celery5.errors import BrokerError
from celery5.similar_names import did_you_mean, join_names

if TYPE_CHECKING:
    from celery5.app import App

KEYS_PER_SCAN = 1000
MAX_SCANS = 50
"""Steps of the search: of a server with more keys a part is looked at."""
MOST_NAMES = 5
"""Other applications that are named."""


def warn_of_unknown_application(app: "App") -> None:
    """Print a warning if this server has keys of other applications, and none of this one."""
    try:
        names = _find_applications(app)
    except BrokerError:  # such as a user who may not do that
        return
    if app.name in names or not names:
        return
    others = f"others there: {join_names(sorted(names), MOST_NAMES)}"
    advice = did_you_mean(app.name, sorted(names), otherwise=others)
    echo(f"Warning: nothing of application {app.name!r} is in this Redis; {advice}", err=True)


def _find_applications(app: "App") -> set[str]:
    """Return the names of the applications that have keys; stop at this one. Raises BrokerError."""
    from celery5.broker.calls.health import scan_keys
    from celery5.broker.keys import OF_ANY_APPLICATION, read_application

    names, cursor = set[str](), 0
    for _ in range(MAX_SCANS):
        cursor, keys = app.perform(scan_keys(cursor, OF_ANY_APPLICATION, count=KEYS_PER_SCAN))
        names.update(filter(None, map(read_application, keys)))
        if not cursor or app.name in names:
            break
    return names
