"""Sidecar: a small process beside each worker process, which renews its leases and recovers its jobs.

It is forked while the worker still has one thread, and is plain blocking code. The worker reports each heartbeat. If
heartbeats are missing, because a job blocks the loop or holds the interpreter's lock, it renews the lease instead, for
as long as the process really lives (`protocol/process/liveness.py`). One of them also watches whether the interpreter
runs, and kills a worker that must be ended and cannot do so itself (`freeze.py`). When the worker ends without having
left its queues, it puts the jobs that the worker held back, at once. It always ends with the worker. If it dies itself,
the worker goes on.
"""

import gc
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import msgspec

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.calls import leases
from celery5.broker.calls import streams as stream_calls
from celery5.broker.drivers.opening import BlockingBroker, open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import QueueKeys
from celery5.broker.timing import Timing
from celery5.broker.topologies import find_endpoint
from celery5.errors import BrokerError, BrokerUnavailable, CeleryError
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.options import resolve_budgets
from celery5.processes.watch.freeze import FreezeWatch, StopTimes
from celery5.processes.watch.interpreter import InterpreterPulse, SharedFiles
from celery5.processes.watch.sidecar_log import SidecarLog
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.process.frozen import LOOK_INTERVAL
from celery5.protocol.process.liveness import (
    HUNG_AFTER,
    Liveness,
    ProcessObservation,
    ProcessSample,
    assess_liveness,
    observe_heartbeat,
    parse_stat,
)
from celery5.protocol.process.wake_ups import HEARTBEATS_PER_LEASE
from celery5.protocol.scaling.budget import get_max_slots
from celery5.protocol.streams.groups import GroupMembership
from celery5.runners.process_group import get_start_ticks
from celery5.services.process.lease import now
from celery5.services.process.shared_memory import SidecarMemory
from celery5.services.worker.recovery import RECOVERY_BATCH

MISSED_BEATS = 1.5
"""Heartbeats that must be missing before the sidecar renews the leases."""
MAX_SILENCE = 5.0
"""The most seconds without a heartbeat before it looks whether the interpreter runs, however long the lease is."""
EXIT_TIMEOUT = 5.0
"""Seconds after the end of the pipe within which the worker must end, too; else it has only closed its files."""
RECOVERY_TIMING = Timing(connect=1.0, reply=1.0)
"""For recovery. A broker that is unreachable or hangs must block nothing: leases put the jobs back, too."""
MAX_BLAMED = 500
"""Jobs of one queue that are counted when an error has ended the worker."""
PROCESS_NAME = "celery5-sidecar"
"""The name of the process in `ps` and `top`, where it can be set."""


class BeatReport(msgspec.Struct, array_like=True, frozen=True):
    """What the worker reports to its sidecar after a heartbeat."""

    worker: str = ""  # its name; "": the sidecar has nothing to do for it
    queues: tuple[str, ...] = ()  # the queues that it has joined
    broker: Endpoint | None = None  # the address of its broker
    memberships: tuple[GroupMembership, ...] = ()  # the groups of streams that it is a member of
    left: bool = False  # whether it has left the queues, or tried to: then it has no lease to renew
    # What had begun when an error ended the worker, by queue; None: the shared memory says what had.
    begun_entries: dict[str, list[str]] | None = None
    interval: float = (
        0.0  # seconds until the next heartbeat: a third of a lease, or more while the worker is idle
    )


class Sidecar:
    """The worker's end: tell it of each beat, and when the queues were left. It lasts as long as the process, whatever
    names the worker has one after the other."""

    def __init__(
        self,
        app: App,
        *,
        write_fd: int,
        sidecar_memory: SidecarMemory,
        broker: str = DEFAULT_BROKER,
        start_error: str = "",
    ) -> None:
        self.start_error: str = start_error
        """Why the process could not be started; '' when it was."""
        self._memory = sidecar_memory
        self._app = app
        self._broker = broker
        self._write_fd = write_fd
        self._unsent = b""
        self._last = BeatReport()
        self._memberships: tuple[GroupMembership, ...] = ()
        self._closed = False
        os.set_blocking(write_fd, False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._memory.sidecar_pid

    def begin_worker(self, memberships: Sequence[GroupMembership] = ()) -> SidecarMemory:
        """Return the shared memory, emptied, for a worker that begins under a new name.

        Args:
            memberships: The groups of streams that this worker will be a member of.
        """
        self._memberships = tuple(memberships)
        self._memory.reset()
        return self._memory

    def report_beat(self, worker: str, queues: tuple[str, ...], interval: float = 0.0) -> bool:
        """Report that the leases of `worker` were renewed. Return False, once, when the sidecar has ended.

        The next report comes in `interval` seconds; 0: in a third of a lease.
        """
        endpoint = self._app.brokers.get(self._broker).endpoint
        self._last = BeatReport(worker, queues, endpoint, self._memberships, interval=interval)
        return self._send(self._last)

    def report_left(self, *, holding: bool) -> None:
        """The worker has left its queues, or tried to: its leases are never renewed again. `holding`: it may still
        hold jobs, which are put back when the process has ended."""
        self._send(msgspec.structs.replace(self._last, left=True) if holding else BeatReport())

    def report_failed(self, begun_entries: Mapping[str, Sequence[bytes]]) -> None:
        """An error ends the worker: the end of the process is a death, for which these entries are blamed."""
        # The newest: a report must fit the pipe.
        begun = {
            queue: [entry.decode() for entry in entries[-MAX_BLAMED:]]
            for queue, entries in begun_entries.items()
        }
        self._send(msgspec.structs.replace(self._last, begun_entries=begun))

    def close(self) -> None:
        """Close the pipe: the sidecar is not needed any more."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
        self._write_fd, self._closed = -1, True

    def _send(self, report: BeatReport) -> bool:
        """Send a report without blocking. The next report replaces one that a stopped sidecar does not read."""
        if self._closed:
            return True
        words = self._unsent or msgspec.json.encode(report) + b"\n"
        try:
            self._unsent = words[os.write(self._write_fd, words) :]
        except BlockingIOError:
            self._unsent = self._unsent and words
        except OSError:  # it has ended, or a job has closed all files that it found open
            self._closed = True
            return False
        return True


class Sidecars(msgspec.Struct, frozen=True):
    """The sidecar processes of this process."""

    # By the name of the broker.
    by_broker: dict[str, Sidecar]
    # What one of them watches the interpreter by; None when there are none.
    memory: SidecarMemory | None = None
    files: SharedFiles | None = None

    @contextmanager
    def watching(self, interruption: Interruption) -> Generator[None, None, None]:
        """Have the interpreter watched while the block lasts, which is inside of that of the `interruption`."""
        if self.memory is None or self.files is None:
            yield
            return
        with InterpreterPulse(self.memory, self.files, interruption):
            yield


@contextmanager
def start_sidecars(
    app: App, brokers: Sequence[str], stop_times: StopTimes
) -> Generator[Sidecars, None, None]:
    """Sidecars for this process, one for what it is on each broker, while the block lasts. Call it while there is one
    thread.

    The shared memory has a slot for each job that may ever run at once, whatever the worker is told meanwhile.

    Args:
        app: The application.
        brokers: The names of the brokers.
        stop_times: How long the process may take to stop.
    """
    if not brokers:
        yield Sidecars({})
        return
    most = {kind: get_max_slots(budget) for kind, budget in resolve_budgets(app).items()}
    slots = sum(most.values())
    # While a box is being ended, another one may have begun in its slot.
    memories = [
        SidecarMemory(slots=slots, boxes=2 * most["boxed"], first_slot=number * slots)
        for number in range(len(brokers))
    ]
    files = SharedFiles()
    by_broker: dict[str, Sidecar] = {}
    with ExitStack() as stack:
        stack.callback(files.close)
        for number, (broker, memory) in enumerate(zip(brokers, memories, strict=True)):
            shared = _Shared(memory, tuple(memories), None if number else files, stop_times)
            write_fd, start_error = _fork(app, shared)
            sidecar = Sidecar(
                app, write_fd=write_fd, sidecar_memory=memory, broker=broker, start_error=start_error
            )
            # A process that a job forks must not keep the pipe open when we are gone.
            os.register_at_fork(after_in_child=sidecar.close)
            stack.callback(sidecar.close)
            by_broker[broker] = sidecar
        yield Sidecars(by_broker, memories[0], files)


class _Shared(msgspec.Struct, frozen=True):
    """What a sidecar shares with its worker."""

    memory: SidecarMemory
    # Those of all sidecars of the worker, that of the first one first.
    memories: tuple[SidecarMemory, ...]
    # Only the first sidecar watches the interpreter; None in the others.
    files: SharedFiles | None
    stop_times: StopTimes


def _fork(app: App, shared: _Shared) -> tuple[int, str]:
    """Start the process, and return the write end of its pipe, and why it could not be started ('': it was).

    It is no child of ours, or a job that waits for all its children would wait for it. Its session is its own, and it
    blocks all signals: neither Ctrl-C nor a closed terminal nor a signal to the group is meant for it.
    """
    # What the collector leaves alone stays one page for both processes.
    gc.freeze()
    worker, (read_fd, write_fd) = os.getpid(), os.pipe()
    pidfd, start_error = _open_pidfd(worker), ""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # An application that starts threads when it is imported is warned; this one needs none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            between = os.fork()
        if between == 0:
            _become_sidecar(app, shared, worker, pidfd, read_fd)
        os.waitpid(between, 0)
    except OSError as error:  # no more processes, no more memory: the first beat finds that there is nobody
        start_error = str(error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_fd)
        if pidfd >= 0:
            os.close(pidfd)
    return write_fd, start_error


def _open_pidfd(pid: int) -> int:
    """Return a file that is readable when the process has ended; -1 where the system has none."""
    try:
        return os.pidfd_open(pid) if sys.platform == "linux" else -1
    except OSError:
        return -1


def _become_sidecar(app: App, shared: _Shared, worker: int, pidfd: int, read_fd: int) -> NoReturn:
    code, memory, files = 1, shared.memory, shared.files
    process = f"{socket.gethostname()}:{worker}"
    log: SidecarLog | None = None
    try:
        os.setsid()
        if pid := os.fork():
            memory.sidecar_pid = pid
        else:
            # No object of the worker's is ever finalised here: it might close a file whose number is ours now.
            gc.disable()
            _close_other_files(read_fd, pidfd, *((files.stacks, files.stops) if files else ()))
            log = SidecarLog(app, process)
            freeze = (
                FreezeWatch(worker, pidfd, shared.memories, files, shared.stop_times, log) if files else None
            )
            _Watch(app, memory, worker, pidfd, read_fd, log, freeze).stand_by()
        code = 0
    except BaseException as error:  # there is nobody above
        log = log or SidecarLog(app, process)
        log.event("sidecar:failed", "error", pid=worker, why=repr(error), hint=_NO_SIDECAR)
    finally:
        with suppress(BaseException):
            if log is not None:
                log.close()
        os._exit(code)


def _close_other_files(*kept: int) -> None:
    """Close all files but these, stdout and stderr, leave the working directory, and set the process name.

    Their numbers then lead nowhere: what an object of the worker's writes, or a log detector of the user's, must never
    reach a file of ours that has got the same number.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    try:
        found = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        found = list(range(1024))
    for descriptor in found:
        if descriptor > 2 and descriptor not in (nowhere, *kept):
            with suppress(OSError):  # it is closed already, like the one that listed the others
                os.fstat(descriptor)
                os.dup2(nowhere, descriptor)
    os.chdir("/")
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(PROCESS_NAME)


class _Watch:
    """The part that runs in the sidecar process."""

    def __init__(
        self,
        app: App,
        memory: SidecarMemory,
        worker: int,
        pidfd: int,
        read_fd: int,
        log: SidecarLog,
        freeze: FreezeWatch | None = None,
    ) -> None:
        self._app = app
        self._log = log
        self._freeze = freeze
        self._memory = memory
        self._pid = worker
        self._pidfd = pidfd
        self._read_fd = read_fd
        self._poll = select.poll()
        for descriptor in (read_fd, pidfd, -1 if freeze is None else freeze.requests_file):
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)
        self._interval = app.settings.lease / HEARTBEATS_PER_LEASE
        self._unread = b""
        self._report = BeatReport()
        self._beat_at = now()
        self._observation = ProcessObservation(now())
        self._next_step_at = self._next_look_at = 0.0
        self._lost_worker = ""
        self._hung = False
        self._renewal_failed = False
        # The broker that does not answer this process; '' when it does.
        self._unreachable = ""
        # A slow server costs the worker its lease only when it is slower than the worker's own beats may be.
        within = max(app.settings.lease / 2, RECOVERY_TIMING.reply)
        usual = Timing()
        self._reply_timing = Timing(connect=min(within, usual.connect), reply=min(within, usual.reply))
        self._redis: BlockingBroker | None = None

    def stand_by(self) -> None:
        """Renew the leases of a silent worker until it has ended. Then put back the jobs that it held."""
        liveness = Liveness.WORKING
        while liveness is not Liveness.GONE and not self._has_ended():
            if self._has_lease and now() >= self._next_step_at:
                liveness = self._renew_leases()
            if self._freeze is not None and self._must_look and now() >= self._next_look_at:
                self._next_look_at = now() + LOOK_INTERVAL
                self._freeze.look(_sample_process(self._pid))
        if (self._report.worker or self._memory.box_groups) and self._has_process_ended():
            self._end_boxes()
            if self._report.worker:
                self._leave_groups()
                self._recover()

    @property
    def _has_lease(self) -> bool:
        """Whether there is a lease to renew."""
        return self._report.worker not in ("", self._lost_worker) and not self._report.left

    @property
    def _must_look(self) -> bool:
        """Whether the interpreter is watched now: once the first heartbeat has come, or when the worker is to stop."""
        return self._freeze is not None and (bool(self._report.worker) or self._freeze.stop_requested)

    def _has_ended(self) -> bool:
        """Wait for a report, until there is something to do. Return True when no more reports will come."""
        moments = [self._next_step_at] if self._has_lease else []
        moments += [self._next_look_at] if self._must_look else []
        pause = max(min(moments) - now(), 0.0) * 1000 + 1 if moments else None
        ready = {descriptor for descriptor, _ in self._poll.poll(pause)}
        if self._freeze is not None and self._freeze.requests_file in ready:
            if not self._freeze.read_requests():
                self._poll.unregister(self._freeze.requests_file)
            self._next_look_at = 0.0
        if self._read_fd in ready:
            words = os.read(self._read_fd, 1 << 16)
            if not words:
                return True
            self._read_reports(words)
            return False  # there may be more, and what was said last counts
        return self._pidfd in ready

    def _read_reports(self, words: bytes) -> None:
        *lines, self._unread = (self._unread + words).split(b"\n")
        if lines:
            self._report = msgspec.json.decode(lines[-1], type=BeatReport)
            self._log.worker = self._report.worker or self._log.worker
            if self._has_lease and self._report.begun_entries is None:
                self._note_broker(None)  # it has answered the worker
            self._observation, self._hung, self._renewal_failed = observe_heartbeat(now()), False, False
            self._beat_at = now()
            # An idle worker runs no job before it has sent another heartbeat.
            idle = max(self._report.interval - self._interval, 0.0)
            silence = MISSED_BEATS * self._interval
            self._next_step_at = now() + idle + silence
            if self._freeze is not None and not self._freeze.is_looking:
                self._next_look_at = now() + idle + min(silence, MAX_SILENCE)

    def _renew_leases(self) -> Liveness:
        """Renew the worker's leases if it lives, and return its liveness. Lost leases are never renewed."""
        self._next_step_at = now() + self._interval
        sample = _sample_process(self._pid)
        sample = msgspec.structs.replace(sample, thread_seconds=_read_thread_seconds(self._pid))
        self._observation, liveness = assess_liveness(self._observation, sample, hung_after=HUNG_AFTER)
        if liveness is Liveness.HUNG and not self._hung:
            self._hung = True
            self._log.event("worker:hung", "error", pid=self._pid, seconds=round(HUNG_AFTER), hint=_HUNG)
        if not liveness.is_alive:
            return liveness
        lease, renewed_at = self._app.settings.lease, now()
        beats = [
            leases.renew_lease(keys, self._report.worker, lease=lease, silent_for=renewed_at - self._beat_at)
            for keys in self._queues()
        ]
        try:
            pulses = self._broker(self._reply_timing).perform_all(beats)
            if self._report.memberships:
                self._broker(self._reply_timing).perform_all(self._make_renewals())
        except BrokerUnavailable as error:
            self._note_broker(error)
            return liveness
        except BrokerError as error:
            if not self._renewal_failed:
                self._log.event("lease:renewal-failed", "warning", pid=self._pid, why=str(error))
            self._renewal_failed = True
            return liveness
        self._note_broker(None)
        self._renewal_failed = False
        if all(pulse.alive for pulse in pulses):
            self._memory.lease_until = renewed_at + lease
        else:
            self._lost_worker = self._report.worker
        return liveness

    def _note_broker(self, error: BrokerUnavailable | None) -> None:
        """Note that the broker does not answer, or, with None, that it does. Each outage is logged once.

        While it does not, no heartbeat can come, so none that is missing says anything of the worker.
        """
        broker = self._report.broker
        if error is not None and broker is not None:
            self._observation, self._beat_at = observe_heartbeat(now()), now()
            if not self._unreachable:
                self._unreachable = broker.masked_url
                self._log.lost_connections.record_loss(self._unreachable, str(error), failed=0, resent=0)
        elif error is None and self._unreachable:
            self._log.lost_connections.record_connection(self._unreachable, is_return=True)
            self._unreachable = ""

    def _has_process_ended(self) -> bool:
        """The pipe's end alone says little: a job may have closed all files that it found open."""
        if self._pidfd >= 0:
            last = select.poll()
            last.register(self._pidfd, select.POLLIN)
            return bool(last.poll(EXIT_TIMEOUT * 1000))
        end = now() + EXIT_TIMEOUT
        while now() < end:
            sign = _sample_process(self._pid)
            if not sign.state or assess_liveness(self._observation, sign)[1] is Liveness.GONE:
                return True
            select.select([], [], [], 0.01)
        return False

    def _end_boxes(self) -> None:
        """Kill what the boxes started before their jobs run again: the kernel ended only the boxes."""
        for group, birth in self._memory.box_groups:
            if get_start_ticks(group) in (birth, 0):  # not a stranger, who has its id since it ended
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)

    def _recover(self) -> None:
        """Put back the jobs that the worker held. Those not begun are not counted, nor any once it had left."""
        name, left = self._report.worker, self._report.left
        back = dead = 0
        settings, freeze = self._app.settings, self._freeze
        cause = "" if freeze is None else freeze.end_reason
        # Who was asked to stop, and did not come to its end, is not lost, and no job has taken it down.
        has_left = left or (freeze is not None and freeze.stop_requested and not cause)
        begun: Mapping[str, Sequence[bytes]] = {} if has_left else self._get_begun_entries()
        try:
            for keys in self._queues():
                call = leases.recover(
                    keys,
                    worker=name,
                    max_deliveries=settings.max_deliveries,
                    limit=RECOVERY_BATCH,
                    ttl=settings.results_ttl,
                    message_limit=settings.message_limit,
                    begun_entries=begun.get(keys.queue, []),
                    has_left=has_left,
                    cause=cause,
                )
                # Once more than it seems to need: where a job has forked, the dead worker's last read may still stand
                # at the server, and takes what was put back.
                while (done := self._broker(RECOVERY_TIMING).perform(call)).has_more or done.requeued:
                    back, dead = back + done.requeued, dead + done.dead_lettered
                dead += done.dead_lettered
        except CeleryError as error:
            broker = self._report.broker
            own = broker is not None and broker.kind == "unix" and not os.path.exists(broker.path)
            if own or left:
                return  # a server of the worker's own, which has ended with it; or the worker has said so itself
            self._log.event("worker:recovery-failed", "warning", pid=self._pid, why=str(error), hint=_LATER)
            return
        if not left:
            self._log.event("worker:died", "warning", pid=self._pid, requeued=back, dead_lettered=dead)
        elif back or dead:
            self._log.event(
                "worker:jobs-requeued", "warning", pid=self._pid, requeued=back, dead_lettered=dead
            )

    def _get_begun_entries(self) -> Mapping[str, Sequence[bytes]]:
        reported = self._report.begun_entries
        if reported is None:
            return self._memory.get_started_entries(self._report.queues)
        return {queue: [entry.encode() for entry in entries] for queue, entries in reported.items()}

    def _make_renewals(self) -> list[Call[bool]]:
        """Return the calls that renew the memberships in groups of streams. One that is lost stays so."""
        return [
            stream_calls.renew_member_lease(
                self._app.keys.for_stream(membership.stream),
                membership.group,
                member=name,
                incarnation=self._report.worker,
                lease=self._app.settings.lease,
            )
            for membership in self._report.memberships
            for name in membership.names
        ]

    def _leave_groups(self) -> None:
        """Give back the partitions of streams that the worker owned: others continue them at once."""
        leaves = [
            stream_calls.leave_group(
                self._app.keys.for_stream(membership.stream),
                membership.group,
                member=name,
                incarnation=self._report.worker,
                has_died=not self._report.left,
            )
            for membership in self._report.memberships
            for name in membership.names
        ]
        if leaves:
            with suppress(CeleryError):  # else its lease ends
                self._broker(RECOVERY_TIMING).perform_all(leaves)

    def _queues(self) -> list[QueueKeys]:
        return [self._app.queue(queue) for queue in self._report.queues]

    def _broker(self, timing: Timing) -> BlockingBroker:
        """Return a connection, made when it is first needed: mostly never."""
        assert self._report.broker is not None, "a worker that has a name has said where its broker is"
        endpoint = find_endpoint(self._report.broker)
        if self._redis is None or (self._redis.endpoint, self._redis.timing) != (endpoint, timing):
            self._redis = open_blocking(endpoint, timing=timing)
        return self._redis


def _sample_process(pid: int) -> ProcessSample:
    """Return what the kernel reports of a process; where it reports nothing, whether the process exists."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return parse_stat(file.read(), at=now(), ticks=os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ProcessSample(now(), "X")
    except PermissionError:
        pass
    return ProcessSample(now())


def _read_thread_seconds(pid: int) -> dict[int, float] | None:
    """Return the processor time of each thread of a process, to the nanosecond; None where the kernel keeps none."""
    found: dict[int, float] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                found[int(thread)] = int(file.read().split()[0]) / 1e9
        except FileNotFoundError:
            if not os.path.exists("/proc/self/schedstat"):
                return None
        except (OSError, ValueError, IndexError):  # it has ended
            pass
    return found


_HUNG = "its loop neither works nor sends heartbeats: others get its jobs when its lease is over"
_LATER = "another worker puts its jobs back when its lease is over"
_NO_SIDECAR = "the worker goes on; when it dies, its jobs are put back when its lease is over, not at once"
