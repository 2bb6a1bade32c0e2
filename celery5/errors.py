"""Define every error that celery5 raises at its users.

Names say the condition, without prefix or suffix. A message says in one line what is wrong, then what to do.
"""

from collections.abc import Iterable
from datetime import timedelta

from celery5.similar_names import did_you_mean, join_names


class CeleryError(Exception):
    """The base class of all errors that celery5 raises on purpose."""


# Declaring and calling tasks


class Misconfigured(CeleryError):
    """A setting, an option or a declaration makes no sense. The message names it and its origin."""


EXIT_ALREADY_IN_USE = 73
"""The exit code of a process that raised AlreadyInUse: it is started again, and does not count as crashed."""


class AlreadyInUse(Misconfigured):
    """Another process has what only one may have, such as a socket or a backlog. It may be about to end."""


class DuplicateTask(Misconfigured):
    """Two functions were declared under one task name in one application."""


class UnknownName(Misconfigured):
    """Nothing that was declared or added has this name: a schedule, an alert, a stream."""


class UnknownTask(CeleryError, LookupError):
    """The application declares no task of that name. `name` is the unknown name."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        self.name = name
        names = sorted(known)
        hint = did_you_mean(name, names, otherwise=f"declared: {join_names(names, 10) or 'none'}")
        super().__init__(f"no task {name!r} here; {hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownQueue(CeleryError, LookupError):
    """The application has no queue of that name: nothing was ever sent to it. `name` is the unknown name."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        self.name = name
        names = sorted(known)
        hint = did_you_mean(name, names, otherwise=f"used so far: {join_names(names, 10) or 'none'}")
        super().__init__(f"no queue {name!r} here; {hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class ResourceUnavailable(CeleryError):
    """A resource that a task needs is not open: it could not be opened in time, or this is no worker."""


class BadArguments(CeleryError, TypeError):
    """Arguments do not fit the task. The message names the task, the parameter and both types."""


class MessageTooLarge(CeleryError, ValueError):
    """A message or a result is larger than the limit (setting `message_limit`, in bytes)."""


class BadRecord(CeleryError, ValueError):
    """A record does not fit its class, or an entry of a stream cannot be decoded. The message says what and why."""


class NotRecorded(CeleryError):
    """A test called what needs a broker, where `celery5.testing.recorded` is in force, which opens no connection."""


class RunWaits(CeleryError):
    """In a test with `celery5.testing.in_memory` a workflow waits for what was not sent, and nothing else is left."""


class BlockingInEventLoop(CeleryError):
    """A blocking call was made inside a running event loop. The message names the call to await instead."""


class Corrupt(CeleryError, ValueError):
    """Bytes on a stream are no valid Command."""


# Raised inside tasks


ASKED_FOR = "asked for"
"""The message of a `Retry` that was raised without one."""


class Retry(CeleryError):
    """Raise it in a task to have the job tried again, after `countdown` seconds or as the retry policy says.

    It counts as an attempt. `max_retries` replaces the policy's own for this time; beyond them the job becomes a dead
    letter. Raises Misconfigured for invalid numbers.
    """

    countdown: float | None = None
    max_retries: int | None = None
    retry_policy: object = None
    """A RetryPolicy instead of the task's own: see `CurrentJob.retry`."""

    def __init__(
        self,
        message: str = ASKED_FOR,
        *,
        countdown: float | timedelta | None = None,
        max_retries: int | None = None,
    ) -> None:
        if isinstance(countdown, timedelta):
            countdown = countdown.total_seconds()
        if countdown is not None and not (_is_number(countdown) and 0 <= countdown <= 100 * 365 * 86400):
            raise Misconfigured(f"countdown is {countdown!r}: give 0 seconds or more, or a timedelta")
        if max_retries is not None and not (_is_number(max_retries, int) and max_retries >= 0):
            raise Misconfigured(f"max_retries is {max_retries!r}: give a whole number, 0 or more")
        self.countdown = countdown
        self.max_retries = max_retries
        super().__init__(message)


def _is_number(thing: object, kind: type[int | float] = float) -> bool:
    return isinstance(thing, int | kind) and not isinstance(thing, bool)


class Reject(CeleryError):
    """Raise it in a task that refuses this job: the job ends as REJECTED, which is no failure."""


class TimeLimitExceeded(CeleryError, TimeoutError):
    """An attempt ran for longer than its `time_limit`, and was stopped."""


class SoftTimeLimitExceeded(TimeLimitExceeded):
    """Raised inside a task that runs for longer than its `soft_time_limit`, so that it can clean up."""


class BoxCrashed(CeleryError):
    """The process of a boxed task ended, could not be started, or sent invalid output: a failed attempt.

    `stderr` is the end of what it wrote there.
    """

    def __init__(self, message: str, *, stderr: str = "") -> None:
        self.stderr = stderr
        super().__init__(message)


# Waiting for results


class TaskFailed(CeleryError):
    """The job is in the dead-letter queue: what `get()` raises for it."""

    def __init__(
        self,
        *,
        job_id: str,
        task: str,
        type: str,  # noqa: A002  the name users know from the error itself
        message: str,
        error_args: tuple[str, ...] = (),
        traceback: str = "",
        attempt: int = 1,
        worker: str = "",
        reason: str = "",
    ) -> None:
        self.job_id = job_id
        self.task = task
        # The name of the error's class.
        self.type = type
        self.message = message
        # The error's arguments as text.
        self.error_args = error_args
        # As text.
        self.traceback = traceback
        # Counted from 1.
        self.attempt = attempt
        self.worker = worker
        # Why the job became a dead letter: `exhausted`, `not-retried`, `unknown-task`, ...
        self.reason = reason
        super().__init__(self._format_message())

    def _format_message(self) -> str:
        """Return in one line what happened to the job."""
        return (
            f"{self.task}[{self.job_id}] failed at attempt {self.attempt} ({self.reason}): "
            f"{self.type}: {self.message}"
        )


class TaskRevoked(TaskFailed):
    """The job was revoked: what `get()` raises for it."""

    def _format_message(self) -> str:
        return f"{self.task}[{self.job_id}] was revoked"


class TaskRejected(TaskFailed):
    """The job was rejected by its task, or by its `deduplicate` policy: what `get()` raises for it."""

    def _format_message(self) -> str:
        return f"{self.task}[{self.job_id}] was rejected: {self.message}"


class TaskExpired(TaskFailed):
    """The job was not started before its `expires`: what `get()` raises for it."""

    def _format_message(self) -> str:
        return f"{self.task}[{self.job_id}] expired before it could start"


class BadResult(CeleryError, TypeError):
    """The job succeeded, but its result does not fit the annotation of the task in this process."""


class WorkflowFailed(TaskFailed):
    """A run of a workflow has failed: the error of the node with which it did, which `get()` raises."""

    # The id of the run.
    run: str = ""
    # The number of the node in the graph of the run.
    node: int | None = None

    def _format_message(self) -> str:
        where = f" on {self.worker}" if self.worker else ""
        what = f"{self.task}[{self.job_id}] at attempt {self.attempt}{where}"
        return f"{self.reason}: {what}: {self.type}: {self.message}"


class WorkflowCancelled(WorkflowFailed):
    """A run of a workflow was cancelled: what `get()` raises for it."""

    def _format_message(self) -> str:
        return f"{self.task}[{self.job_id}] was cancelled"


class WorkflowExpired(WorkflowFailed):
    """A run of a workflow did not end before its deadline: what `get()` raises for it."""

    def _format_message(self) -> str:
        return f"{self.task}[{self.job_id}] did not end before its deadline"


class ResultLost(CeleryError):
    """A result that was stored is not there any more: it has expired, or Redis has lost data."""


class StagingLost(CeleryError):
    """What was published of a run was lost before it was started: Redis lost data, or it took too long.

    It is published a second time first, unless items of a map come from a generator, which makes them once.
    """


class RunNotRetried(CeleryError):
    """A run of a workflow cannot be retried now: the text says why."""


class ResultTimeout(CeleryError, TimeoutError):
    """`get`, `gather` or `wait` ran out of time. The job itself continues."""


class ResultsDisabled(CeleryError):
    """The job was sent with `ignore_result`: there is nothing to wait for."""


# The broker


class BrokerError(CeleryError):
    """The base class of all errors with Redis.

    `maybe_done` is true when a command was sent and it is not known whether it ran, or when a part of the call has run.
    Earlier attempts count, too: one may have been sent and lost before this error ended the next one.
    """

    maybe_done: bool = False

    def mark_maybe_done(self) -> None:
        """Record that something was sent before this error, and may have run."""
        self.maybe_done = True


class BadBrokerURL(BrokerError, ValueError):
    """The broker's URL cannot be parsed."""


class BrokerUnavailable(BrokerError):
    """Redis cannot be reached, was cut off, or did not answer in time.

    `maybe_done` is true when the command was sent, in this attempt or in an earlier one, and it is not known whether
    it ran.
    """

    def __init__(self, message: str, *, maybe_done: bool = False) -> None:
        self.maybe_done = maybe_done
        super().__init__(message)


class CircuitOpen(BrokerUnavailable):
    """The connection's circuit breaker is open: this attempt sent nothing. With `maybe_done` an earlier one did.

    As the failure of a job: the breaker of its task is open, so the job was not started.
    """


class BrokerLoading(BrokerUnavailable):
    """Redis refused the command, since it is still loading its data.

    With `maybe_done` an earlier attempt may have run.
    """


class BrokerReadOnly(BrokerUnavailable):
    """Redis is a read-only replica: it refused the command. With `maybe_done` an earlier attempt may have run."""


class PublisherUnavailable(BrokerUnavailable):
    """The Publisher daemon of the setting `publisher` cannot be reached, or can store nothing.

    With `maybe_done` it is not known whether it has the jobs.
    """


class BacklogFull(BrokerUnavailable):
    """Redis cannot be reached, and the backlog has no space for these jobs. None of them is stored.

    The backlog is that of the setting `backlog`, or the Publisher daemon's.
    """


class StreamFull(CeleryError):
    """A partition of a stream has as many unread records as it may have, or would have. Nothing was appended."""


class NotReplicated(BrokerError):
    """The jobs are on their queue and will run, but fewer replicas have them than the setting `replicas` demands.

    `ids` are the jobs' ids, `replicas` is how many have them, `wanted` how many should. Sending the jobs again would
    create duplicates.
    """

    maybe_done = True

    def __init__(self, message: str, *, ids: tuple[str, ...], replicas: int, wanted: int) -> None:
        self.ids = ids
        self.replicas = replicas
        self.wanted = wanted
        super().__init__(message)


class BrokerDenied(BrokerError):
    """Redis refuses this user, password or permission. Trying again does not help, until somebody changes them."""


class BrokerUnsupported(BrokerError):
    """The server is not of a kind that celery5 works with: part of a Redis Cluster, or a Sentinel."""


class BrokerTooOld(BrokerUnsupported):
    """The server is older than the oldest that celery5 supports."""


class BrokerReplied(BrokerError):
    """Redis answered with any other error. `code` is its first word, such as `NOGROUP`."""

    def __init__(self, message: str, *, code: str) -> None:
        self.code = code
        super().__init__(message)


class UnreadableReply(BrokerReplied):
    """Redis answered with something that celery5 cannot read: another program has written an entry or a key.

    It is not known what the command did. `code` is `UNREADABLE`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="UNREADABLE")


class ServerNotFound(CeleryError):
    """No Redis or Valkey server binary was found for the embedded server."""


class CommandRefused(CeleryError):
    """A running process does not know a command, or cannot do it. The text says why."""


class NotConcerned(CommandRefused):
    """A running process has nothing to do with what a command is about; another one may. The text says why."""


class BootStepFailed(CeleryError):
    """A mandatory boot step or service of the application did not start, or crashed too often: the worker stops.

    The text names it and the reason.
    """


class PlatformError(CeleryError):
    """A platform cannot start, stop or reach a process of a cluster now. The text says which, and why."""


class Superseded(CeleryError):
    """The Controller that started this process is no longer the leader, so the process does not start."""


class LeaseLost(CeleryError):
    """The cluster took this worker for dead, and other workers have its jobs (fencing)."""


class BulkActionRefused(CeleryError):
    """A bulk action is not performed: too many wait, it has ended, or another process has it."""
