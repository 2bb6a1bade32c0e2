"""Frames: the messages between a producer and the Publisher daemon, and their encoding.

A frame is four bytes, the length of the rest, most significant first, then one message in MessagePack. A
connection begins with `ClientHello` and `Welcome`. Then each `PublishRequest` gets one `PublishReply`, in
order, with an answer for each of its groups. A group is what one call of a producer sent; it is stored whole or
not at all. A `ConnectionRefusal` in place of any answer ends the connection. Nothing is acknowledged before it
is stored.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from celery5.errors import Corrupt
from celery5.protocol.job.job import Job

VERSION = 1
HEADER_BYTES = 4
"""The bytes of a frame's length."""
FRAME_OVERHEAD_BYTES = 1024 * 1024
"""Bytes of a frame beyond those of its jobs' messages, such as ids and queues."""
MAX_WAITING_LIST_NAME = 2000
"""The most characters in the name of a waiting list."""
MESSAGES_PER_FRAME = 500
"""The most jobs that a client puts in one frame."""
BYTES_PER_TRIP = 4 * 1024 * 1024
"""The most bytes of messages that a client puts in one frame, unless one message alone has more."""
MAX_GROUPS = MESSAGES_PER_FRAME
"""The most groups in one frame: no client sends an empty one."""
MAX_MESSAGES = 50_000
"""The most jobs in one frame, and in one group, which is what one call sends."""
SMALL_FRAME_BYTES = 64 * 1024
"""The most bytes of a frame that is decoded without counting its contents first."""
MAX_HELLO_BYTES = 4096
"""The most bytes of a client's first message."""

RefusalCode = Literal["full", "too-large", "unfit", "unavailable"]


class JobMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job for the daemon: the fields of `celery5.protocol.job.job.Job` that say where and when its message goes."""

    id: str
    queue: str
    message: bytes
    at: str = ""
    lane: str = ""
    waiting_list: str = ""
    expires: str = ""


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The client's first message: the application whose jobs it will send."""

    app: str
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The daemon's reply to `ClientHello`."""

    version: int = VERSION
    waiting: int = 0  # messages in its backlogs
    trouble: str = ""  # why the backlogs cannot be written
    outage: str = ""  # why nothing is published now


class PublishRequest(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """Jobs to publish, in groups."""

    groups: Annotated[tuple[tuple[JobMessage, ...], ...], Meta(max_length=MAX_GROUPS)]


class GroupReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer for one group: stored when `code` is empty."""

    code: RefusalCode | Literal[""] = ""
    why: str = ""  # for people
    # False when it is only in the daemon's memory, since the backlog could not be written.
    firmly: bool = True
    maybe: bool = False  # refused, but some of it may be stored


class PublishReply(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The daemon's answer to a `PublishRequest`."""

    answers: tuple[GroupReply, ...]


class ConnectionRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The daemon's last message: why it closes this connection."""

    code: RefusalCode
    why: str


ClientMessage = ClientHello | PublishRequest
DaemonMessage = Welcome | PublishReply | ConnectionRefusal


class _Groups(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """A `PublishRequest` of which only the number of groups has been read."""

    groups: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_GROUPS)]


_JOB_MESSAGE_DECODER: msgspec.msgpack.Decoder[JobMessage] = msgspec.msgpack.Decoder(JobMessage)
_ENCODER = msgspec.msgpack.Encoder()
_CLIENT_DECODER: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_COUNTING_DECODER: msgspec.msgpack.Decoder[ClientHello | _Groups] = msgspec.msgpack.Decoder(
    ClientHello | _Groups
)
_GROUP_DECODER: msgspec.msgpack.Decoder[tuple[JobMessage, ...]] = msgspec.msgpack.Decoder(
    tuple[JobMessage, ...]
)
_DAEMON_DECODER: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
_AT = re.compile(r"(\+?[0-9]{1,15})?\Z")
_EXPIRES = re.compile(r"[0-9]{0,15}\Z")
_QUEUE = re.compile(r"(\{events\}|[^\s{},]{1,200})\Z")  # the name of events is no valid task name


class FrameTooLarge(Corrupt):
    """A frame declares more bytes than the limit."""


class FrameReader:
    """Splits received bytes into frames. A frame of more than `limit` bytes is refused by its header alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._received = bytearray()

    def __len__(self) -> int:
        return len(self._received)

    def set_limit(self, limit: int) -> None:
        """Refuse frames of more than this many bytes from now on."""
        self._limit = limit

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._received += data

    def next_frame(self) -> bytes | None:
        """Return the next complete frame; None while there is none. Raises FrameTooLarge."""
        if len(self._received) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._received[:HEADER_BYTES])
        if size > self._limit:
            raise FrameTooLarge(f"a frame of {size} bytes: at most {self._limit} are taken")
        if len(self._received) < HEADER_BYTES + size:
            return None
        frame = bytes(self._received[HEADER_BYTES : HEADER_BYTES + size])
        del self._received[: HEADER_BYTES + size]
        return frame


def encode_frame(message: ClientMessage | DaemonMessage) -> bytes:
    """Return a message as a frame."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEADER_BYTES) + body


def decode_client_message(body: bytes) -> ClientMessage:
    """Return a client's message. Raises Corrupt."""
    try:
        message = _CLIENT_DECODER.decode(body) if len(body) <= SMALL_FRAME_BYTES else _decode_large(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"not a message of a client: {error}") from None
    if isinstance(message, PublishRequest) and not all(message.groups):
        raise Corrupt("not a message of a client: a group without a message")
    return message


def _decode_large(body: bytes) -> ClientMessage:
    """Decode a large frame, counting groups and jobs before any is read. Raises ValueError.

    The smallest group has one byte and the smallest job five, so a frame could hold a million. Decoding those
    would take seconds and hundreds of megabytes.
    """
    message = _COUNTING_DECODER.decode(body)
    if isinstance(message, ClientHello):
        return message
    if sum(map(_count_elements, message.groups)) > MAX_MESSAGES:
        raise ValueError(f"a frame may have at most {MAX_MESSAGES} messages")
    return PublishRequest(tuple([_GROUP_DECODER.decode(group) for group in message.groups]))


def _count_elements(raw: msgspec.Raw) -> int:
    """Return the number of elements in the header of a MessagePack array. Raises ValueError if it is no array."""
    head = bytes(memoryview(raw)[:5])
    if head[0] >> 4 == 0x9:
        return head[0] & 0xF
    size = {0xDC: 2, 0xDD: 4}.get(head[0])
    if size is None:
        raise ValueError("a group is no array")
    return int.from_bytes(head[1 : 1 + size])


def decode_daemon_message(body: bytes) -> DaemonMessage:
    """Return a message of the daemon. Raises Corrupt."""
    try:
        return _DAEMON_DECODER.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"not a message of a Publisher daemon: {error}") from None


def get_frame_limit(message_limit: int) -> int:
    """Return the most bytes of a frame where messages may have `message_limit` bytes."""
    return max(BYTES_PER_TRIP, message_limit) + FRAME_OVERHEAD_BYTES


def find_fault(message: JobMessage, message_limit: int) -> GroupReply | None:
    """Return why a job cannot be accepted; None if it can. What is refused here would never be valid in Redis."""
    if len(message.message) > message_limit:
        return GroupReply(
            "too-large",
            f"{message.id}: {len(message.message)} bytes are over the daemon's limit of {message_limit}: raise its "
            "message_limit, too",
        )
    invalid = (
        "id" if not 0 < len(message.id) <= 200
        else "queue" if not _QUEUE.match(message.queue)
        else "time" if not _AT.match(message.at)
        else "lane" if message.lane not in ("", "h", "l")
        else "waiting list" if len(message.waiting_list) > MAX_WAITING_LIST_NAME
        else "expiry" if not _EXPIRES.match(message.expires)
        else ""
    )  # fmt: skip
    return GroupReply("unfit", f"{message.id[:200]!r} has an invalid {invalid}") if invalid else None


def encode_job_message(message: JobMessage) -> bytes:
    """Return a job as bytes for the backlog."""
    return _ENCODER.encode(message)


def decode_job_message(raw: bytes) -> JobMessage:
    """Return a job from the backlog. Raises Corrupt."""
    try:
        return _JOB_MESSAGE_DECODER.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"not a job message: {error}") from None


def make_job_message(job: Job) -> JobMessage:
    """Return a job as it is sent to the daemon."""
    job = job.with_sent()
    return JobMessage(job.id, job.queue, job.message, job.at, job.lane, job.waiting_list, job.expires)


def make_job(message: JobMessage, at: str) -> Job:
    """Return the job to be published. `at` is the current value of a countdown."""
    return Job(
        message.id,
        "",
        message.queue,
        message.message,
        at,
        lane=message.lane,
        waiting_list=message.waiting_list,
        expires=message.expires,
    )


def get_due_time(message: JobMessage, now_ms: int) -> int | None:
    """Return when a job sent with a countdown is due: in ms since 1970, by the caller's clock; else None."""
    return now_ms + int(message.at[1:]) if message.at.startswith("+") else None


def split_into_frames(groups: Sequence[tuple[JobMessage, ...]]) -> Iterator[list[int]]:
    """Yield the indexes of the groups for each frame. A group that exceeds a frame's size gets its own."""
    part: list[int] = []
    count = size = 0
    for number, group in enumerate(groups):
        more = sum(len(message.message) for message in group)
        if part and (count + len(group) > MESSAGES_PER_FRAME or size + more > BYTES_PER_TRIP):
            yield part
            part, count, size = [], 0, 0
        part.append(number)
        count += len(group)
        size += more
    if part:
        yield part
