"""OpenTelemetry: spans and metrics of jobs by the semantic conventions for messaging, version 1.44.0.

It needs the package opentelemetry-api (extra `otel`), and an SDK that the application sets up.
"""

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple

from celery5.application import Application
from celery5.broker.keys import EVENTS
from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.middleware.jobs import IncomingJob, OutgoingJob, SendingBatch, SettlingBatch, get_raised
from celery5.middleware.middleware import Middleware
from celery5.middleware.outcomes import Dead, Retrying
from celery5.protocol.masking import get_masked_text, mask_lines
from celery5.runners.operations import MessageOperation

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM = "celery5"
DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds in seconds that the conventions give for both histograms."""
ATTEMPT_HEADER = "celery5-attempt"
"""The header with the trace context of the attempt before this one."""

TraceRelation = Literal["link", "parent"]
"""Whether the span of a job begins its own trace with a link to who sent it, or a child of that."""
Attributes = dict[str, Any]

_TRACEPARENT_LENGTH = 55
_SAMPLED_DIGITS = frozenset("13579bdfBDF")


def is_sampled(trace: str) -> bool:
    """Return whether the flag of a trace context says that it is recorded. True for what is no W3C traceparent."""
    return len(trace) != _TRACEPARENT_LENGTH or trace[-1] in _SAMPLED_DIGITS


def _has_flag(trace: str) -> bool:
    """Return whether this is a W3C traceparent that is recorded."""
    return len(trace) == _TRACEPARENT_LENGTH and trace[-1] in _SAMPLED_DIGITS


class OpenTelemetryMiddleware(Middleware):
    """Makes spans and metrics of what happens to jobs.

    Args:
        traces: Whether it makes spans.
        metrics: Whether it counts and measures.
        relation: How the span of a job belongs to who sent it.
        create_spans: Whether each job of a batch has its own span in the producer.
        tracer_provider: Default: the global one.
        meter_provider: Default: the global one.

    Raises:
        Misconfigured: The package opentelemetry-api is not installed.
    """

    def __init__(
        self,
        *,
        traces: bool = True,
        metrics: bool = True,
        relation: TraceRelation = "link",
        create_spans: bool = True,
        tracer_provider: Any = None,
        meter_provider: Any = None,
    ) -> None:
        try:
            self._trace: Any = import_module("opentelemetry.trace")
            self._propagate: Any = import_module("opentelemetry.propagate")
            self._context: Any = import_module("opentelemetry.context")
            meters: Any = import_module("opentelemetry.metrics")
        except ImportError as error:
            raise Misconfigured(
                f"tracing by OpenTelemetry needs a package: {describe_installation('otel')} ({error})"
            ) from None
        self._makes_spans = traces
        self._is_parent = relation == "parent"
        self._creates = create_spans
        self._tracer: Any = self._trace.get_tracer("celery5", None, tracer_provider, SCHEMA_URL)
        self._instruments = (
            _Instruments(meters.get_meter("celery5", "", meter_provider, SCHEMA_URL)) if metrics else None
        )
        self._app: Application | None = None
        self._by_queue: dict[str, Attributes] = {}

    def added(self, app: Application) -> None:
        """Look up the addresses of brokers in this application."""
        self._app = app
        self._by_queue.clear()

    # ---- producer

    def sending(self, batch: SendingBatch) -> AbstractContextManager[Any] | None:
        """Make a span for what is sent, and put its context into the messages."""
        if not batch.jobs:
            return None
        if not self._makes_spans:
            return self._measure_sending(batch) if self._instruments else None
        current = self._trace.get_current_span().get_span_context()
        if current.is_valid and not current.trace_flags.sampled:
            for job in batch.jobs:
                self._propagate.inject(job.headers)
            return self._measure_sending(batch) if self._instruments else None
        if not current.is_valid and not is_sampled(batch.jobs[0].headers.get("traceparent", "")):
            return self._measure_sending(batch) if self._instruments else None
        return self._trace_sending(batch, has_current=current.is_valid)

    @contextmanager
    def _trace_sending(self, batch: SendingBatch, *, has_current: bool) -> Generator[None, None, None]:
        jobs, kinds = batch.jobs, self._trace.SpanKind
        parent = None if has_current else self._extract(jobs[0].headers)
        links: list[Any] = []
        creates = self._creates and len(jobs) > 1
        if creates:
            links = [self._create(job, has_current=has_current) for job in jobs]
        span = self._tracer.start_span(
            _name("send", jobs),
            context=parent,
            kind=kinds.CLIENT if creates else kinds.PRODUCER,
            attributes=self._describe_sending(jobs),
            links=links,
        )
        if not creates:
            context = self._trace.set_span_in_context(span, parent)
            for job in jobs:
                self._propagate.inject(job.headers, context)
        with (
            self._trace.use_span(
                span, end_on_exit=True, record_exception=False, set_status_on_exception=False
            ),
            self._measure_sending(batch),
        ):
            yield
            if batch.error is not None:
                self._set_error(span, type(batch.error).__qualname__, str(batch.error))

    def _create(self, job: OutgoingJob, *, has_current: bool) -> Any:
        """Make the span of one job of a batch; return a link to it."""
        parent = None if has_current else self._extract(job.headers)
        attributes = {
            **self._describe_queue(job.queue), "messaging.operation.name": "create",
            "messaging.operation.type": "create", **_describe_message(job.id, job.run_id, job.size),
        }  # fmt: skip
        span = self._tracer.start_span(
            f"create {job.queue}", context=parent, kind=self._trace.SpanKind.PRODUCER, attributes=attributes
        )
        self._propagate.inject(job.headers, self._trace.set_span_in_context(span, parent))
        span.end()
        return self._trace.Link(span.get_span_context())

    def _describe_sending(self, jobs: Sequence[OutgoingJob]) -> Attributes:
        attributes = {
            **self._describe_queue(_get_queue(jobs)),
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
        }
        if len(jobs) > 1:
            return {**attributes, "messaging.batch.message_count": len(jobs)}
        return {**attributes, **_describe_message(jobs[0].id, jobs[0].run_id, jobs[0].size)}

    @contextmanager
    def _measure_sending(self, batch: SendingBatch) -> Generator[None, None, None]:
        began = time.perf_counter()
        yield
        if self._instruments is None:
            return
        error = {} if batch.error is None else {"error.type": type(batch.error).__qualname__}
        attributes = {"messaging.operation.name": "send", "messaging.operation.type": "send", **error}
        self._instruments.operation_duration.record(
            time.perf_counter() - began, {**self._describe_queue(_get_queue(batch.jobs)), **attributes}
        )
        del attributes["messaging.operation.type"]
        for queue, count in Counter(job.queue for job in batch.jobs).items():
            self._instruments.sent_messages.add(count, {**self._describe_queue(queue), **attributes})

    # ---- worker

    def received(self, jobs: Sequence[IncomingJob]) -> None:
        """Count jobs that were read, and make a span for each queue with sampled ones."""
        by_queue: dict[str, list[IncomingJob]] = {}
        for job in jobs:
            by_queue.setdefault(job.queue, []).append(job)
        for queue, of_queue in by_queue.items():
            if self._instruments is not None:
                attributes = {**self._describe_queue(queue), "messaging.operation.name": "receive"}
                self._instruments.consumed_messages.add(len(of_queue), attributes)
            span = self._start_batch("receive", "receive", queue, of_queue, of_queue[0].received)
            if span is not None:
                span.end()

    def running(self, job: IncomingJob) -> AbstractContextManager[Any] | None:
        """Make a span around a job, unless the flag of its trace says no: then nothing is allocated for it."""
        if self._makes_spans and is_sampled(job.trace):
            return self._trace_running(job)
        return self._measure_running(job) if self._instruments else None

    @contextmanager
    def _trace_running(self, job: IncomingJob) -> Generator[None, None, None]:
        trace = self._trace
        parent = self._extract(job.headers)
        creation = trace.get_current_span(parent).get_span_context()
        links: list[Any] = []
        if not self._is_parent:
            links = [trace.Link(creation)] if creation.is_valid else []
            parent = trace.set_span_in_context(trace.INVALID_SPAN, parent)  # the baggage stays
        if (previous := self._get_previous(job)) is not None:
            links.append(trace.Link(previous, {"celery5.attempt": job.attempt - 1}))
        span = self._tracer.start_span(
            f"process {job.queue}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes=self._describe_running(job),
            links=links,
        )
        # Attached whole: the baggage belongs to it.
        token = self._context.attach(trace.set_span_in_context(span, parent))
        try:
            with self._measure_running(job):
                yield
            self._end_running(job, span)
        finally:
            self._context.detach(token)
            span.end()

    def _end_running(self, job: IncomingJob, span: Any) -> None:
        outcome = job.outcome
        span.set_attribute("celery5.outcome", type(outcome).__name__.lower())
        if isinstance(outcome, Dead) or (isinstance(outcome, Retrying) and not outcome.is_requested):
            self._set_error(span, outcome.error.type, outcome.error.message)
            if (raised := get_raised(job)) is not None:
                masked = {
                    "exception.message": get_masked_text(raised),
                    "exception.stacktrace": mask_lines(outcome.error.traceback),
                }
                span.record_exception(raised, attributes=masked)
        if isinstance(outcome, Retrying):
            made = span.get_span_context()
            job.carry(
                {ATTEMPT_HEADER: f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"}
            )

    def _get_previous(self, job: IncomingJob) -> Any:
        """Return the context of the attempt before this one; None when there was none."""
        previous = job.headers.get(ATTEMPT_HEADER) if job.attempt > 1 else None
        if previous is None:
            return None
        context = self._extract({"traceparent": previous})
        found = self._trace.get_current_span(context).get_span_context()
        return found if found.is_valid else None

    def _describe_running(self, job: IncomingJob) -> Attributes:
        return {
            **self._describe_queue(job.queue),
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.client.id": job.worker,
            "celery5.task": job.task,
            "celery5.attempt": job.attempt,
            **_describe_message(job.id, job.run_id, job.size),
        }

    @contextmanager
    def _measure_running(self, job: IncomingJob) -> Generator[None, None, None]:
        began = time.perf_counter()
        yield
        if self._instruments is None:
            return
        attributes = {**self._describe_queue(job.queue), "messaging.operation.name": "process"}
        if isinstance(job.outcome, Retrying | Dead):
            attributes["error.type"] = job.outcome.error.type
        self._instruments.process_duration.record(time.perf_counter() - began, attributes)

    @contextmanager
    def _settle(self, batch: SettlingBatch, span: Any) -> Generator[None, None, None]:
        began = time.perf_counter()
        yield
        if self._instruments is not None:
            attributes = {
                **self._describe_queue(batch.queue),
                "messaging.operation.name": "ack",
                "messaging.operation.type": "settle",
            }
            if batch.error is not None:
                attributes["error.type"] = type(batch.error).__qualname__
            self._instruments.operation_duration.record(time.perf_counter() - began, attributes)
        if span is not None:
            if batch.error is not None:
                self._set_error(span, type(batch.error).__qualname__, str(batch.error))
            span.end()

    def settling(self, batch: SettlingBatch) -> AbstractContextManager[Any] | None:
        """Make a span for a settlement, if it has sampled jobs."""
        span = self._start_batch("ack", "settle", batch.queue, batch.jobs, None)
        return self._settle(batch, span) if span is not None or self._instruments is not None else None

    # ---- records, documents, events

    def operating(self, operation: MessageOperation) -> AbstractContextManager[Any] | None:
        """Make a span for what a component does with messages besides jobs, unless the flags of their traces say no."""
        if not self._makes_spans:
            return None
        if operation.name == "send":
            current = self._trace.get_current_span().get_span_context()
            if current.is_valid and not current.trace_flags.sampled:
                for headers in operation.headers:
                    self._propagate.inject(headers)
                return None
        elif operation.headers and not any(map(_is_recorded, operation.headers)):
            return None
        return self._trace_operation(operation)

    @contextmanager
    def _trace_operation(self, operation: MessageOperation) -> Generator[None, None, None]:
        trace, verb = self._trace, _OPERATIONS[operation.name]
        parent, links = None, list[Any]()
        if operation.name != "send":
            contexts = [self._extract(headers) for headers in operation.headers if _is_recorded(headers)]
            found = [trace.get_current_span(context).get_span_context() for context in contexts]
            if self._is_parent and len(contexts) == 1:
                parent = contexts[0]
            else:
                links = [trace.Link(span_context) for span_context in found if span_context.is_valid]
                parent = self._context.Context() if operation.headers else None
        attributes: Attributes = {
            "messaging.system": SYSTEM, "messaging.destination.name": operation.resource,
            "messaging.operation.name": verb.name, "messaging.operation.type": verb.kind,
            "messaging.batch.message_count": operation.count, "celery5.target": operation.target,
        }  # fmt: skip
        span = self._tracer.start_span(
            f"{verb.name} {operation.resource}",
            context=parent,
            kind=getattr(trace.SpanKind, verb.span_kind),
            attributes=attributes,
            links=links,
        )
        if operation.name == "send":
            for headers in operation.headers:
                self._propagate.inject(headers, trace.set_span_in_context(span))
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield
            if operation.error is not None:
                self._set_error(span, type(operation.error).__qualname__, str(operation.error))

    def _start_batch(
        self, name: str, kind: str, queue: str, jobs: Sequence[IncomingJob], began: float | None
    ) -> Any:
        """Start the span of a step with several jobs, linked to those that are sampled; None if none is."""
        if not self._makes_spans or not any(_has_flag(job.trace) for job in jobs):
            return None
        contexts = [
            self._trace.get_current_span(self._extract(job.headers)).get_span_context()
            for job in jobs
            if _has_flag(job.trace)
        ]
        attributes = {
            **self._describe_queue(queue), "messaging.operation.name": name, "messaging.operation.type": kind,
            "messaging.batch.message_count": len(jobs), "messaging.client.id": jobs[0].worker,
        }  # fmt: skip
        return self._tracer.start_span(
            f"{name} {queue}",
            context=self._context.Context(),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes,
            links=[self._trace.Link(context) for context in contexts if context.is_valid],
            start_time=None if began is None else int(began * 1e9),
        )

    # ---- both

    def _extract(self, headers: Mapping[str, str]) -> Any:
        """Return a context with the trace and the baggage of a message, and nothing of this process."""
        return self._propagate.extract(headers, self._context.Context())

    def _set_error(self, span: Any, error_type: str, message: str) -> None:
        span.set_attribute("error.type", error_type)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, mask_lines(message)))

    def _describe_queue(self, queue: str) -> Attributes:
        """Return the attributes that all spans and metrics of a queue have; '' is several queues."""
        attributes = self._by_queue.get(queue)
        if attributes is None:
            attributes = self._by_queue[queue] = {"messaging.system": SYSTEM, **self._find_server(queue)}
            if queue:
                attributes["messaging.destination.name"] = queue
        return attributes

    def _find_server(self, queue: str) -> Attributes:
        if self._app is None or not queue:
            return {}
        brokers = self._app.brokers
        broker = brokers.broker_of_queue(EVENTS if queue == "events" else queue)
        endpoint = brokers.get(broker).endpoint
        return get_server_attributes(endpoint)


def get_server_attributes(endpoint: Any) -> Attributes:
    """Return the address of a broker: of a unix socket its path, without a port."""
    if endpoint.path:
        return {"server.address": endpoint.path}
    return {"server.address": endpoint.host, "server.port": endpoint.port}


def _get_queue(jobs: Sequence[OutgoingJob]) -> str:
    """Return the queue that all jobs go to; '' if they go to several."""
    first = jobs[0].queue
    return first if all(job.queue == first for job in jobs) else ""


def _name(operation: str, jobs: Sequence[OutgoingJob]) -> str:
    return f"{operation} {_get_queue(jobs)}".rstrip()


def _describe_message(message_id: str, run_id: str, size: int) -> Attributes:
    attributes: Attributes = {"messaging.message.id": message_id}
    if run_id:
        attributes["messaging.message.conversation_id"] = run_id
    if size:
        attributes["messaging.message.body.size"] = size
    return attributes


class _Verb(NamedTuple):
    """What the conventions call an operation."""

    name: str
    kind: str
    span_kind: str


_OPERATIONS = {
    "send": _Verb("send", "send", "PRODUCER"),
    "process": _Verb("process", "process", "CONSUMER"),
    "commit": _Verb("commit", "settle", "CLIENT"),
    "deliver": _Verb("deliver", "send", "CLIENT"),
    "publish": _Verb("publish", "send", "CLIENT"),
}


def _is_recorded(headers: Mapping[str, str]) -> bool:
    """Return whether the trace of a message is recorded; True for one without a trace."""
    return is_sampled(headers.get("traceparent", ""))


class _Instruments:
    """The metrics of the conventions."""

    def __init__(self, meter: Any) -> None:
        self.operation_duration = meter.create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            description="Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=list(DURATION_BOUNDS),
        )
        self.process_duration = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=list(DURATION_BOUNDS),
        )
        self.sent_messages = meter.create_counter(
            "messaging.client.sent.messages",
            unit="{message}",
            description="Number of messages producer attempted to send to the broker.",
        )
        self.consumed_messages = meter.create_counter(
            "messaging.client.consumed.messages",
            unit="{message}",
            description="Number of messages that were delivered to the application.",
        )
