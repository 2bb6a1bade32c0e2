"""Read the table `[broker]` of a cluster description, for a broker that the Controller runs itself."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from celery5.similar_names import suggest_known

Fsync = Literal["always", "everysec", "no"]
FSYNC_MODES: tuple[Fsync, ...] = ("always", "everysec", "no")
BROKER_VARIABLE = "CELERY5_BROKER"
SINGLE_HOST_ERROR = (
    "broker: who runs the broker itself has all members on the same host: leave [hosts] or [broker] out"
)
_CLASS = re.compile(r"[\w.]+:\w+")


class OwnBroker(msgspec.Struct, frozen=True, kw_only=True):
    """A broker server of the cluster's own."""

    server: str = "auto"  # auto, a name on PATH, a path, or `module:Class` of the user's
    folder: str = "broker"  # for its data
    socket: str = ""  # '': in the folder
    port: int = 0  # an additional TCP port on this host; 0: none
    # When writes reach the disk: before each answer, every second, or when the system likes.
    fsync: Fsync = "everysec"
    options: Mapping[str, Any] = {}  # for a class of the user's

    @property
    def is_custom(self) -> bool:
        """Return whether a class of the user's runs it."""
        return _CLASS.fullmatch(self.server) is not None


def parse_own_broker(value: Any, errors: list[str]) -> OwnBroker | None:
    """Return the table as a value; None where there is none. Errors are added to `errors`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        errors.append(f"broker: {value!r} is not a table: write [broker]")
        return None
    table = cast("dict[str, Any]", value)
    wrong = list(_wrong(table))
    broker = OwnBroker() if wrong else OwnBroker(**table)
    if broker.options and not broker.is_custom:
        wrong.append("broker.options: they are for a class of your own: server = 'module:Class'")
    errors += wrong
    return broker


def _wrong(table: Mapping[str, Any]) -> Iterator[str]:
    known = OwnBroker.__struct_fields__
    for name, value in table.items():
        if name not in known:
            yield f"broker.{name} is not known; {suggest_known(name, known)}"
        elif name == "options":
            if not isinstance(value, dict):
                yield f"broker.options: {value!r} is not a table"
        elif name == "port":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
                yield f"broker.port: {value!r} is not a whole number from 0 to 65535"
        elif name == "fsync":
            if value not in FSYNC_MODES:
                yield f"broker.fsync: {value!r} is none of {', '.join(FSYNC_MODES)}"
        elif not isinstance(value, str) or not value.isprintable() or not (value or name == "socket"):
            yield f"broker.{name}: {value!r} is not a text that a path can be"


def find_broker_conflicts(
    where: str, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the settings of a group that would give its members another broker. `where` is its key, with a dot."""
    if "broker" in flags:
        yield f"{where}broker: [broker] is that of all members: leave one of them out"
    if BROKER_VARIABLE in environment:
        yield f"{where}environment.{BROKER_VARIABLE}: [broker] is that of all members: leave one of them out"
