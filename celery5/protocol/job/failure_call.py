"""Make the job that is sent when another one is dead: `on_failure` of a job that is in no workflow."""

from typing import Any

import msgspec
from msgspec import Raw

from celery5.errors import Corrupt
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import (
    VERSION,
    Command,
    FailureCall,
    encode,
    read_command,
    try_read_document,
)
from celery5.protocol.job.states import get_lane
from celery5.protocol.workflows.status import StepFailure

MAX_MESSAGE = 2000
"""The most characters of an error that the job gets."""

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])


def make_failure_call(job: Job, *, takes_failures: bool) -> FailureCall:
    """Return what the message of a job says of the job that is sent when it is dead.

    Args:
        job: That job, without the failures.
        takes_failures: They are its first argument.
    """
    job = job.with_sent()
    fields = _FIELDS.decode(job.message)
    sent, expires = (msgspec.json.decode(fields.pop(name, Raw(b"null"))) for name in ("sent", "expires"))
    for name in ("v", "id", "trace", "headers"):
        fields.pop(name, None)
    return FailureCall(
        job.queue,
        Raw(encode(fields)),
        takes_failures=takes_failures,
        at=job.at,
        expires_in=None if expires is None else round(expires - sent, 3),
        unique_for=job.unique_for,
    )


def make_failure_job(job_id: str, message: bytes, document: bytes, *, now: float) -> Job:
    """Return the job that is sent for a dead one.

    Args:
        job_id: The id that it gets.
        message: The Command of the dead job.
        document: How it ended.
        now: Seconds since 1970.

    Raises:
        Corrupt: The message names none that can be sent.
    """
    command = read_command(message)
    call = command.on_failure
    if call is None:
        raise Corrupt("its message has no on_failure")
    try:
        fields: dict[str, Any] = _FIELDS.decode(call.command)
        if call.takes_failures:
            failure = _make_failure(command, document)
            fields["args"] = [[failure], *_LIST.decode(fields.get("args", b"[]"))]
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"its on_failure is no Command: {error}") from None
    if call.expires_in is not None:
        fields["expires"] = now + call.expires_in
    if command.trace:
        fields["trace"] = command.trace
    raw = encode({"v": VERSION, "id": job_id, **fields, "sent": now})
    sent = read_command(raw)
    return Job(
        job_id,
        sent.task,
        call.queue,
        raw,
        call.at,
        sent.ignore_result,
        sent.lock,
        call.unique_for,
        lane=get_lane(sent.priority),
    )


def _make_failure(command: Command, raw: bytes) -> StepFailure:
    document = try_read_document(raw)
    failure = None if document is None else document.failure
    return StepFailure(
        id=command.id,
        task=command.task,
        state="DEAD",
        type=failure.type if failure else "Dead",
        message=failure.message[:MAX_MESSAGE] if failure else "",
        reason=document.reason if document else "",
    )
