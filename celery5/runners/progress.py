"""Report the progress of the running job."""

from celery5.protocol.job.progress import make_progress_report
from celery5.runners.context import CURRENT_JOB, PROGRESS_RECEIVER


def progress(done: float, total: float | None = None, note: str = "") -> None:
    """Report how far the running job is, in every kind of task.

    It never waits, and never raises because of Redis: the worker stores the last report of each job, once a second
    at most. Outside of a job it only checks its arguments.

    Args:
        done: How much is done, in a unit of your own: 0 or more.
        total: How much there is to do; None when that is unknown.
        note: A text for people. 200 characters are kept.

    Raises:
        TypeError: `done` or `total` is not a number, or `note` is not a text.
        ValueError: `done` or `total` is negative or NaN.
    """
    report = make_progress_report(done, total, note)
    job, receive = CURRENT_JOB.get(), PROGRESS_RECEIVER.get()
    if job is not None and receive is not None:
        receive(job, report)
