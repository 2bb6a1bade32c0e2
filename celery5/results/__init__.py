"""The handle of a sent job, and where documents of results go."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.protocol.events.documents import ResultDocument
    from celery5.protocol.events.sinks import RedisResults, Sink
    from celery5.protocol.job.progress import Progress
    from celery5.protocol.job.states import JobState
    from celery5.protocol.job.story import JobDetails
    from celery5.results.async_result import AsyncResult, agather, arevoke, gather, revoke, wait, wait_async
    from celery5.results.file_sink import FileSink
    from celery5.results.sql_sink import SQLSink
    from celery5.results.watching import JobUpdate

__all__ = [
    "AsyncResult",
    "FileSink",
    "JobDetails",
    "JobState",
    "JobUpdate",
    "Progress",
    "RedisResults",
    "ResultDocument",
    "SQLSink",
    "Sink",
    "agather",
    "arevoke",
    "gather",
    "revoke",
    "wait",
    "wait_async",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "AsyncResult": "celery5.results.async_result",
            "FileSink": "celery5.results.file_sink",
            "JobDetails": "celery5.protocol.job.story",
            "JobState": "celery5.protocol.job.states",
            "JobUpdate": "celery5.results.watching",
            "Progress": "celery5.protocol.job.progress",
            "RedisResults": "celery5.protocol.events.sinks",
            "ResultDocument": "celery5.protocol.events.documents",
            "SQLSink": "celery5.results.sql_sink",
            "Sink": "celery5.protocol.events.sinks",
            "agather": "celery5.results.async_result",
            "arevoke": "celery5.results.async_result",
            "gather": "celery5.results.async_result",
            "revoke": "celery5.results.async_result",
            "wait": "celery5.results.async_result",
            "wait_async": "celery5.results.async_result",
        },
    )
