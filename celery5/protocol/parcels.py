"""Parcels: the words between a producer and the Publisher daemon, and the frames they travel in (C79, C81).

Floor: protocol. Pure. Reads: nothing. Writes: nothing.

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
from celery5.protocol.job import Job

VERSION = 1
HEAD = 4
"""Bytes of a frame's length."""
ROOM = 1024 * 1024
"""Bytes of a frame beyond those of the messages in it: their ids, their queues."""
LINE = 2000
"""Characters that the name of a line may have."""
PORTION = 500
"""Messages in one frame."""
PORTION_BYTES = 4 * 1024 * 1024
"""Bytes of messages in one frame, unless one message alone has more."""
MOST_GROUPS = PORTION
"""The most groups in one frame: no client sends an empty one."""
MOST_PARCELS = 50_000
"""The most messages in one frame, and in one group, which is what one call sends."""
SMALL = 64 * 1024
"""The most bytes of a frame that is read without counting its contents first."""
HELLO_BYTES = 4096
"""The most bytes of a client's first message."""

Code = Literal["full", "too-large", "unfit", "unavailable"]


class Parcel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job for the daemon: what `celery5.protocol.job.Job` says of where its message is to go, and when."""

    id: str
    queue: str
    message: bytes
    at: str = ""
    lane: str = ""
    line: str = ""
    expires: str = ""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The client's first word: whose jobs it will hand over."""

    app: str
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The daemon's: it publishes for that application; how many messages wait in its backlogs, and why it cannot write
    them, if it cannot."""

    version: int = VERSION
    waiting: int = 0
    trouble: str = ""


class Hand(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """Jobs to be published, in groups."""

    groups: Annotated[tuple[tuple[Parcel, ...], ...], Meta(max_length=MOST_GROUPS)]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of one group: stored when there is no `code`. `firmly` is false when it is in the memory of the
    daemon only, because the backlog could not be written (C78). `why` is for people; with `maybe` some of it may be
    stored although it was refused."""

    code: Code | Literal[""] = ""
    why: str = ""
    firmly: bool = True
    maybe: bool = False


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The daemon's answer to a `Hand`."""

    answers: tuple[Answer, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The daemon's last word: why it closes this connection."""

    code: Code
    why: str


FromClient = Hello | Hand
FromDaemon = Welcome | Told | Refused


class _Groups(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """A `Hand` of which only the number of groups has been read."""

    groups: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MOST_GROUPS)]


_PARCEL: msgspec.msgpack.Decoder[Parcel] = msgspec.msgpack.Decoder(Parcel)
_ENCODER = msgspec.msgpack.Encoder()
_OF_CLIENT: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_COUNTED: msgspec.msgpack.Decoder[Hello | _Groups] = msgspec.msgpack.Decoder(Hello | _Groups)
_GROUP: msgspec.msgpack.Decoder[tuple[Parcel, ...]] = msgspec.msgpack.Decoder(tuple[Parcel, ...])
_OF_DAEMON: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
_AT = re.compile(r"(\+?[0-9]{1,15})?\Z")
_EXPIRES = re.compile(r"[0-9]{0,15}\Z")
_QUEUE = re.compile(r"(\{events\}|[^\s{},]{1,200})\Z")  # the events' own name is no task's


class TooLarge(Corrupt):
    """A frame says that it is larger than is taken."""


class Frames:
    """Takes bytes as they come, gives whole frames. A frame of more than `limit` bytes is refused by its head alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = bytearray()

    def __len__(self) -> int:
        return len(self._kept)

    def feed(self, data: bytes) -> None:
        """More has come."""
        self._kept += data

    def next(self) -> bytes | None:
        """The next whole frame, None while it is not there. Raises TooLarge."""
        if len(self._kept) < HEAD:
            return None
        size = int.from_bytes(self._kept[:HEAD])
        if size > self.limit:
            raise TooLarge(f"a frame of {size} bytes: at most {self.limit} are taken")
        if len(self._kept) < HEAD + size:
            return None
        frame = bytes(self._kept[HEAD : HEAD + size])
        del self._kept[: HEAD + size]
        return frame


def frame(word: FromClient | FromDaemon) -> bytes:
    """A word as it is sent."""
    body = _ENCODER.encode(word)
    return len(body).to_bytes(HEAD) + body


def client_word(body: bytes) -> FromClient:
    """What a client says. Raises Corrupt."""
    try:
        word = _OF_CLIENT.decode(body) if len(body) <= SMALL else _large(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a word of a client: {error}") from None
    if isinstance(word, Hand) and not all(word.groups):
        raise Corrupt("not a word of a client: a group without a message")
    return word


def _large(body: bytes) -> FromClient:
    """A word in a large frame. Groups and messages are counted before any of them is read: the smallest ones have one
    byte and five, and a frame has room for a million, which would take seconds and hundreds of megabytes. Raises
    ValueError."""
    word = _COUNTED.decode(body)
    if isinstance(word, Hello):
        return word
    if sum(map(_elements, word.groups)) > MOST_PARCELS:
        raise ValueError(f"a frame may have at most {MOST_PARCELS} messages")
    return Hand(tuple([_GROUP.decode(each) for each in word.groups]))


def _elements(raw: msgspec.Raw) -> int:
    """Return the number of elements in the header of a MessagePack array. Raises ValueError if it is no array."""
    head = bytes(memoryview(raw)[:5])
    if head[0] >> 4 == 0x9:
        return head[0] & 0xF
    size = {0xDC: 2, 0xDD: 4}.get(head[0])
    if size is None:
        raise ValueError("a group is no array")
    return int.from_bytes(head[1 : 1 + size])


def daemon_word(body: bytes) -> FromDaemon:
    """What the daemon says. Raises Corrupt."""
    try:
        return _OF_DAEMON.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a word of a Publisher daemon: {error}") from None


def frame_limit(message_limit: int) -> int:
    """The largest frame that is taken where messages may have `message_limit` bytes."""
    return max(PORTION_BYTES, message_limit) + ROOM


def fault(parcel: Parcel, message_limit: int) -> Answer | None:
    """Why a parcel cannot be taken, if it cannot: what is wrong here would be wrong in Redis for ever."""
    if len(parcel.message) > message_limit:
        return Answer(
            "too-large",
            f"{parcel.id}: {len(parcel.message)} bytes are over the daemon's limit of {message_limit}: raise its "
            "message_limit, too",
        )
    wrong = (
        "id" if not 0 < len(parcel.id) <= 200
        else "queue" if not _QUEUE.match(parcel.queue)
        else "time" if not _AT.match(parcel.at)
        else "lane" if parcel.lane not in ("", "h", "l")
        else "line" if len(parcel.line) > LINE
        else "expiry" if not _EXPIRES.match(parcel.expires)
        else ""
    )  # fmt: skip
    return Answer("unfit", f"{parcel.id[:200]!r} has no {wrong} that could be one") if wrong else None


def to_bytes(parcel: Parcel) -> bytes:
    """A parcel, to be kept."""
    return _ENCODER.encode(parcel)


def from_bytes(raw: bytes) -> Parcel:
    """A parcel that was kept. Raises Corrupt."""
    try:
        return _PARCEL.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"not a parcel: {error}") from None


def parcel(job: Job) -> Parcel:
    """A job as it is handed over."""
    return Parcel(job.id, job.queue, job.message, job.at, job.lane, job.line, job.expires)


def job(parcel: Parcel, at: str) -> Job:
    """The job again, to be published; a time from now is another one `at` each moment."""
    return Job(
        parcel.id,
        "",
        parcel.queue,
        parcel.message,
        at,
        lane=parcel.lane,
        line=parcel.line,
        expires=parcel.expires,
    )


def due_at(parcel: Parcel, now_ms: int) -> int | None:
    """When a job falls due that was sent with a countdown: in ms since 1970, by the clock of whoever asks."""
    return now_ms + int(parcel.at[1:]) if parcel.at.startswith("+") else None


def portions(groups: Sequence[tuple[Parcel, ...]]) -> Iterator[list[int]]:
    """The groups, by their numbers, as many as go in one frame; one that alone is more than that goes alone."""
    part: list[int] = []
    count = size = 0
    for number, group in enumerate(groups):
        more = sum(len(each.message) for each in group)
        if part and (count + len(group) > PORTION or size + more > PORTION_BYTES):
            yield part
            part, count, size = [], 0, 0
        part.append(number)
        count += len(group)
        size += more
    if part:
        yield part
