"""Parcels: the words between a producer and the Publisher daemon, and the frames they travel in (C79, C81).

A frame is four bytes, the length of what follows, most significant first, then one word in MessagePack. A connection
begins with the client's `Hello` and the daemon's `Welcome`. Then each `Hand` gets one `Told`, in order, with an answer
for each of its groups: a group is what one call of a producer sent, and is stored whole or not at all. A `Refused` in
place of any answer is the last word on the connection. Nothing is acknowledged before it is stored.
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
"""Bytes of a frame's length."""
FRAME_OVERHEAD_BYTES = 1024 * 1024
"""Bytes of a frame beyond those of the messages in it: their ids, their queues."""
MAX_WAITING_LIST_NAME = 2000
"""Characters that the name of a line may have."""
MESSAGES_PER_FRAME = 500
"""Messages in one frame."""
BYTES_PER_TRIP = 4 * 1024 * 1024
"""Bytes of messages in one frame, unless one message alone has more."""
MAX_GROUPS = MESSAGES_PER_FRAME
"""The most groups in one frame: no client sends an empty one."""
MAX_MESSAGES = 50_000
"""The most messages in one frame, and in one group, which is what one call sends."""
SMALL_FRAME_BYTES = 64 * 1024
"""The most bytes of a frame that is read without counting its contents first."""
MAX_HELLO_BYTES = 4096
"""The most bytes of a client's first message."""

RefusalCode = Literal["full", "too-large", "unfit", "unavailable"]


class JobMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job for the daemon: what `celery5.protocol.job.Job` says of where its message is to go, and when."""

    id: str
    queue: str
    message: bytes
    at: str = ""
    lane: str = ""
    line: str = ""
    expires: str = ""


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The client's first word: whose jobs it will hand over."""

    app: str
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The daemon's: it publishes for that application; how many messages wait in its backlogs, and why it cannot write
    them, if it cannot."""

    version: int = VERSION
    waiting: int = 0
    trouble: str = ""


class PublishRequest(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """Jobs to be published, in groups."""

    groups: Annotated[tuple[tuple[JobMessage, ...], ...], Meta(max_length=MAX_GROUPS)]


class GroupReply(msgspec.Struct, frozen=True, array_like=True):
    """What became of one group: stored when there is no `code`. `firmly` is false when it is in the memory of the
    daemon only, because the backlog could not be written (C78). `why` is for people; with `maybe` some of it may be
    stored although it was refused."""

    code: RefusalCode | Literal[""] = ""
    why: str = ""
    firmly: bool = True
    maybe: bool = False


class PublishReply(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The daemon's answer to a `Hand`."""

    answers: tuple[GroupReply, ...]


class ConnectionRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The daemon's last word: why it closes this connection."""

    code: RefusalCode
    why: str


ClientMessage = ClientHello | PublishRequest
DaemonMessage = Welcome | PublishReply | ConnectionRefusal


class _Groups(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """A `Hand` of which only the number of groups has been read."""

    groups: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_GROUPS)]


_PARCEL: msgspec.msgpack.Decoder[JobMessage] = msgspec.msgpack.Decoder(JobMessage)
_ENCODER = msgspec.msgpack.Encoder()
_OF_CLIENT: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_COUNTED: msgspec.msgpack.Decoder[ClientHello | _Groups] = msgspec.msgpack.Decoder(ClientHello | _Groups)
_GROUP: msgspec.msgpack.Decoder[tuple[JobMessage, ...]] = msgspec.msgpack.Decoder(tuple[JobMessage, ...])
_OF_DAEMON: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
_AT = re.compile(r"(\+?[0-9]{1,15})?\Z")
_EXPIRES = re.compile(r"[0-9]{0,15}\Z")
_QUEUE = re.compile(r"(\{events\}|[^\s{},]{1,200})\Z")  # the events' own name is no task's


class FrameTooLarge(Corrupt):
    """A frame says that it is larger than is taken."""


class FrameReader:
    """Takes bytes as they come, gives whole frames. A frame of more than `limit` bytes is refused by its head alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = bytearray()

    def __len__(self) -> int:
        return len(self._kept)

    def feed(self, data: bytes) -> None:
        """More has come."""
        self._kept += data

    def next_frame(self) -> bytes | None:
        """The next whole frame, None while it is not there. Raises TooLarge."""
        if len(self._kept) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._kept[:HEADER_BYTES])
        if size > self.limit:
            raise FrameTooLarge(f"a frame of {size} bytes: at most {self.limit} are taken")
        if len(self._kept) < HEADER_BYTES + size:
            return None
        frame = bytes(self._kept[HEADER_BYTES : HEADER_BYTES + size])
        del self._kept[: HEADER_BYTES + size]
        return frame


def encode_frame(message: ClientMessage | DaemonMessage) -> bytes:
    """A word as it is sent."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEADER_BYTES) + body


def decode_client_message(body: bytes) -> ClientMessage:
    """What a client says. Raises Corrupt."""
    try:
        word = _OF_CLIENT.decode(body) if len(body) <= SMALL_FRAME_BYTES else _large(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a word of a client: {error}") from None
    if isinstance(word, PublishRequest) and not all(word.groups):
        raise Corrupt("not a word of a client: a group without a message")
    return word


def _large(body: bytes) -> ClientMessage:
    """A word in a large frame. Groups and messages are counted before any of them is read: the smallest ones have one
    byte and five, and a frame has room for a million, which would take seconds and hundreds of megabytes. Raises
    ValueError."""
    word = _COUNTED.decode(body)
    if isinstance(word, ClientHello):
        return word
    if sum(map(_elements, word.groups)) > MAX_MESSAGES:
        raise ValueError(f"a frame may have at most {MAX_MESSAGES} messages")
    return PublishRequest(tuple([_GROUP.decode(each) for each in word.groups]))


def _elements(raw: msgspec.Raw) -> int:
    """Return the number of elements in the header of a MessagePack array. Raises ValueError if it is no array."""
    head = bytes(memoryview(raw)[:5])
    if head[0] >> 4 == 0x9:
        return head[0] & 0xF
    size = {0xDC: 2, 0xDD: 4}.get(head[0])
    if size is None:
        raise ValueError("a group is no array")
    return int.from_bytes(head[1 : 1 + size])


def decode_daemon_message(body: bytes) -> DaemonMessage:
    """What the daemon says. Raises Corrupt."""
    try:
        return _OF_DAEMON.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a word of a Publisher daemon: {error}") from None


def get_frame_limit(message_limit: int) -> int:
    """The largest frame that is taken where messages may have `message_limit` bytes."""
    return max(BYTES_PER_TRIP, message_limit) + FRAME_OVERHEAD_BYTES


def find_fault(message: JobMessage, message_limit: int) -> GroupReply | None:
    """Why a parcel cannot be taken, if it cannot: what is wrong here would be wrong in Redis for ever."""
    if len(message.message) > message_limit:
        return GroupReply(
            "too-large",
            f"{message.id}: {len(message.message)} bytes are over the daemon's limit of {message_limit}: raise its "
            "message_limit, too",
        )
    wrong = (
        "id" if not 0 < len(message.id) <= 200
        else "queue" if not _QUEUE.match(message.queue)
        else "time" if not _AT.match(message.at)
        else "lane" if message.lane not in ("", "h", "l")
        else "line" if len(message.line) > MAX_WAITING_LIST_NAME
        else "expiry" if not _EXPIRES.match(message.expires)
        else ""
    )  # fmt: skip
    return GroupReply("unfit", f"{message.id[:200]!r} has no {wrong} that could be one") if wrong else None


def encode_job_message(message: JobMessage) -> bytes:
    """A parcel, to be kept."""
    return _ENCODER.encode(message)


def decode_job_message(raw: bytes) -> JobMessage:
    """A parcel that was kept. Raises Corrupt."""
    try:
        return _PARCEL.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a parcel: {error}") from None


def make_job_message(job: Job) -> JobMessage:
    """A job as it is handed over."""
    return JobMessage(job.id, job.queue, job.message, job.at, job.lane, job.line, job.expires)


def make_job(message: JobMessage, at: str) -> Job:
    """The job again, to be published; a time from now is another one `at` each moment."""
    return Job(
        message.id,
        "",
        message.queue,
        message.message,
        at,
        lane=message.lane,
        line=message.line,
        expires=message.expires,
    )


def get_due_time(message: JobMessage, now_ms: int) -> int | None:
    """When a job falls due that was sent with a countdown: in ms since 1970, by the clock of whoever asks."""
    return now_ms + int(message.at[1:]) if message.at.startswith("+") else None


def split_into_frames(groups: Sequence[tuple[JobMessage, ...]]) -> Iterator[list[int]]:
    """The groups, by their numbers, as many as go in one frame; one that alone is more than that goes alone."""
    part: list[int] = []
    count = size = 0
    for number, group in enumerate(groups):
        more = sum(len(each.message) for each in group)
        if part and (count + len(group) > MESSAGES_PER_FRAME or size + more > BYTES_PER_TRIP):
            yield part
            part, count, size = [], 0, 0
        part.append(number)
        count += len(group)
        size += more
    if part:
        yield part
