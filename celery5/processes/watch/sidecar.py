"""Sidecar: a small process beside each worker process, which speaks for it while it cannot, and when it has died.

It is forked while the worker still has one thread, and is plain blocking code. The worker tells it of each beat. When
the beats stay away, because a job blocks the loop or holds the interpreter's lock, it renews the lease instead, for as
long as the process really lives (`protocol/process/liveness.py`). When the worker ends without having left its
queues, it puts
back what the worker held, at once. It ends with the worker, always. Should it die itself, the worker goes on alone.
"""

import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec

from celery5.app import App
from celery5.broker.calls import leases
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import QueueKeys
from celery5.broker.timing import Timing
from celery5.errors import BrokerError, CeleryError
from celery5.processes.options import resolve_budgets
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.masking import escape_text
from celery5.protocol.process.liveness import (
    HUNG_AFTER,
    Liveness,
    ProcessObservation,
    ProcessSample,
    assess_liveness,
    observe_heartbeat,
    parse_stat,
)
from celery5.protocol.scaling.budget import get_max_slots
from celery5.runners.process_group import get_start_ticks
from celery5.services.process.shared_memory import SidecarMemory
from celery5.services.worker.lease import HEARTBEATS_PER_LEASE, now
from celery5.services.worker.recovery import RECOVERY_BATCH

MISSED_BEATS = 1.5
"""Beats that must be missing before the sidecar steps in."""
EXIT_TIMEOUT = 5.0
"""Seconds after the end of the pipe in which the worker must end, too; else it has only closed its files."""
RECOVERY_TIMING = Timing(connect=1.0, reply=1.0)
"""For recovery. A broker that is away or hangs must hold up nobody: leases put the jobs back, too."""
PROCESS_NAME = "celery5-sidecar"
"""What `ps` and `top` call the process, where they can be told."""


class BeatReport(msgspec.Struct, array_like=True, frozen=True):
    """What the worker says after a beat: its name, the queues that it has joined, where its broker is. With `left` it
    has left them, or tried to, and has no lease to renew any more. With no name: nothing need be done for it."""

    worker: str = ""
    queues: tuple[str, ...] = ()
    broker: Endpoint | None = None
    left: bool = False


class Sidecar:
    """The worker's end: tell it of each beat, and when the queues were left. It lasts as long as the process, whatever
    names the worker has one after the other."""

    def __init__(
        self, app: App, *, write_fd: int, sidecar_memory: SidecarMemory, broker: str = DEFAULT_BROKER
    ) -> None:
        self._black_box = sidecar_memory
        self._app = app
        self._broker = broker
        self._mouth = write_fd
        self._unsent = b""
        self._last = BeatReport()
        self._gone = False
        os.set_blocking(write_fd, False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._black_box.sidecar_pid

    def begin_worker(self) -> SidecarMemory:
        """A worker begins, under a name of its own; gives the black box, which is empty."""
        self._black_box.reset()
        return self._black_box

    def report_beat(self, worker: str, queues: tuple[str, ...]) -> bool:
        """The leases of `worker` were renewed. False, once, when there is no sidecar any more."""
        self._last = BeatReport(worker, queues, self._app.brokers.get(self._broker).endpoint)
        return self._tell(self._last)

    def report_left(self, *, holding: bool) -> None:
        """The worker has left its queues, or tried to: its leases are never renewed again. `holding`: it may still
        hold jobs, which are put back when the process has ended."""
        self._tell(msgspec.structs.replace(self._last, left=True) if holding else BeatReport())

    def close(self) -> None:
        """It is not needed any more."""
        if self._mouth >= 0:
            os.close(self._mouth)
        self._mouth, self._gone = -1, True

    def _tell(self, said: BeatReport) -> bool:
        """Never blocks: what a stopped sidecar does not read is left out, and said again with the next beat."""
        if self._gone:
            return True
        words = self._unsent or msgspec.json.encode(said) + b"\n"
        try:
            self._unsent = words[os.write(self._mouth, words) :]
        except BlockingIOError:
            self._unsent = self._unsent and words
        except OSError:  # it has ended, or a job has closed all files that it found open
            self._gone = True
            return False
        return True


@contextmanager
def start_sidecar(app: App, broker: str = DEFAULT_BROKER) -> Generator[Sidecar, None, None]:
    """A sidecar for this process, and what it is on one `broker`, while the block lasts. Call it while
    there is one thread.

    The black box has a slot for each job that may ever run at once, whatever the worker is told meanwhile.
    """
    most = {kind: get_max_slots(budget) for kind, budget in resolve_budgets(app).items()}
    # While a box is being ended, another one may have begun in its slot.
    black_box = SidecarMemory(slots=sum(most.values()), boxes=2 * most["boxed"])
    mouth = _fork(app, black_box)
    one = Sidecar(app, write_fd=mouth, sidecar_memory=black_box, broker=broker)
    # A process that a job forks must not keep the pipe open when we are gone.
    os.register_at_fork(after_in_child=one.close)
    try:
        yield one
    finally:
        one.close()


def _fork(app: App, black_box: SidecarMemory) -> int:
    """Start the process; gives the end of the pipe on which to speak to it.

    It is no child of ours, or a job that waits for all its children would wait for it. Its session is its own, and it
    blocks all signals: neither Ctrl-C nor a closed terminal nor a signal to the group is meant for it.
    """
    # What the collector leaves alone stays one page for both processes.
    gc.freeze()
    worker, (ear, mouth) = os.getpid(), os.pipe()
    life = _handle_of(worker)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # An application that starts threads when it is imported is warned; this one needs none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            between = os.fork()
        if between == 0:
            _become_sidecar(app, black_box, worker, life, ear)
        os.waitpid(between, 0)
    except OSError as error:  # no more processes, no more memory: the first beat finds that there is nobody
        _say(f"no sidecar for process {worker}: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(ear)
        if life >= 0:
            os.close(life)
    return mouth


def _handle_of(pid: int) -> int:
    """A file that is readable when the process has ended; -1 where there is no such thing."""
    try:
        return os.pidfd_open(pid) if sys.platform == "linux" else -1
    except OSError:
        return -1


def _become_sidecar(app: App, black_box: SidecarMemory, worker: int, life: int, ear: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        if pid := os.fork():
            black_box.sidecar_pid = pid
        else:
            # No object of the worker's is ever finalised here: it might close a file whose number is ours now.
            gc.disable()
            _keep_only(ear, life)
            _Watch(app, black_box, worker, life, ear).stand_by()
        code = 0
    except BaseException as error:  # there is nobody above
        _say(f"the sidecar of process {worker} failed: {error!r}")
    finally:
        os._exit(code)


def _keep_only(*kept: int) -> None:
    """Close all files but these and stderr, leave the working directory, and have a name of our own."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        found = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        found = list(range(1024))
    for each in found:
        if each > 2 and each not in kept:
            with suppress(OSError):  # it is closed already, like the one that listed the others
                os.close(each)
    os.chdir("/")
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(PROCESS_NAME)


class _Watch:
    """The sidecar's end."""

    def __init__(self, app: App, black_box: SidecarMemory, worker: int, life: int, ear: int) -> None:
        self._app = app
        self._box = black_box
        self._pid = worker
        self._life = life
        self._ear = ear
        self._poll = select.poll()
        for each in (ear, life):
            if each >= 0:
                self._poll.register(each, select.POLLIN)
        self._interval = app.settings.lease / HEARTBEATS_PER_LEASE
        self._unread = b""
        self._said = BeatReport()
        self._vigil = ProcessObservation(now())
        self._next = 0.0
        self._lost = ""
        self._hung = False
        self._unheard = False
        # A slow server costs the worker its lease only when it is slower than the worker's own beats may be.
        within = max(app.settings.lease / 2, RECOVERY_TIMING.reply)
        usual = Timing()
        self._reply_timing = Timing(connect=min(within, usual.connect), reply=min(within, usual.reply))
        self._redis: BlockingRedis | None = None

    def stand_by(self) -> None:
        """Until the worker has ended: step in when it is silent. Then put back what it held."""
        life = Liveness.WORKING
        while life is not Liveness.GONE and not self._has_ended():
            if self._watches and now() >= self._next:
                life = self._step_in()
        if (self._said.worker or self._box.box_groups) and self._really_ended():
            self._end_boxes()
            if self._said.worker:
                self._recover()

    @property
    def _watches(self) -> bool:
        """Whether there is a lease to look after."""
        return self._said.worker not in ("", self._lost) and not self._said.left

    def _has_ended(self) -> bool:
        """Wait for a word, until it is time to step in. True when there will be none any more."""
        pause = max(self._next - now(), 0.0) * 1000 + 1 if self._watches else None
        ready = {each for each, _ in self._poll.poll(pause)}
        if self._ear in ready:
            words = os.read(self._ear, 1 << 16)
            if not words:
                return True
            self._hear(words)
            return False  # there may be more, and what was said last counts
        return self._life in ready

    def _hear(self, words: bytes) -> None:
        *lines, self._unread = (self._unread + words).split(b"\n")
        if lines:
            self._said = msgspec.json.decode(lines[-1], type=BeatReport)
            self._vigil, self._hung, self._unheard = observe_heartbeat(now()), False, False
            self._next = now() + MISSED_BEATS * self._interval

    def _step_in(self) -> Liveness:
        """Renew the worker's leases if it lives; gives what it is taken for. Lost leases are never renewed."""
        self._next = now() + self._interval
        self._vigil, life = assess_liveness(self._vigil, _look_at(self._pid), hung_after=HUNG_AFTER)
        if life is Liveness.HUNG and not self._hung:
            self._hung = True
            _say(f"worker {self._said.worker} (pid {self._pid}) hangs: its lease is not renewed any more")
        if not life.is_alive:
            return life
        lease, asked = self._app.settings.lease, now()
        beats = [leases.renew_lease(keys, self._said.worker, lease=lease) for keys in self._queues()]
        try:
            pulses = self._broker(self._reply_timing).perform_all(beats)
        except BrokerError as error:
            if not self._unheard:
                who = f"worker {self._said.worker} (pid {self._pid})"
                _say(f"{who} is silent, and its sidecar cannot renew its lease: {error}")
            self._unheard = True
            return life
        self._unheard = False
        if all(pulse.alive for pulse in pulses):
            self._box.lease_until = asked + lease
        else:
            self._lost = self._said.worker
        return life

    def _really_ended(self) -> bool:
        """The pipe's end alone says little: a job may have closed all files that it found open."""
        if self._life >= 0:
            last = select.poll()
            last.register(self._life, select.POLLIN)
            return bool(last.poll(EXIT_TIMEOUT * 1000))
        end = now() + EXIT_TIMEOUT
        while now() < end:
            sign = _look_at(self._pid)
            if not sign.state or assess_liveness(self._vigil, sign)[1] is Liveness.GONE:
                return True
            select.select([], [], [], 0.01)
        return False

    def _end_boxes(self) -> None:
        """Before their jobs run elsewhere. The kernel has ended the boxes, but not what they have started."""
        for group, birth in self._box.box_groups:
            if get_start_ticks(group) in (birth, 0):  # not a stranger, who has its id since it ended
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)

    def _recover(self) -> None:
        """Put back what the worker held. What it had not begun is not counted, and nothing once it had left."""
        name, left = self._said.worker, self._said.left
        begun = {} if left else self._box.get_started_entries(self._said.queues)
        back = buried = 0
        settings = self._app.settings
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
                )
                # Once more than it seems to need: where a job has forked, the dead worker's last read may still stand
                # at the server, and takes what was put back.
                while (done := self._broker(RECOVERY_TIMING).perform(call)).has_more or done.requeued:
                    back, buried = back + done.requeued, buried + done.dead_lettered
                buried += done.dead_lettered
        except CeleryError as error:
            broker = self._said.broker
            own = broker is not None and broker.kind == "unix" and not os.path.exists(broker.path)
            if own or left:
                return  # a server of the worker's own, which has ended with it; or the worker has said so itself
            _say(f"jobs of {name} (pid {self._pid}) are recovered when its lease lapses: {error}")
        else:
            if not left or back or buried:
                how = "had left" if left else "died"
                _say(f"worker {name} (pid {self._pid}) {how}: {back} jobs put back, {buried} buried")

    def _queues(self) -> list[QueueKeys]:
        return [self._app.queue(queue) for queue in self._said.queues]

    def _broker(self, timing: Timing) -> BlockingRedis:
        """A connection, made when it is first needed: mostly never."""
        endpoint = self._said.broker
        assert endpoint is not None, "a worker that has a name has said where its broker is"
        if self._redis is None or (self._redis.endpoint, self._redis.timing) != (endpoint, timing):
            self._redis = BlockingRedis(endpoint, timing=timing)
        return self._redis


def _look_at(pid: int) -> ProcessSample:
    """What the kernel tells of a process; where it tells nothing, whether there is one."""
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


def _say(line: str) -> None:
    """On stderr, unless that would make us wait."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, escape_text(line).encode() + b"\n")
