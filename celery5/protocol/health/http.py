"""Parse a request and write a response: the part of HTTP/1.1 that a probe or a webhook needs.

There is one request for each connection. A request that does not follow RFC 9112 exactly is refused.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

import msgspec

MAX_HEAD_SIZE = 8192
"""Bytes of a request's head."""
HEAD_END = b"\r\n\r\n"
"""What ends a head."""

_LINE = re.compile(rb"([A-Za-z!#$%&'*+.^_`|~-]{1,32}) ([!-~]{1,4096}) HTTP/([0-9])\.([0-9])")
_FIELD = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_PATH = re.compile(rb"/[!-~]*")
_REASONS: Mapping[int, str] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class HttpRequest(msgspec.Struct, frozen=True):
    """A request, without its body."""

    method: str
    path: str  # without its query
    content_length: int = 0
    # The header fields that occur once, by name in lower case.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])


class BadRequest(Exception):
    """A request that is refused with `status`, because of `why`."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status = status
        self.why = why


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete response. `headers` are sent besides the usual ones."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()

    def to_bytes(self, *, head_only: bool = False) -> bytes:
        """Return the response as bytes, with its length and `Connection: close`."""
        fields = [
            ("Content-Type", self.content_type),
            ("Content-Length", str(len(self.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
            *self.headers,
        ]
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        first = f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n{head}\r\n"
        return first.encode() + (b"" if head_only else self.body)


def parse_request(head: bytes, *, max_body_size: int = 0) -> HttpRequest:
    """Parse a head, which ends with its empty line. The body may have `max_body_size` bytes. Raises BadRequest."""
    first, *lines = head.removesuffix(HEAD_END).split(b"\r\n")
    match = _LINE.fullmatch(first)
    if match is None:
        raise BadRequest(400, "the first line is none of HTTP")
    if match[3] != b"1":
        raise BadRequest(505, "this speaks HTTP/1.1")
    fields = _parse_fields(lines)
    if match[4] != b"0" and len(fields.get(b"host", [])) != 1:
        raise BadRequest(400, "a request has one Host")
    length = _parse_length(fields, max_body_size)
    target = match[2]
    if not _PATH.fullmatch(target):
        raise BadRequest(400, "the target is no path")
    single = {
        name.decode(): values[0].decode("latin-1") for name, values in fields.items() if len(values) == 1
    }
    return HttpRequest(match[1].decode(), target.partition(b"?")[0].decode(), length, single)


def is_name_of_other_site(host: str) -> bool:
    """Return whether a `Host` may be the name of a web site: no address, and no name that only this network knows.

    A page of such a site can have its name point to this host (DNS rebinding), and read what the browser is answered.
    """
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:]*)(:[0-9]*)?", host.lower())
    if match is None:
        return True
    name = match[1].rstrip(".")
    with suppress(ValueError):
        ip_address(name.strip("[]"))
        return False
    return "." in name and not name.endswith(".localhost")


def _parse_length(fields: Mapping[bytes, Sequence[bytes]], max_size: int) -> int:
    """Return the length of the body. Only a `Content-Length` is accepted."""
    lengths = fields.get(b"content-length", [])
    if b"transfer-encoding" in fields:
        raise BadRequest(411 if max_size else 413, "a body says its length" if max_size else _NO_BODY)
    if not lengths:
        return 0
    if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
        raise BadRequest(400, "the length is no number")
    if int(lengths[0]) > max_size:
        raise BadRequest(413, f"a body has at most {max_size} bytes" if max_size else _NO_BODY)
    return int(lengths[0])


_NO_BODY = "nothing here takes a body"


def _parse_fields(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise BadRequest(400, "a header field is malformed")
        fields.setdefault(match[1].lower(), []).append(match[2].strip(b" \t"))
    return fields
