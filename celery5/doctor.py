"""Doctor: all checks of an application and of where it runs, each by itself, each within its time.

Floor: domain. Reads: what the checks read. Writes: what they write.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from celery5.broker.keys import Keys
from celery5.broker_checks import BrokerChecks
from celery5.errors import CeleryError
from celery5.host_checks import HostChecks
from celery5.protocol import diagnosis_host
from celery5.protocol.diagnosis import Finding

if TYPE_CHECKING:
    from celery5.app import App

LIMIT = 15.0
"""Seconds that one check may take."""


class Check(NamedTuple):
    """One check: its name, what looks, and what is to be done when all checks have looked."""

    name: str
    look: Callable[[], Finding]
    at_last: Callable[[], None] | None = None


def checks_of(app: "App", *, root: Path = Path("/")) -> list[Check]:
    """The checks of an application: of its broker, its keys, its workers. `root` is where systemd's folders begin."""
    host = HostChecks(os.environ, root=root)
    first, *others = app.brokers.names
    broker = _broker(app, first)
    return [
        Check("application", lambda: diagnosis_host.application(app.name, len(app.tasks))),
        Check("settings", partial(host.settings, app)),
        *_checks_of_broker(broker),
        *(each for name in others for each in _checks_of_broker(_broker(app, name), f" {name}")),
        *([Check("publisher", partial(host.publisher, app))] if app.settings.publisher else []),
        Check("keys folder", partial(host.folder, app)),
        Check("certificates", partial(host.certificates, app)),
        Check("workers", partial(_unless_away, broker, partial(host.workers, app))),
        *checks_of_host(root=root),
    ]


def _broker(app: "App", name: str) -> BrokerChecks:
    return BrokerChecks(app.brokers.of(name).endpoint, Keys(app.name), app.settings.default_queue)


def _checks_of_broker(broker: BrokerChecks, which: str = "") -> list[Check]:
    """The checks of one broker; `which` follows their names, where there are several."""
    there = (broker.persistence, broker.memory, broker.clock, broker.latency, broker.permissions, broker.keys)
    return [
        Check(f"server{which}", broker.server, broker.close),
        *(Check(f"{each.__name__}{which}", partial(_unless_away, broker, each)) for each in there),
    ]


def checks_of_host(*, root: Path = Path("/")) -> list[Check]:
    """The checks that need no application."""
    host = HostChecks(os.environ, root=root)
    return [
        Check("units", host.units),
        Check("python", host.python),
        Check("libraries", host.libraries),
    ]


def examined(checks: Sequence[Check], *, limit: float = LIMIT) -> Iterator[Finding]:
    """What each check finds, one after the other. One that fails, or takes longer than `limit` seconds, says that, and
    the others go on. What they have opened is closed afterwards. For plain Python."""
    try:
        for each in checks:
            yield _within(each, limit)
    finally:
        for each in checks:
            if each.at_last is not None:
                each.at_last()


class _Away(CeleryError):
    """The broker is not there to be looked at."""


def _unless_away(broker: BrokerChecks, look: Callable[[], Finding]) -> Finding:
    if broker.is_away:
        raise _Away("not looked at: the broker does not let us in")
    return look()


def _within(check: Check, limit: float) -> Finding:
    """A daemon: one that hangs is left behind, and holds up neither the others nor the end."""
    found: list[Finding] = []
    thread = threading.Thread(
        target=lambda: found.append(_looked(check)), daemon=True, name=f"doctor {check.name}"
    )
    thread.start()
    thread.join(limit)
    if found:
        return replace(found[0], check=check.name)
    return Finding(check.name, "fail", f"no answer within {limit:g} s", "see why it hangs")


def _looked(check: Check) -> Finding:
    try:
        return check.look()
    except _Away as error:
        return Finding(check.name, "warn", str(error), "see above")
    except CeleryError as error:
        return Finding(check.name, "fail", " ".join(str(error).split()), "see docs/guide/doctor.md")
    except Exception as error:  # one check that is broken says so, and the others go on
        return Finding(
            check.name,
            "fail",
            f"the check itself failed: {type(error).__name__}: {error}",
            "please report it",
        )
