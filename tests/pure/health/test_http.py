"""HTTP: what counts as a request, and how a response travels."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.health.http import (
    BadRequest,
    HttpRequest,
    HttpResponse,
    is_name_of_other_site,
    parse_request,
)


def test_a_request_has_a_method_and_a_path_without_its_query() -> None:
    head = b"GET /livez?verbose=1 HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nX-Y:\r\n\r\n"
    fields = {"host": "x", "accept": "*/*", "x-y": ""}
    assert parse_request(head) == HttpRequest("GET", "/livez", headers=fields)
    assert parse_request(b"HEAD /readyz HTTP/1.0\r\n\r\n") == HttpRequest("HEAD", "/readyz")
    fields = {"host": "x", "content-length": "0"}
    head = b"GET / HTTP/1.1\r\nhost: x\r\nContent-Length: 0\r\n\r\n"
    assert parse_request(head) == HttpRequest("GET", "/", headers=fields)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\x00\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
    ],
)
def test_what_is_not_exactly_http_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_request(head)
    assert refused.value.status == status


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_request_or_refused(head: bytes) -> None:
    found: list[str] = []
    with suppress(BadRequest):
        found.append(parse_request(head).path)
    assert all(path.startswith("/") for path in found)


def test_a_response_says_how_long_it_is_and_that_the_connection_ends() -> None:
    one = HttpResponse(405, b"no\n", "text/plain", [("Allow", "GET, HEAD")])
    head, _, body = one.to_bytes().partition(b"\r\n\r\n")
    assert body == b"no\n"
    assert head.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert {b"Content-Length: 3", b"Connection: close", b"Allow: GET, HEAD"} <= set(head.split(b"\r\n"))
    assert one.to_bytes(head_only=True) == head + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("host", "is_other"),
    [
        ("localhost", False),
        ("LOCALHOST:9000", False),
        ("127.0.0.1:9000", False),
        ("10.1.2.3", False),
        ("[::1]:9000", False),
        ("x", False),
        ("node-7:80", False),
        ("shop.localhost", False),
        ("", False),
        ("evil.example", True),
        ("evil.example:9000", True),
        ("evil.example.", True),
        ("127.0.0.1.evil.example", True),
        ("localhost.evil.example:80", True),
        ("a:b:c", True),
    ],
)
def test_a_name_that_a_web_site_may_have_is_told_from_those_of_this_network(
    host: str, is_other: bool
) -> None:
    assert is_name_of_other_site(host) == is_other
