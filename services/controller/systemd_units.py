"""Systemd units: a platform that runs each member of a cluster as a service of systemd, by D-Bus.

A member is up when its unit is active, after READY=1. Its unit's status is what it reports of itself. systemd's
watchdog ends a member that hangs; the time of its last heartbeat is polled. Members survive a Controller that
dies, and the next one adopts their units.
"""

import math
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    State,
    format_end_reason,
    parse_failure_reason,
)
from celery5.protocol.cluster.units import (
    SERVICE_INTERFACE,
    UNIT_INTERFACE,
    LaunchCommand,
    build_properties,
    format_environment_file,
    get_member_events,
    get_unit_name,
    get_unit_path,
    get_unit_pattern,
    parse_member_name,
    parse_state,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.systemd_bus import (
    SystemdBus,
    SystemdDisconnected,
    SystemdError,
    find_bus,
    get_runtime_folder,
    strip_types,
)

MAX_RECONNECT_DELAY = 5.0
"""The most seconds between two attempts to reconnect to the bus."""
BEAT_CHECKS = 5
"""Checks of a member's last heartbeat in the time after which it counts as hung."""
START_ATTEMPTS = 20
"""Attempts, a tenth of a second apart, to start a member whose former unit systemd still remembers."""
_EXISTS = "org.freedesktop.systemd1.UnitExists"
_NONE = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject")


class _Known:
    """What is known of a running member.

    Before systemd has `begun` to start it, its properties are about the former process. A member that is not
    `ours` belongs to another Controller while this one stands by; its events are not reported. `files` hold the
    environment of this run and of former ones, never of the next one.
    """

    def __init__(self, unit: str, now: State, *, begun: bool) -> None:
        self.unit = unit
        self.path = get_unit_path(unit)
        self.now: State = now
        self.begun = begun
        self.ours = not begun
        self.files: list[Path] = []
        self.said: dict[str, Any] = {}
        self.status = ""
        self.reason = ""
        self.beat = 0

    def begin(self) -> None:
        """Record that systemd has begun to start it."""
        self.begun = True


class SystemdUnits(Platform):
    """Runs members as services of the user's systemd, or of the system's when run by root.

    Args:
        environ: the environment that members inherit.
        bus: the socket of the bus; '' for the usual one.

    Raises:
        PlatformError: there is no bus.
    """

    def __init__(
        self, *, cluster: Cluster, app: str, environ: Mapping[str, str] | None = None, bus: str = ""
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._cluster = cluster
        self._app = app
        self._bus = SystemdBus(bus or find_bus(self._environ))
        self._folder = get_runtime_folder(self._environ)
        self._known: dict[str, _Known] = {}
        self._paths: dict[str, str] = {}
        self._doubtful: set[str] = set()
        self._doubt = trio.Event()
        self._report: Callable[[MemberEvent], None] = _nobody

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled. Members that still run then go on, for the next Controller.

        A lost connection is tried again; only the first connection raises PlatformError.
        """
        self._report = report
        begun, attempt = False, 0

        def up() -> None:
            nonlocal begun, attempt
            if not begun:
                task_status.started()
            begun, attempt = True, 0

        while True:
            try:
                await self._watch(up)
            except SystemdDisconnected:
                if not begun:
                    raise
            attempt += 1
            await trio.sleep(full_jitter(attempt, start=0.1, cap=MAX_RECONNECT_DELAY, random=random.random))

    async def start(self, member: Member) -> None:
        """Begin to start the member. Raises PlatformError."""
        file = self._folder / f"{self._stem(member.name)}.{secrets.token_hex(4)}.env"
        unit = get_unit_name(self._app, member.name)
        told = build_properties(member, self._command(file))
        known = self._know(member.name, _Known(unit, "starting", begun=False))
        known.files = [*self._files(member.name), file]
        try:
            self._write_environment(file, member)
            for left in reversed(range(START_ATTEMPTS)):
                try:
                    what: tuple[Any, ...] = (unit, "fail", told, [])
                    await self._bus.call_manager(
                        "StartTransientUnit", "ssa(sv)a(sa(sv))", *what, on_done=known.begin
                    )
                    return
                except SystemdError as error:
                    if error.name != _EXISTS or not left:
                        raise
                with suppress(SystemdError):
                    await self._bus.call_manager("ResetFailedUnit", "s", unit)
                await trio.sleep(0.1)
        except PlatformError as error:
            if self._known.get(member.name) is known:
                self._forget(member.name)
            raise PlatformError(f"{member.name}: {error}") from None

    async def stop(self, name: str) -> None:
        """Stop the member by systemd: SIGTERM."""
        await self._about(name, "StopUnit", "ss", "replace")

    async def kill(self, name: str) -> None:
        """Send SIGKILL to the member's process.

        Its sidecar has a moment to put its jobs back before systemd kills the rest.
        """
        try:
            await self._about(name, "KillUnit", "ssi", "main", int(signal.SIGKILL))
        except SystemdError:  # it has no main process at the moment
            await self._about(name, "KillUnit", "ssi", "all", int(signal.SIGKILL))

    async def reload(self, name: str) -> None:
        """Send SIGHUP to the member's process."""
        await self._about(name, "KillUnit", "ssi", "main", int(signal.SIGHUP))

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member; None when it is not known."""
        known = self._known.get(name)
        return None if known is None else int(known.said.get("MainPID", 0)) or None

    def outlives(self, _name: str) -> bool:
        """Return True: services survive the Controller."""
        return True

    async def living(self) -> Mapping[str, State]:
        """Return the members of this cluster that run. Raises PlatformError."""
        await self._look()
        found = {name: known for name, known in self._known.items() if known.begun}
        for name, known in found.items():
            if not known.ours:
                known.ours, known.files = True, self._files(name)
        return {name: known.now for name, known in found.items()}

    async def _about(self, name: str, method: str, signature: str, *body: Any) -> None:
        """Call a method about a member's unit, if it runs."""
        known = self._known.get(name)
        if known is None:
            return
        try:
            await self._bus.call_manager(method, signature, known.unit, *body)
        except SystemdError as error:
            if error.name not in _NONE:
                raise
            self._tell(name, {"ActiveState": "inactive"})

    async def _watch(self, up: Callable[[], None]) -> None:
        """Stay connected and watch members until the bus is lost. Raises SystemdDisconnected."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._bus.run, self._hear)
                await self._look()
                up()
                nursery.start_soon(self._resolve_doubts)
                period = self._cluster.hung_after / BEAT_CHECKS or math.inf
                while True:
                    await trio.sleep(period)
                    for name in [name for name, known in self._known.items() if known.now == "up"]:
                        await self._feel(name)
        except BaseExceptionGroup as group:
            lost, others = group.split(SystemdDisconnected)
            if lost is None or others is not None:
                raise
            raise SystemdDisconnected(str(lost.exceptions[0])) from None

    async def _look(self) -> None:
        """List what runs: report members that have ended, and adopt unknown ones."""
        live = ["activating", "active", "reloading", "deactivating"]
        (units,) = await self._bus.call_manager(
            "ListUnitsByPatterns", "asas", live, [get_unit_pattern(self._app)]
        )
        found = {parse_member_name(self._app, unit): (unit, active) for unit, _, _, active, *_ in units}
        found.pop("", None)
        for name in [name for name, known in self._known.items() if known.begun and name not in found]:
            self._doubtful.add(name)
        for name, (unit, active) in found.items():
            now = parse_state(active)
            if name in self._known:
                self._tell(name, {"ActiveState": active})
            elif now is not None:
                known = self._know(name, _Known(unit, now, begun=True))
                with suppress(SystemdError):  # it has just ended, and systemd reports that
                    known.said["MainPID"] = await self._bus.get_property(
                        known.path, SERVICE_INTERFACE, "MainPID"
                    )
        for name in tuple(self._doubtful):
            await self._look_at(name)

    async def _look_at(self, name: str) -> None:
        """Check a member that may have ended without a signal."""
        self._doubtful.discard(name)
        known = self._known.get(name)
        if known is None or not known.begun:
            return
        try:
            said = await self._bus.get_properties(known.path, UNIT_INTERFACE)
            known.said.update(await self._bus.get_properties(known.path, SERVICE_INTERFACE))
        except SystemdError:
            said = {"ActiveState": "inactive"}
        waits = parse_state(str(said["ActiveState"])) is None and said.get("Job", (0,))[0] != 0
        if self._known.get(name) is known and not waits:
            self._tell(name, {"ActiveState": said["ActiveState"]})

    async def _resolve_doubts(self) -> None:
        while True:
            await self._doubt.wait()
            self._doubt = trio.Event()
            for name in tuple(self._doubtful):
                await self._look_at(name)

    async def _feel(self, name: str) -> None:
        """Report a heartbeat if there was one since the last check."""
        known = self._known.get(name)
        if known is None:
            return
        with suppress(SystemdError):  # it has just ended, and systemd reports that
            beat = int(
                await self._bus.get_property(known.path, SERVICE_INTERFACE, "WatchdogTimestampMonotonic")
            )
            if beat != known.beat:
                known.beat = beat
                self._say(known, Beat(name))

    def _hear(self, path: str, what: str, body: tuple[Any, ...]) -> None:
        """Handle one signal of systemd. Must not wait."""
        if what == "PropertiesChanged":
            name = self._paths.get(path, "")
            if name and self._known[name].begun:
                self._hear_change(name, str(body[0]), strip_types(body[1]))
        elif what == "JobRemoved" and body[3] != "done":
            self._wonder(parse_member_name(self._app, body[2]))
        elif what == "UnitRemoved":
            name = parse_member_name(self._app, body[0])
            if name in self._known:
                self._tell(name, {"ActiveState": "inactive"})

    def _hear_change(self, name: str, interface: str, changed: dict[str, Any]) -> None:
        """Handle changed properties.

        Those of the service come first: they say how it ended, those of the unit that it has.
        """
        if interface == SERVICE_INTERFACE:
            known = self._known[name]
            before, status = known.status, str(changed.pop("StatusText", ""))
            known.said.update(changed)
            if parse_failure_reason(status):
                known.reason = parse_failure_reason(status)
            elif status and status != before:  # each change repeats the status, also an unchanged one
                known.status = status
                self._say(known, Beat(name, status))
        elif interface == UNIT_INTERFACE and changed.get("StateChangeTimestampMonotonic") != 0:
            # It has been started.
            self._tell(name, changed)

    def _wonder(self, name: str) -> None:
        """Have a member checked after an action on it failed."""
        if name in self._known:
            self._doubtful.add(name)
            self._doubt.set()

    def _tell(self, name: str, changed: Mapping[str, Any]) -> None:
        """Report the events that changed properties of a unit mean."""
        known = self._known[name]
        if not known.begun:
            return
        found = get_member_events(name, known.unit, {**known.said, **changed}, known.now)
        known.now = parse_state(str(changed.get("ActiveState", ""))) or known.now
        for word in found:
            if isinstance(word, Ended):
                self._forget(name)
                if word.code:
                    word = Ended(word.name, format_end_reason(word.how, known.reason), word.code)
            self._say(known, word)

    def _say(self, known: _Known, word: MemberEvent) -> None:
        if known.ours:
            self._report(word)

    def _know(self, name: str, known: _Known) -> _Known:
        self._known[name] = known
        self._paths[known.path] = name
        return known

    def _forget(self, name: str) -> None:
        self._doubtful.discard(name)
        known = self._known.pop(name)
        self._paths.pop(known.path, None)
        for file in known.files:
            with suppress(OSError):
                file.unlink()

    def _command(self, environment: Path) -> LaunchCommand:
        return LaunchCommand(
            program=(sys.executable, "-m", "celery5"),
            directory=os.getcwd(),
            environment_file=str(environment),
            hung_after=self._cluster.hung_after,
            start_limit=self._cluster.start_limit,
        )

    def _stem(self, name: str) -> str:
        # From the path, since the name of a unit has backslashes.
        return get_unit_path(get_unit_name(self._app, name)).rpartition("/")[2]

    def _files(self, name: str) -> list[Path]:
        """Return the environment files of this member.

        Each start has its own file: another Controller may learn late of an end, and must not remove the file
        of the next start.
        """
        return [each for each in self._folder.glob("*.env") if each.name.startswith(f"{self._stem(name)}.")]

    def _write_environment(self, path: Path, member: Member) -> None:
        """Write the environment file. Raises PlatformError."""
        text = format_environment_file({**self._environ, **member.environment})
        try:
            make_private(self._folder)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8", errors="surrogateescape") as to:
                to.write(text)
        except OSError as error:
            raise PlatformError(f"cannot write {path}, which has its environment: {error.strerror}") from None


def _nobody(_word: MemberEvent) -> None:
    """Ignore an event: nothing listens yet."""
