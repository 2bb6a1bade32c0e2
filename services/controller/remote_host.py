"""Remote host: run members on another machine, as units of the systemd of a user of that host.

One ssh process stays connected and reports the units at an interval. Actions are collected and performed in one
call. While the host is unreachable, the state of its members is unknown: they count as they were, and the
reason is reported. Actions wait, and the connection is tried again with backoff; after three failures in a row its
circuit breaker opens. The reports are its health check: silence ends the connection. The members keep running: they
depend on the systemd of their host, not on the connection.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from celery5.errors import PlatformError
from celery5.health.circuit_breaker import CircuitBreaker
from celery5.logs.log import Level, Log, NullLog
from celery5.platform import Platform
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    Ready,
    State,
    Stopping,
    Unknown,
    format_end_reason,
    parse_failure_reason,
)
from celery5.protocol.cluster.remote_units import (
    LINE_PREFIX,
    NO_LINGER_REPORT,
    RemoteSetup,
    UnitCommand,
    UnitStatus,
    describe_exit,
    make_command_script,
    make_watch_script,
    parse_start_replies,
    parse_unit_statuses,
)
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.ssh_line import HostUnreachable, OutputLines, SSHConnection

POLL_PERIOD = 2.0
"""Seconds between two reports of the units of the host."""
FIRST_STATUS_LIMIT = 20.0
"""Seconds for which a starting Controller waits for the first report."""
MISSES_UNTIL_GONE = 2
"""Reports without a unit after which it has ended. The first such report may have been made before it started."""
SSH_BREAKER = BreakerPolicy(threshold=3, reset=10.0, growth="linear", longest=30.0)
"""When the breaker of a connection opens, and for how long."""
_ANY_INVOCATION = "any"
"""The invocation of a unit that may have been started."""
_MAX_REPORT_LINES = 100_000
"""The most lines in one report."""
_MAX_REPORT_CHARACTERS = 16 * 1024 * 1024
"""The most characters in one report."""
_REPORT_TOO_LARGE = (
    "its list of units is too long to be read: run `systemctl --user list-units 'celery5.*'` on that host"
)
_ALIVE: Mapping[str, State] = {
    "activating": "starting",
    "active": "up",
    "reloading": "up",
    "deactivating": "stopping",
}
_NO_LINGER = "ends its users' processes when they log out: run `loginctl enable-linger` on it"


@dataclass(slots=True)
class _RemoteMember:
    """A member as it was last reported."""

    state: State = "starting"
    invocation: str = ""  # '' until systemd begins to start it
    tried: bool = False  # whether its start was requested, even if no answer came
    missing: int = 0  # reports in a row without it
    text: str = ""


class RemoteHost(Platform):
    """A platform on one remote host.

    Args:
        setup: how members run there.
        connection: how the host is reached.
        interval: seconds between two reports.
    """

    def __init__(
        self,
        *,
        name: str,
        setup: RemoteSetup,
        connection: SSHConnection,
        log: Log | None = None,
        interval: float = POLL_PERIOD,
    ) -> None:
        self._name = name
        self._setup = setup
        self._connection = connection
        self._log = log
        self._interval = interval
        self._report: Callable[[MemberEvent], None] = _ignore_event
        self._unreachable_reason = "not reached yet"
        self._refusal = ""
        self._members: dict[str, _RemoteMember] = {}
        self._last_report: dict[str, UnitStatus] = {}
        self._pending: list[UnitCommand] = []
        self._command_added = trio.Event()
        self._first_attempt_made = trio.Event()
        self._circuit = CircuitBreaker(
            name=f"ssh {name}", policy=SSH_BREAKER, log=log or NullLog(), effect="the host is left alone"
        )
        self._may_act: Callable[[], bool] = _always
        self._term = 0
        self._is_ignoring = False

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Stay connected and report events.

        It is up at once, so that an unreachable host does not hold up the cluster.
        """
        self._report = report
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_connected)
            nursery.start_soon(self._repeat_unknown)
            task_status.started()

    async def start(self, member: Member) -> None:
        """Start the member as soon as the host can be reached, or adopt it if it runs already."""
        self._members[member.name] = _RemoteMember()
        self._add_command(UnitCommand(verb="start", name=member.name, member=member))
        await trio.lowlevel.checkpoint()

    async def stop(self, name: str) -> None:
        """Stop the member: systemd sends SIGTERM, and kills it after `stop_after`."""
        remote = self._members.get(name)
        if remote is not None:
            self._pending = [command for command in self._pending if command.name != name]
            if remote.tried:
                remote.invocation = remote.invocation or _ANY_INVOCATION
                self._add_command(UnitCommand(verb="stop", name=name))
            else:
                self._report_end(name, "had not been started", 0)
        await trio.lowlevel.checkpoint()

    async def kill(self, name: str) -> None:
        """Kill the member with SIGKILL.

        On an unreachable host this happens when the host is back, but its end is reported at once, as uncertain.
        If the request to stop still waits, that is sent instead, and systemd kills the member when its time
        is over.
        """
        if name in self._members:
            is_stop_unsent = (
                bool(self._unreachable_reason) and UnitCommand(verb="stop", name=name) in self._pending
            )
            self._pending = [command for command in self._pending if command.name != name]
            self._add_command(UnitCommand(verb="stop" if is_stop_unsent else "kill", name=name))
            if self._unreachable_reason:
                self._report_end(
                    name, f"unknown: host {self._name} is unreachable ({self._unreachable_reason})", None
                )
        await trio.lowlevel.checkpoint()

    async def reload(self, name: str) -> None:
        """Reload the member: send SIGHUP."""
        if name in self._members:
            self._add_command(UnitCommand(verb="reload", name=name))
        await trio.lowlevel.checkpoint()

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member on that host, as last reported; None when it is not known."""
        unit = None if self._unreachable_reason else self._last_report.get(name)
        return (unit.pid or None) if unit is not None else None

    def outlives(self, _name: str) -> bool:
        """Return True: members on another host survive the Controller."""
        return True

    def fence(self, may_act: Callable[[], bool]) -> None:
        """Ask `may_act` before performing actions that waited for the host."""
        self._may_act = may_act

    def leave(self) -> None:
        """Leave the members to another Controller and drop the actions that still wait."""
        self._pending, self._members = [], {}
        self._term += 1

    async def living(self) -> Mapping[str, State]:
        """Return the members of this application that run on the host; none when the host is unreachable."""
        with trio.move_on_after(FIRST_STATUS_LIMIT):
            await self._first_attempt_made.wait()
        for name, unit in self._last_report.items():
            state = _ALIVE.get(unit.active)
            if state is not None and not self._unreachable_reason and name not in self._members:
                self._members[name] = _RemoteMember(state=state, invocation=unit.invocation, tried=True)
        return {name: remote.state for name, remote in self._members.items()}

    async def _keep_connected(self) -> None:
        attempt = 0
        while True:
            while (wait := self._circuit.try_pass(self)) is not None:  # noqa: ASYNC110  it depends on a clock
                await trio.sleep(wait)
            try:
                watch = make_watch_script(self._setup.app, self._interval)
                async with self._connection.stream_lines(watch) as lines, trio.open_nursery() as nursery:
                    await self._read_reports(lines, nursery)
                    nursery.cancel_scope.cancel()
            except PlatformError as error:
                attempt = attempt + 1 if self._unreachable_reason else 0
                self._record_disconnected(str(error))
                self._circuit.record_result(self, succeeded=False, why=str(error))
            self._first_attempt_made.set()
            await trio.sleep(full_jitter(attempt, start=1.0, cap=30.0, random=random.random))

    async def _read_reports(self, lines: OutputLines, nursery: trio.Nursery) -> None:
        """Read reports until the connection ends. Waiting actions are performed from the first report on."""
        report_lines, line_count, size = list[str](), 0, 0
        self._refusal = ""
        while (line := await lines.read_line()) is not None:
            if line == f"{LINE_PREFIX}{NO_LINGER_REPORT}":
                self._refusal = f"host {self._name} {_NO_LINGER}"
            elif line.startswith(LINE_PREFIX):
                if line == f"{LINE_PREFIX}seen":
                    if self._unreachable_reason:
                        self._record_connected()
                        nursery.start_soon(self._perform_pending)
                    if line_count > _MAX_REPORT_LINES or size > _MAX_REPORT_CHARACTERS:
                        self._ignore_report()
                    else:
                        self._is_ignoring = False
                        self._take_report(parse_unit_statuses(self._setup.app, report_lines))
                report_lines, line_count, size = [], 0, 0
            else:
                line_count, size = line_count + 1, size + len(line)
                if line_count <= _MAX_REPORT_LINES and size <= _MAX_REPORT_CHARACTERS:
                    report_lines.append(line)

    def _ignore_report(self) -> None:
        """Ignore a report that is too large: a member that is missing from the part that was read may still
        run.
        """
        if not self._is_ignoring:
            self._log_change("host:status-ignored", "warning", hint=_REPORT_TOO_LARGE)
        self._is_ignoring = True
        self._report_unknown(_REPORT_TOO_LARGE)

    def _record_connected(self) -> None:
        self._unreachable_reason = ""
        self._circuit.record_result(self, succeeded=True)
        self._log_change("host:connected", "info")

    def _record_disconnected(self, why: str) -> None:
        if why != self._unreachable_reason:
            self._log_change("host:disconnected", "warning", why=why)
        self._unreachable_reason = why
        self._report_unknown(why)

    def _report_unknown(self, why: str) -> None:
        for name, remote in list(self._members.items()):
            remote.text = ""  # report its status again when the host is back
            self._report(Unknown(name, why))

    async def _repeat_unknown(self) -> None:
        """Report unknown members at the reporting interval: without any event they would count as hung."""
        while True:
            await trio.sleep(self._interval)
            if self._unreachable_reason:
                self._report_unknown(self._unreachable_reason)

    def _take_report(self, found: dict[str, UnitStatus]) -> None:
        self._last_report = found
        self._first_attempt_made.set()
        for name, remote in list(self._members.items()):
            if remote.invocation:
                self._update_member(name, remote, found.get(name))

    def _update_member(self, name: str, remote: _RemoteMember, unit: UnitStatus | None) -> None:
        state = _ALIVE.get(unit.active) if unit else None
        if unit is None or (state is None and unit.invocation != remote.invocation):
            remote.missing += 1
            if remote.missing >= MISSES_UNTIL_GONE:
                self._report_end(name, "its unit is gone, and how it ended is unknown", None)
            return
        remote.missing = 0
        if state is None:
            how, code = describe_exit(unit)
            self._report_end(
                name, format_end_reason(how, parse_failure_reason(unit.status_text)) if code else how, code
            )
            return
        remote.invocation = unit.invocation  # it may have been restarted by hand
        if state != remote.state and state != "starting":
            self._report(Ready(name) if state == "up" else Stopping(name))
        remote.state = state
        if state == "up":
            self._report(Beat(name, unit.status_text if unit.status_text != remote.text else ""))
            remote.text = unit.status_text

    def _report_end(self, name: str, how: str, code: int | None) -> None:
        self._members.pop(name, None)
        self._report(Ended(name, how, code))

    def _add_command(self, command: UnitCommand) -> None:
        if command not in self._pending:
            self._pending.append(command)
        self._command_added.set()

    async def _perform_pending(self) -> None:
        while True:
            if not self._pending:
                self._command_added = trio.Event()
                await self._command_added.wait()
            while self._pending and not self._may_act():  # noqa: ASYNC110  the answer depends on a clock
                await trio.sleep(self._interval)
            commands, self._pending, term = self._pending, [], self._term
            try:
                await self._perform(commands)
            except HostUnreachable as error:
                self._requeue(commands, term)
                self._log_change("host:call-failed", "warning", why=str(error))
                await trio.sleep(self._interval)
            except PlatformError as error:
                for command in commands:
                    self._report_failure(command, str(error))

    def _requeue(self, commands: list[UnitCommand], term: int) -> None:
        """Queue these actions again, unless another Controller took over this host after `term`."""
        if term == self._term:
            self._pending = commands + self._pending

    async def _perform(self, commands: list[UnitCommand]) -> None:
        if self._refusal:
            for command in commands:
                self._report_failure(command, self._refusal)
            commands = [command for command in commands if command.member is None]
        if not commands:
            return
        for remote in (self._members.get(command.name) for command in commands):
            if remote is not None:
                remote.tried = True
        term = self._term
        try:
            output = await self._connection.run_script(make_command_script(self._setup, commands))
        except trio.Cancelled:
            self._requeue(commands, term)  # the connection was lost: all of it may happen twice
            raise
        for name, (word, more) in parse_start_replies(self._setup.app, output).items():
            remote = self._members.get(name)
            if remote is not None and word == "begun":
                remote.invocation, remote.missing = more, 0
            elif remote is not None:
                self._report_end(name, f"could not be started on host {self._name}: {more}", None)

    def _report_failure(self, command: UnitCommand, why: str) -> None:
        if command.verb == "start" and command.name in self._members:
            self._report_end(command.name, f"could not be started: {why}", None)
        else:
            self._log_change("host:call-failed", "warning", why=why, member=command.name, verb=command.verb)

    def _log_change(self, what: str, level: Level, **fields: object) -> None:
        if self._log is not None:
            self._log.event(what, level, host=self._name, **fields)


def _always() -> bool:
    return True


def _ignore_event(_word: MemberEvent) -> None:
    """Ignore an event: nothing listens before `live` is called."""
