"""HTTP: as much of HTTP/1.1 as a probe or a webhook needs: reading a request strictly, and writing a whole response.

One request for each connection. Whatever is not exactly as RFC 9112 has it is refused, never guessed at.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_HEAD_SIZE = 8192
"""Bytes of a request's head."""
HEAD_END = b"\r\n\r\n"
"""What ends a head."""

_LINE = re.compile(rb"([A-Za-z!#$%&'*+.^_`|~-]{1,32}) ([!-~]{1,4096}) HTTP/([0-9])\.([0-9])")
_FIELD = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_PATH = re.compile(rb"/[!-~]*")
_SAYS: Mapping[int, str] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is asked: the `method`, and the `path` without its query; of how many bytes the body is, and the header's
    `fields` that are there once, by their names in lower case."""

    method: str
    path: str
    content_length: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)


class BadRequest(Exception):
    """A request that is refused with `status`, because of `why`."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response. `more` are header fields besides the usual ones."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()

    def to_bytes(self, *, head_only: bool = False) -> bytes:
        """As it travels: with its length, and the word that the connection is over then."""
        fields = [
            ("Content-Type", self.content_type),
            ("Content-Length", str(len(self.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
            *self.headers,
        ]
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        first = f"HTTP/1.1 {self.status} {_SAYS[self.status]}\r\n{head}\r\n"
        return first.encode() + (b"" if head_only else self.body)


def parse_request(head: bytes, *, max_body_size: int = 0) -> HttpRequest:
    """The request of a head, up to and with its empty line. Its body may have `largest` bytes. Raises BadRequest."""
    first, *lines = head.removesuffix(HEAD_END).split(b"\r\n")
    found = _LINE.fullmatch(first)
    if found is None:
        raise BadRequest(400, "the first line is none of HTTP")
    if found[3] != b"1":
        raise BadRequest(505, "this speaks HTTP/1.1")
    fields = _fields(lines)
    if found[4] != b"0" and len(fields.get(b"host", [])) != 1:
        raise BadRequest(400, "a request has one Host")
    length = _length(fields, max_body_size)
    target = found[2]
    if not _PATH.fullmatch(target):
        raise BadRequest(400, "the target is no path")
    single = {
        name.decode(): values[0].decode("latin-1") for name, values in fields.items() if len(values) == 1
    }
    return HttpRequest(found[1].decode(), target.partition(b"?")[0].decode(), length, single)


def _length(fields: Mapping[bytes, Sequence[bytes]], largest: int) -> int:
    """How many bytes the body has. One that says its length in any other way than by a number is refused."""
    said = fields.get(b"content-length", [])
    if b"transfer-encoding" in fields:
        raise BadRequest(411 if largest else 413, "a body says its length" if largest else _NO_BODY)
    if not said:
        return 0
    if len(said) > 1 or not re.fullmatch(rb"[0-9]{1,15}", said[0]):
        raise BadRequest(400, "the length is no number")
    if int(said[0]) > largest:
        raise BadRequest(413, f"a body has at most {largest} bytes" if largest else _NO_BODY)
    return int(said[0])


_NO_BODY = "nothing here takes a body"


def _fields(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise BadRequest(400, "a header field is malformed")
        fields.setdefault(found[1].lower(), []).append(found[2].strip(b" \t"))
    return fields
