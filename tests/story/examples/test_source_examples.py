"""Source examples: the receiver of webhooks and the watcher of a folder, from outside."""

import base64
import json
import os
import signal
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from trio.testing import open_stream_to_socket_listener

from celery5 import BrokerUnavailable, Misconfigured
from celery5.examples.folder_watch.watcher import FolderWatcher, Seen
from celery5.examples.webhooks.receiver import Receiver
from celery5.examples.webhooks.signature import TOLERANCE, Unsigned, key_of, signed, verified
from tests.story.cli.commands import Serving, until

SECRET = "whsec_" + base64.b64encode(b"a secret of more than 24 bytes").decode()
KEY = key_of(SECRET)
NOW = 1_763_700_000.0
BODY = b'{"order": 7, "amount": 990}'


def fields(name: str = "msg-1", at: float = NOW, body: bytes = BODY, key: bytes = KEY) -> dict[str, str]:
    """The header of a message."""
    when = str(int(at))
    return {"webhook-id": name, "webhook-timestamp": when, "webhook-signature": signed(key, name, when, body)}


# ---- who may be believed


def test_what_is_signed_is_believed_and_the_vector_of_the_standard_too() -> None:
    assert verified(fields(), BODY, [KEY], now=NOW) == "msg-1"
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    known = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert verified(known, b'{"test": 2432232314}', [key], now=1614265330) == known["webhook-id"]


@pytest.mark.parametrize(
    ("change", "body", "now"),
    [
        ({}, BODY + b" ", NOW),
        ({"webhook-id": "msg-2"}, BODY, NOW),
        ({"webhook-timestamp": str(int(NOW) + 1)}, BODY, NOW),
        ({"webhook-signature": ""}, BODY, NOW),
        ({"webhook-signature": "v1,\xff"}, BODY, NOW),
        ({"webhook-id": ""}, BODY, NOW),
        ({"webhook-timestamp": "\u0661"}, BODY, NOW),
        (fields(key=b"x" * 24), BODY, NOW),
        ({}, BODY, NOW + TOLERANCE + 2),
        ({}, BODY, NOW - TOLERANCE - 2),
    ],
)
def test_what_is_not_is_not(change: Mapping[str, str], body: bytes, now: float) -> None:
    with pytest.raises(Unsigned):
        verified({**fields(), **change}, body, [KEY], now=now)


def test_while_a_secret_is_replaced_both_are_good() -> None:
    new = b"n" * 32
    assert verified(fields(key=new), BODY, [KEY, new], now=NOW) == "msg-1"
    both = fields()
    both["webhook-signature"] = "v1,bm9uZQ== v2,x " + both["webhook-signature"]
    assert verified(both, BODY, [KEY], now=NOW) == "msg-1"
    with pytest.raises(ValueError, match="24 to 64 bytes"):
        key_of("whsec_short")


# ---- over HTTP


class Emitted:
    """Takes documents, unless it is told to fail."""

    def __init__(self) -> None:
        self.documents: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.fails = False

    async def __call__(
        self,
        body: object,
        /,
        *,
        id: str = "",  # noqa: A002  as everywhere
        attributes: Mapping[str, str] | None = None,
    ) -> str:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise BrokerUnavailable("it is away")
        assert isinstance(body, bytes)
        self.documents.append((id, body, attributes or {}))
        return id


@asynccontextmanager
async def receiving(emit: Emitted, **said: Any) -> AsyncGenerator[Receiver, None]:
    """A receiver that is up."""
    one = Receiver([SECRET], port=0, now=lambda: NOW, **said)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, emit)
        with trio.fail_after(30):
            while one.port is None:
                await trio.sleep(0.005)
        yield one
        nursery.cancel_scope.cancel()


def request(body: bytes = BODY, *, method: str = "POST", path: str = "/webhooks", **more: Any) -> bytes:
    """A request as it travels."""
    header = {"Host": "shop", "Content-Length": str(len(body)), **fields(body=body), **more}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in header.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def answer(port: int | None, *parts: bytes) -> tuple[int, Any]:
    """Send it, in parts, and give the status and the body of the response."""
    assert port is not None
    with trio.fail_after(30):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            return await _exchange(stream, parts)


async def _exchange(stream: trio.abc.Stream, parts: tuple[bytes, ...]) -> tuple[int, Any]:
    for part in parts:
        await stream.send_all(part)
        await trio.sleep(0.01)
    got = b""
    while more := await stream.receive_some():
        got += more
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def test_a_message_is_answered_when_it_is_published() -> None:
    emit = Emitted()
    async with receiving(emit) as one:
        assert await answer(one.port, request(Content_Type="application/json")) == (200, {"id": "msg-1"})
        whole = request()
        assert (await answer(one.port, whole[:20], whole[20:-5], whole[-5:]))[0] == 200
        emit.fails = True
        status, told = await answer(one.port, request())
        assert (status, told) == (503, {"error": "it could not be published: send it again"})
    assert emit.documents[0] == ("msg-1", BODY, {"content-type": "application/json"})
    assert len(emit.documents) == 2


async def test_what_is_not_in_order_is_refused_and_nothing_is_published() -> None:
    emit = Emitted()
    async with receiving(emit, largest=100) as one:
        for sent, status in (
            (request(webhook_signature="v1,bm9uZQ=="), 401),
            (request()[: -len(BODY)] + BODY.replace(b"990", b"999"), 401),
            (request(path="/other"), 404),
            (request(method="GET"), 405),
            (request(b"x" * 101), 413),
            (request(Transfer_Encoding="chunked"), 411),
            (request(Content_Length="-1"), 400),
            (request(Content_Length="5, 5"), 400),
            (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
            (b"x" * 10_000, 431),
        ):
            assert (await answer(one.port, sent))[0] == status
    assert emit.documents == []


async def test_without_a_secret_the_port_stays_closed_and_it_is_said_what_to_do() -> None:
    with trio.fail_after(30), pytest.raises(Misconfigured, match="export WEBHOOK_SECRETS=") as caught:
        await Receiver([], port=0).run(Emitted())
    assert len(str(caught.value).splitlines()) == 1


async def test_who_is_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.examples.webhooks.receiver.LIMIT", 1.0)
    emit = Emitted()
    async with receiving(emit) as one:
        assert (await answer(one.port, request()[:30]))[0] == 408
        assert (await answer(one.port, request()[:-1]))[0] == 408
        assert (await answer(one.port, request()))[0] == 200


async def test_it_speaks_https_when_it_is_given_a_context() -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    emit = Emitted()
    async with receiving(emit, tls=server) as one:
        with trio.fail_after(30):
            bare = await trio.open_tcp_stream("127.0.0.1", one.port or 0)
            stream = trio.SSLStream(bare, client, server_hostname="localhost", https_compatible=True)
            async with stream:
                assert await _exchange(stream, (request(),)) == (200, {"id": "msg-1"})
    assert len(emit.documents) == 1


def test_the_shop_books_what_its_bank_sends_once(tmp_path: Path, free_port: int, url: str) -> None:
    payments = tmp_path / "payments.jsonl"
    environ = {"WEBHOOK_SECRETS": SECRET, "WEBHOOK_PORT": str(free_port), "PAYMENTS": str(payments)}
    environ["CELERY5_BROKER"] = url
    words = ("-A", "celery5.examples.webhooks", "controller", "start", "--development")
    with Serving(*words, cwd=tmp_path, env=environ) as serving:

        def post(name: str, body: bytes) -> int:
            given = request(body, **fields(name, time.time(), body))
            return trio.run(answer, free_port, given)[0]

        until(lambda: _listens(free_port), within=30)
        assert [post("pay-1", BODY), post("pay-1", BODY), post("pay-2", BODY)] == [200, 200, 200]
        until(lambda: payments.exists() and len(payments.read_text().splitlines()) == 2, within=30)
        serving.signal(signal.SIGTERM)
        assert serving.ended().code == 0
    assert [json.loads(line)["value"] for line in payments.read_text().splitlines()] == [
        {"order": 7, "amount": 990}
    ] * 2


def _listens(port: int) -> bool:
    try:
        return bool(trio.run(answer, port, b"GET / HTTP/1.0\r\n\r\n"))
    except OSError:
        return False


@pytest.fixture
def free_port() -> int:
    """A port that nobody has."""

    async def find() -> int:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        stream = await open_stream_to_socket_listener(listener)
        port: int = listener.socket.getsockname()[1]
        await stream.aclose()
        await listener.aclose()
        return port

    return trio.run(find)


# ---- a folder


@asynccontextmanager
async def watching(folder: Path, emit: Emitted, **said: Any) -> AsyncGenerator[None, None]:
    """A watcher that looks often."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FolderWatcher(folder, every=0.02, **said).run, emit)
        yield
        nursery.cancel_scope.cancel()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def _until(condition: Any) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)


async def test_a_file_is_taken_once_and_put_away(tmp_path: Path) -> None:
    emit = Emitted()
    (tmp_path / "one.txt").write_bytes(b"one\xff")
    (tmp_path / ".hidden").touch()
    (tmp_path / "two.txt.part").touch()
    (tmp_path / "link").symlink_to(tmp_path / "one.txt")
    for _ in range(2):
        async with watching(tmp_path, emit):
            await _until(lambda: (tmp_path / "done").is_dir() and list((tmp_path / "done").iterdir()))
            await trio.sleep(0.1)
    assert [(body, told["name"]) for _, body, told in emit.documents] == [(b"one\xff", "one.txt")]
    assert _names(tmp_path) == [".hidden", "done", "link", "refused", "two.txt.part"]


async def test_a_file_that_is_still_written_is_not_taken(tmp_path: Path) -> None:
    emit = Emitted()
    with (tmp_path / "slow.txt").open("wb", buffering=0) as file:
        async with watching(tmp_path, emit, quiet=0.3):
            for _ in range(20):
                file.write(b"x")
                await trio.sleep(0.03)
            assert emit.documents == []
            await _until(lambda: emit.documents)
    assert emit.documents[0][1] == b"x" * 20


async def test_a_file_that_was_published_before_a_kill_has_the_same_id_after_it(tmp_path: Path) -> None:
    emit = Emitted()
    (tmp_path / "one.txt").write_text("one")
    async with watching(tmp_path, emit):
        await _until(lambda: emit.documents)
        await _until(lambda: not (tmp_path / "one.txt").exists())
    (taken,) = (tmp_path / "done").iterdir()
    taken.rename(tmp_path / "one.txt")  # as if it had been killed before it was put away
    async with watching(tmp_path, emit):
        await _until(lambda: len(emit.documents) == 2)
    assert emit.documents[0] == emit.documents[1]
    (tmp_path / "one.txt").write_text("one")
    os.utime(tmp_path / "one.txt", (1, 1))
    async with watching(tmp_path, emit):
        await _until(lambda: len(emit.documents) == 3)
    assert emit.documents[2][0] != emit.documents[0][0]  # somebody has put it there again


async def test_a_file_that_is_too_large_is_put_aside(tmp_path: Path) -> None:
    emit = Emitted()
    (tmp_path / "large.bin").write_bytes(b"x" * 1001)
    async with watching(tmp_path, emit, largest=1000):
        await _until(lambda: (tmp_path / "refused" / "large.bin").exists())
    assert emit.documents == []


def test_a_file_that_looks_different_is_not_ripe(tmp_path: Path) -> None:
    one = FolderWatcher(tmp_path, every=1.0)
    first, other = {"a": Seen(1, 10, 5)}, {"a": Seen(1, 11, 5)}
    assert [one.ripe(first, 0.0), one.ripe(first, 1.0), one.ripe(first, 2.0)] == [[], [], ["a"]]
    assert [one.ripe(other, 2.5), one.ripe({}, 3.0), one.ripe(other, 9.0)] == [[], [], []]


def test_routers_that_are_killed_count_each_file_once(tmp_path: Path, url: str) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    names = [f"{number}.txt" for number in range(30)]
    environ = {"CELERY5_BROKER": url, "INBOX": str(inbox), "EVERY": "0.05"}
    words = ("-A", "celery5.examples.folder_watch", "controller", "start", "--development")
    for round_ in range(3):
        for name in names[10 * round_ : 10 * round_ + 10]:
            (inbox / name).write_text("three little words")
        with Serving(*words, cwd=tmp_path, env=environ) as serving:
            until(lambda r=round_: len(_done(inbox)) > 10 * r, within=30)  # type: ignore[misc]
            serving.signal(signal.SIGKILL)
    with Serving(*words, cwd=tmp_path, env=environ):
        until(lambda: len(set(_counted(inbox))) == 30, within=30)
        until(lambda: len(_done(inbox)) == 30, within=30)
    assert sorted(set(_counted(inbox))) == sorted(names)


def _done(inbox: Path) -> list[Path]:
    return list((inbox / "done").glob("*.txt"))


def _counted(inbox: Path) -> list[str]:
    try:
        found = (inbox / "done" / "words.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["value"]["name"] for line in found]
