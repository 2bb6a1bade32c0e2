"""The handle of one run of a workflow."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw

from celery5.application import Application
from celery5.audit.recording import AuditedAction
from celery5.broker.calls import workflows as calls
from celery5.broker.colour import AwaitableConnections, blocking
from celery5.errors import (
    BadArguments,
    BadResult,
    CeleryError,
    ResultTimeout,
    RunNotRetried,
    TaskFailed,
    WorkflowCancelled,
    WorkflowExpired,
    WorkflowFailed,
)
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.messages import Failure, read_document
from celery5.protocol.workflows.member_ids import parse_member_id
from celery5.protocol.workflows.status import RunState, RunStatus, make_status, read_inner
from celery5.results.job_location import JobHandle
from celery5.results.waiting import wait_for_documents
from celery5.workflows.graph import RunGraph, read_graph
from celery5.workflows.repeated_calls import CallToken, RepeatedCalls
from celery5.workflows.result_types import RunResultType
from celery5.workflows.results import Results, make_stored_results
from celery5.workflows.values import RunValues

R_co = TypeVar("R_co", covariant=True)
_MISSING: Any = object()

STATUS_FIELDS = (
    "state",
    "name",
    "all",
    "done",
    "bad",
    "skipped",
    "active",
    "held",
    "created",
    "ended",
    "until",
    "error",
    "parent",
    "undone",
    "failed_at",
    "undos",
    "undo_done",
    "undo_bad",
    "undo_error",
    "undo_of",
)


class _RunDocument(msgspec.Struct, frozen=True):
    """The document of a run that has ended."""

    state: str
    id: str
    task: str = ""
    value: Raw = Raw(b"null")
    reason: str = ""
    cause: Raw = Raw(b"null")


_DOCUMENT = msgspec.json.Decoder(_RunDocument)


class WorkflowRun(JobHandle, Generic[R_co]):
    """The handle of a run. Keep its `id` to find it again with `app.workflows.find`.

    Its `queue` is the one where it lives, and its `key` the one for the document of its end.
    """

    def __init__(
        self,
        app: Application,
        id: str,  # noqa: A002  the field's own name
        *,
        home: str,
        type: "RunResultType | None" = None,  # noqa: A002
        is_new: bool = True,
    ) -> None:
        super().__init__(app, id, home)
        # Whether it was started for this handle: True for one of those who start a run of the same id.
        self.is_new: bool = is_new
        self._type = type or RunResultType()
        self._value: Any = _MISSING
        self._calls = RepeatedCalls()

    def __repr__(self) -> str:
        return f"<WorkflowRun {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkflowRun) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def aget(self, timeout: float | None = 10.0) -> R_co:
        """Wait for the run to end and return its result.

        Args:
            timeout: Seconds to wait; None for ever. The run itself is not limited by it.

        Raises:
            WorkflowFailed: A node failed; the error has its task, attempt, worker and traceback.
            WorkflowCancelled: The run was cancelled.
            WorkflowExpired: The run did not end before its deadline.
            ResultTimeout: The run has not ended in time.
            ResultLost: The results have expired.
        """
        if self._value is _MISSING:
            document = await self._wait(timeout)
            value = bytes(document.value)
            if document.reason == "stored":
                values = RunValues(await self.app.connections.get_async_driver(), self.app.queue(self.queue))
                value = await values.make_result(self.id)
            try:
                self._value = self._type.decode(value)
            except BadResult as error:
                raise BadResult(f"run {self.id} succeeded, but {error}") from None
        return cast("R_co", self._value)

    @blocking(aget)
    def get(self) -> None: ...

    async def aresults(self, timeout: float | None = 10.0) -> Results[Any]:
        """Wait for the run to end and return its results, to be read a thousand at a time.

        For a run whose result is that of a map; that of any other is its only item. Raises as `get`.
        """
        document = await self._wait(timeout)
        if document.reason == "stored":
            values = RunValues(await self.app.connections.get_async_driver(), self.app.queue(self.queue))
            location = await values.locate_result(self.id)
            if location is not None:
                return make_stored_results(self.app, location, self._type.decode_item)
        value = await self.aget(timeout)
        return Results[Any](cast("list[Any]", value) if isinstance(value, list) else [value])

    @blocking(aresults)
    def results(self) -> None: ...

    async def _wait(self, timeout: float | None) -> _RunDocument:
        """Return the document of the end. Raises as `get`."""
        documents = await wait_for_documents([self], timeout=timeout)
        if self.key not in documents:
            state = (await self.astatus()).state.value
            raise ResultTimeout(f"run {self.id}: no result after {timeout} s; it is {state}")
        document = _DOCUMENT.decode(documents[self.key])
        if document.state != "SUCCESS":
            raise make_run_error(document)
        return document

    async def astatus(self) -> RunStatus:
        """Return the state of the run and how many of its nodes are in which state."""
        redis = await self.app.connections.get_async_driver()
        fields = await redis.perform(calls.read_run(self.app.queue(self.queue), self.id, STATUS_FIELDS))
        return make_status(self.id, self.queue, fields)

    @blocking(astatus)
    def status(self) -> None: ...

    async def acancel(self) -> bool:
        """Cancel the run: what waits is withdrawn, what runs is revoked.

        It is CANCELLING while any of that is left; when it is CANCELLED, nothing of it begins any more.

        Returns:
            True when this call has cancelled it, also when its reply was lost and the call is made again on this
            handle; False when it had ended, or another call had cancelled it before, or it is not known.
        """
        with self._calls.token_for("cancel") as token:
            before = (await self.astatus()).state
            if before not in (RunState.RUNNING, RunState.HELD) and not token.is_repeated:
                return False
            async with await self._audited("cancel") as action:
                count = int((await self._apply(self.app.connections, "cancel_once", token.text))[0])
                action.set_count(count)
                return count == 1

    @blocking(acancel)
    def cancel(self) -> None: ...

    async def _audited(self, verb: str, name: str = "") -> AuditedAction:
        redis, how = await self.app.connections.get_async_driver(), {"queue": self.queue, "signal": name}
        return AuditedAction(self.app, redis, f"workflow:{verb}", self.id, how, is_routine=True)

    async def aretry(self) -> None:
        """Start the nodes that have failed again, and what depends on them; what has succeeded stays.

        When its reply was lost, the call may be made again on this handle: the run is retried once.

        Raises:
            RunNotRetried: It has not failed, its jobs have not all ended yet, or it was undone.
        """
        async with await self._audited("retry"):
            await self.retry_unrecorded(self.app.connections)

    @blocking(aretry)
    def retry(self) -> None: ...

    async def retry_unrecorded(self, connections: AwaitableConnections) -> None:
        """Do what `retry` does. Whoever calls it records it."""
        with self._calls.token_for("retry") as token:
            reply = await self._reset(connections, 0, token)
            while reply > 0:
                reply = await self._reset(connections, reply, token)
        if reply < 0:
            raise RunNotRetried(f"run {self.id} {_NOT_RETRIED[reply]}")
        self._value = _MISSING

    async def _reset(self, connections: AwaitableConnections, first: int, token: CallToken) -> int:
        """Reset nodes for a retry, from `first` on. Returns where to go on, 0 at the end, or why it is not retried."""
        words = (first, token.text, token.is_repeated)
        return int((await self._apply(connections, "retry_once", *words))[0])

    async def asignal(self, name: str, value: object = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Give a value to the node that waits for a signal of that name.

        A signal that comes early is kept; each is consumed once.

        Args:
            id: What makes it the same signal when it is sent again. By default that is what is sent again on this
                handle when the reply was lost.

        Returns:
            False when the run has ended, is not known, or keeps a hundred signals of that name already.

        Raises:
            TypeError: The value has no JSON form, or the name is no text (a BadArguments).
        """
        text = encode_value(value, "the value of a signal").decode()
        if not isinstance(cast("object", name), str) or not _has_bytes(name):
            raise BadArguments(f"the name of a signal is {name!r}: give a text")
        with self._calls.token_for("signal", name, text) as token:
            async with await self._audited("signal", name) as action:
                words = (name, text, id or token.text)
                reply = int((await self._apply(self.app.connections, "signal", *words))[0])
                action.set_count(int(reply == 1))
                return reply == 1

    @blocking(asignal)
    def signal(self) -> None: ...

    async def agraph(self) -> RunGraph:
        """Return the graph of the run with the states of its nodes."""
        return await read_graph(
            await self.app.connections.get_async_driver(), self.app.queue(self.queue), self.id
        )

    @blocking(agraph)
    def graph(self) -> None: ...

    async def _apply(self, connections: AwaitableConnections, handler: str, *arguments: object) -> list[Any]:
        """Apply a record at the home of the run. Returns the replies."""
        redis = await connections.get_async_driver()
        advance = calls.advance(
            self.app.queue(self.queue),
            [calls.pack_record(handler, self.id, *arguments)],
            ttl=self.app.settings.results_ttl,
        )
        reply = await redis.perform(advance)
        if reply.problem:
            raise CeleryError(f"run {self.id}: {reply.problem}")
        return reply.replies


_NOT_RETRIED: Mapping[int, str] = {
    -1: "has not failed",
    -2: "is still stopping: its jobs have not all ended; try again",
    -3: "was undone: start a new one",
    -4: "is not known",
    -5: "is a part of another run: retry that",
}


def make_run_error(document: _RunDocument) -> TaskFailed:
    """Return the error for a run that did not succeed: that of the innermost job that failed."""
    kind = {"REVOKED": WorkflowCancelled, "EXPIRED": WorkflowExpired}.get(document.state, WorkflowFailed)
    if kind is not WorkflowFailed:
        return kind(
            job_id=document.id, task=document.task, type=kind.__name__, message=document.state.lower()
        )
    cause = bytes(document.cause)
    while (inner := read_inner(cause)) is not None:
        cause = inner
    job = read_document(cause) if cause != b"null" and b'"id"' in cause else None
    failure = (job.failure if job else None) or Failure(
        type=job.state.title() if job else "Failed",
        message=(job.reason if job else "") or "a node did not succeed",
    )
    member = parse_member_id(job.id) if job else None
    error = kind(
        job_id=job.id if job else document.id,
        task=(job.task if job else "") or document.task,
        type=failure.type,
        message=failure.message,
        error_args=failure.args,
        traceback=failure.traceback,
        attempt=job.attempt if job else 1,
        worker=job.worker if job else "",
        reason=f"workflow {document.task or document.id} failed",
    )
    error.run, error.node = document.id, member.node if member else None
    return error


def _has_bytes(text: str) -> bool:
    """Return whether a text can be sent: one with half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
