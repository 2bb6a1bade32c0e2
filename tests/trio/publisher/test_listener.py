"""Listener: what clients may do, and what those do to others who may not: nothing."""

import os
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.job.job import Job
from celery5.protocol.publisher.address import DaemonAddress
from celery5.protocol.publisher.frames import (
    MAX_HELLO_BYTES,
    MAX_MESSAGES,
    MESSAGES_PER_FRAME,
    ClientHello,
    ClientMessage,
    ConnectionRefusal,
    DaemonMessage,
    FrameReader,
    GroupReply,
    JobMessage,
    PublishReply,
    PublishRequest,
    Welcome,
    decode_daemon_message,
    encode_frame,
)
from celery5.sending.bounded_queue import BacklogCapacity
from celery5.sending.messages_backlog import MemoryBacklog
from celery5.sending.publisher_client import PublisherClient
from celery5.services.publisher import listener as listening
from celery5.services.publisher.listener import MAX_UNIDENTIFIED, ClientLimits, Listener
from celery5.services.publisher.messages_store import MessagesStore
from celery5.services.publisher.sockets import PublisherSockets, SocketPlan, get_inherited_sockets

HAND = PublishRequest(((JobMessage("a", "q", b"{}"),),))
BOMB = b"\x92\xa4hand\xdd" + (5_000_000).to_bytes(4) + b"\x90" * 5_000_000
"""A hand with five million empty groups."""
LIMIT = 20.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    with trio.fail_after(LIMIT):
        while not condition():
            await trio.sleep(0.01)


class Host:
    """A listener with a store in memory."""

    def __init__(
        self,
        plan: SocketPlan,
        *,
        room: int = 100,
        most: int = 10,
        strangers: int = MAX_UNIDENTIFIED,
        message_limit: int = 2000,
    ) -> None:
        log = Log(worker="w", app="shop")
        self.backlog = MemoryBacklog(capacity=BacklogCapacity(room, 10**9))
        self.store = MessagesStore(broker="default", backlog=self.backlog, log=log)
        self.plan = plan
        self.clients: list[Client] = []
        self.listener = Listener(
            app_name="shop",
            sockets=PublisherSockets(plan=plan, log=log),
            stores={"default": self.store},
            publishers={},
            broker_of=lambda _queue: "default",
            message_limit=message_limit,
            log=log,
            limits=ClientLimits(most, strangers),
        )

    def count(self, name: str) -> float:
        """What a metric of the listener says."""
        (found,) = [
            family for family in self.listener.metric_families() if family.name == f"celery5_publisher_{name}"
        ]
        (sample,) = found.samples
        return sample.value

    @asynccontextmanager
    async def up(self) -> AsyncGenerator["Host", None]:
        """It listens while the block lasts."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.store.run)
            await nursery.start(self.listener.run)
            try:
                yield self
            finally:
                for client in self.clients:
                    await trio.aclose_forcefully(client.stream)
            nursery.cancel_scope.cancel()

    async def client(self, *, greet: bool = True) -> "Client":
        """Another client."""
        one = Client(await trio.open_unix_socket(self.plan.path))
        self.clients.append(one)
        if greet:
            assert isinstance(await one.ask(ClientHello("shop")), Welcome)
        return one


class Client:
    """A client that says what it likes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._frames = FrameReader(10**7)

    async def ask(self, word: ClientMessage) -> DaemonMessage:
        """Say a word, and give the answer."""
        await self.stream.send_all(encode_frame(word))
        return await self.heard()

    async def heard(self) -> DaemonMessage:
        """What the daemon says next."""
        with trio.fail_after(LIMIT):
            while (body := self._frames.next_frame()) is None:
                received = bytes(await self.stream.receive_some(65536))
                assert received, "it has hung up without a word"
                self._frames.feed(received)
        return decode_daemon_message(body)

    async def is_cut_off(self, said: bytes) -> bool:
        """Whether the daemon hangs up on somebody who says that again and again, and reads nothing."""
        with trio.move_on_after(LIMIT):
            try:
                while True:
                    await self.stream.send_all(said)
            except trio.BrokenResourceError:
                return True
        return False

    async def is_alone(self) -> bool:
        """Whether the daemon hangs up."""
        with trio.fail_after(LIMIT):
            try:
                while await self.stream.receive_some(65536):
                    pass
            except trio.BrokenResourceError:
                pass
        return True


@pytest.fixture
def host(short_path: Path) -> Host:
    """A listener on a unix socket."""
    return Host(SocketPlan(path=str(short_path / "p.sock")))


async def test_groups_are_stored_in_order_and_then_acknowledged(host: Host) -> None:
    async with host.up():
        one = await host.client()
        word = PublishRequest(
            ((JobMessage("a", "q", b"1"), JobMessage("b", "q", b"2")), (JobMessage("c", "q", b"3"),))
        )
        assert await one.ask(word) == PublishReply((GroupReply(), GroupReply()))
        assert [stored.job.id for stored in await host.store.read_first("q")] == ["a", "b", "c"]
        assert await one.ask(PublishRequest(())) == PublishReply(())
        assert (os.stat(host.plan.path).st_mode & 0o777) == 0o600
    assert "p.sock" not in os.listdir(os.path.dirname(host.plan.path))


async def test_only_groups_that_fit_are_taken_from_one_read(short_path: Path) -> None:
    host = Host(SocketPlan(path=str(short_path / "p.sock")), room=3)
    async with host.up():
        one = await host.client()
        large = tuple(JobMessage(str(n), "q", b"") for n in range(4))
        word = PublishRequest(
            (
                large,
                (JobMessage("a", "q", b""),),
                (JobMessage("b", "q", b"x" * 3000),),
                (JobMessage("", "q", b""),),
            )
        )
        answer = await one.ask(word)
        assert isinstance(answer, PublishReply)
        assert [frame.code for frame in answer.answers] == ["full", "", "too-large", "unfit"]
        assert [stored.job.id for stored in await host.store.read_first("q")] == ["a"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "too-large"),
        ((5).to_bytes(4) + b"\x00\x01\x02\x03\x04", "unfit"),
        (encode_frame(HAND), "unfit"),
        (encode_frame(ClientHello("shop", 99)), "unfit"),
        (encode_frame(ClientHello("other")), "unfit"),
        (encode_frame(ClientHello("shop")) + encode_frame(ClientHello("shop")), "unfit"),
        (encode_frame(ClientHello("shop")) + (10**8).to_bytes(4), "too-large"),
        (encode_frame(ClientHello("shop")) + (3).to_bytes(4) + b"abc", "unfit"),
        ((MAX_HELLO_BYTES + 1).to_bytes(4), "too-large"),
        (encode_frame(ClientHello("shop")) + (len(BOMB)).to_bytes(4) + BOMB, "unfit"),
    ],
)
async def test_who_speaks_otherwise_is_told_so_and_sent_away(host: Host, said: bytes, code: str) -> None:
    async with host.up():
        good, bad = await host.client(), await host.client(greet=False)
        await bad.stream.send_all(said)
        last = await bad.heard()
        if last == Welcome():
            last = await bad.heard()
        assert isinstance(last, ConnectionRefusal)
        assert last.code == code
        await bad.stream.aclose()
        assert await good.ask(HAND) == PublishReply((GroupReply(),))


async def test_slow_clients_lose_their_connection_and_idle_ones_do_not(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HELLO_LIMIT", 0.2)
    monkeypatch.setattr(listening, "FRAME_LIMIT", 0.2)
    async with host.up():
        silent, idle, slow = await host.client(greet=False), await host.client(), await host.client()
        await slow.stream.send_all(encode_frame(HAND)[:9])
        assert isinstance(await slow.heard(), ConnectionRefusal)
        assert await silent.is_alone()
        await slow.stream.aclose()
        await silent.stream.aclose()
        assert await idle.ask(HAND) == PublishReply((GroupReply(),))
        assert host.backlog.size == 1


async def test_who_does_not_read_its_answers_is_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ANSWER_LIMIT", 0.2)
    async with host.up():
        deaf = await host.client()
        bad = PublishRequest(((JobMessage("x" * 500, "q", b""),),) * MESSAGES_PER_FRAME)  # a large answer
        assert await deaf.is_cut_off(encode_frame(bad))
        assert await (await host.client()).ask(HAND) == PublishReply((GroupReply(),))


async def test_there_are_no_more_clients_than_there_is_room_for(short_path: Path) -> None:
    host = Host(SocketPlan(path=str(short_path / "p.sock")), most=2)
    async with host.up():
        first, second = await host.client(), await host.client()
        for client in (first, second):  # they are saying something, so neither can make room
            await client.stream.send_all(encode_frame(HAND)[:-1])
        await until(lambda: host.listener.conditions() == {"listener": "too many clients at once"})
        third = await host.client(greet=False)
        assert await third.ask(ClientHello("shop")) == ConnectionRefusal(
            "unavailable", "there are too many clients at once"
        )
        await third.stream.aclose()
        await first.stream.send_all(encode_frame(HAND)[-1:])
        assert await first.heard() == PublishReply((GroupReply(),))
        await until(lambda: host.listener.conditions() == {"listener": ""})
        assert await (await host.client()).ask(HAND) == PublishReply((GroupReply(),))
        assert await first.is_alone()
        await second.stream.send_all(encode_frame(HAND)[-1:])
        assert await second.heard() == PublishReply((GroupReply(),))


async def test_silent_connections_keep_no_producer_out(short_path: Path) -> None:
    host = Host(SocketPlan(path=str(short_path / "p.sock")), strangers=8)
    async with host.up():
        silent = [await host.client(greet=False) for _ in range(100)]
        good = await host.client()
        assert await good.ask(HAND) == PublishReply((GroupReply(),))
        assert host.count("unidentified") <= 8
        assert host.count("clients") == 1
        assert host.count("evicted_total") >= 100 - 8
        assert await silent[0].is_alone()
        assert isinstance(await silent[-1].ask(ClientHello("shop")), Welcome)  # the youngest have their time


async def test_strangers_on_a_port_keep_out_neither_a_trusted_client_nor_one_of_this_host(
    short_path: Path,
) -> None:
    ours = trustme.CA()
    ours.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(short_path / "server.pem")
    ours.cert_pem.write_to_path(short_path / "ca.pem")
    server, authority = str(short_path / "server.pem"), str(short_path / "ca.pem")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    plan = SocketPlan(
        path=str(short_path / "p.sock"), tcp=("127.0.0.1", port), certificate=server, client_ca=authority
    )
    host = Host(plan, strangers=8, most=3)
    context = ssl.create_default_context()
    ours.configure_trust(context)
    ours.issue_cert("client").configure_cert(context)
    async with host.up():
        half = await host.client(greet=False)  # by the unix socket, where others have come before it
        for _ in range(100):
            host.clients.append(Client(await trio.open_tcp_stream("127.0.0.1", port)))
        assert isinstance(await half.ask(ClientHello("shop")), Welcome)
        raw = await trio.open_tcp_stream("127.0.0.1", port)
        async with trio.SSLStream(raw, context, server_hostname="127.0.0.1") as stream:
            trusted = Client(stream)
            assert isinstance(await trusted.ask(ClientHello("shop")), Welcome)
            assert await trusted.ask(HAND) == PublishReply((GroupReply(),))
        assert host.count("unidentified") <= 16


async def test_one_host_that_connects_again_and_again_crowds_out_none_but_itself(short_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    host = Host(SocketPlan(tcp=("127.0.0.1", port)), strangers=8)
    async with host.up():
        slow = Client(await trio.open_tcp_stream("127.0.0.1", port))
        for _ in range(100):
            other = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
            host.clients.append(Client(other))
        await until(lambda: host.count("evicted_total") >= 93)
        assert isinstance(await slow.ask(ClientHello("shop")), Welcome)
        await slow.stream.aclose()


async def test_idle_clients_hold_no_place_that_another_needs(short_path: Path) -> None:
    path = str(short_path / "p.sock")
    host = Host(SocketPlan(path=path), most=5)
    producer = PublisherClient(address=DaemonAddress(path=path), app="shop")
    async with host.up():
        await producer.publish([Job("a", "task", "q", b"{}", "")])
        busy = await host.client()
        await busy.stream.send_all(encode_frame(HAND)[:-1])
        await until(lambda: len(host.listener._connections._idle) == 1)
        idle = [await host.client() for _ in range(20)]
        assert host.count("clients") == 5
        assert await idle[0].is_alone()
        assert await idle[-1].ask(HAND) == PublishReply((GroupReply(),))
        await busy.stream.send_all(encode_frame(HAND)[-1:])
        assert await busy.heard() == PublishReply((GroupReply(),))
        # Whoever was dropped does not notice: it opens another connection.
        await producer.publish([Job("b", "task", "q", b"{}", "")])
        assert [stored.job.id for stored in await host.store.read_first("q")] == ["a", "b"]
    await trio.to_thread.run_sync(producer.close)


async def test_others_have_their_turns_while_a_client_hands_over_as_much_as_it_may(short_path: Path) -> None:
    host = Host(SocketPlan(path=str(short_path / "p.sock")), room=2 * MAX_MESSAGES)
    word = encode_frame(PublishRequest((tuple(JobMessage(str(n), "q", b"{}") for n in range(MAX_MESSAGES)),)))
    answered = 0
    async with host.up():
        large, small = await host.client(), await host.client()

        async def ask_again_and_again() -> None:
            nonlocal answered
            while True:
                assert await small.ask(HAND) == PublishReply((GroupReply(),))
                answered += 1

        async with trio.open_nursery() as nursery:
            await large.stream.send_all(word[:-1])
            nursery.start_soon(ask_again_and_again)
            await until(lambda: answered > 3)
            before = answered
            await large.stream.send_all(word[-1:])
            assert await large.heard() == PublishReply((GroupReply(),))
            nursery.cancel_scope.cancel()
        assert answered - before >= 10


async def test_unfinished_frames_are_bounded_over_all_clients(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_UNFINISHED_BYTES", 100_000)
    async with host.up():
        good, greedy = await host.client(), await host.client()
        assert await greedy.is_cut_off((400_000).to_bytes(4) + b"x" * 300_000)
        await greedy.stream.aclose()
        assert await good.ask(HAND) == PublishReply((GroupReply(),))


async def test_client_with_most_unfinished_bytes_is_closed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_UNFINISHED_BYTES", 100_000)
    async with host.up():
        greedy = [await host.client() for _ in range(3)]
        for number, client in enumerate(greedy):  # 99,000 bytes together, which stay for FRAME_LIMIT
            await client.stream.send_all((400_000).to_bytes(4) + b"x" * (32_000 + 500 * number))
        await until(lambda: host.listener._unfinished_bytes > 97_000)
        good = await host.client()
        whole = encode_frame(PublishRequest(((JobMessage("a", "q", b"x" * 2000),),) * 3))
        await good.stream.send_all(whole[:-1])
        await until(lambda: host.count("evicted_total") == 1)
        await good.stream.send_all(whole[-1:])
        assert await good.heard() == PublishReply((GroupReply(),) * 3)
        assert await greedy[-1].stream.receive_some(1) == b""
        assert host.count("clients") == 3


async def test_clients_that_finish_no_frame_hold_no_place_that_another_needs(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STALLED_AFTER", 0.1)
    host = Host(SocketPlan(path=str(short_path / "s")), most=4)
    async with host.up():
        for _ in range(4):
            one = await host.client()
            await one.stream.send_all(encode_frame(HAND)[:-1])
        await until(lambda: len(host.listener._connections._unfinished) == 4)
        await until(lambda: not host.listener._connections.is_crowded)
        good = await host.client()
        assert await good.ask(HAND) == PublishReply((GroupReply(),))
        # The other three have stalled as well, or it is idle again.
        await until(lambda: host.listener.conditions() == {"listener": ""})
        assert host.count("clients") == 4


async def test_refused_connections_are_all_counted_and_the_first_of_a_second_logged(
    host: Host,
) -> None:
    logged: list[str] = []
    host.listener._log.event = lambda name, *_, **__: logged.append(name)  # type: ignore[method-assign]
    async with host.up():
        begun = trio.current_time()
        for _ in range(60):
            stranger = await host.client(greet=False)
            await stranger.stream.send_all(b"\xff" * 8)
        await until(lambda: host.count("refused_total") == 60)
        took = trio.current_time() - begun
    assert logged.count("listener:connection-refused") <= 10 * (int(took) + 2)


async def test_a_client_that_dies_in_the_middle_of_a_frame_leaves_nothing(host: Host) -> None:
    async with host.up():
        one = await host.client()
        await one.stream.send_all(encode_frame(HAND)[:-1])
        await one.stream.aclose()
        await until(lambda: host.count("clients") == 0)
        assert (host.backlog.size, host.listener._unfinished_bytes) == (0, 0)


async def test_tcp_speaks_tls_to_clients_with_the_right_certificate_only(short_path: Path) -> None:
    ours, others = trustme.CA(), trustme.CA()
    server = ours.issue_cert("127.0.0.1")
    server.private_key_and_cert_chain_pem.write_to_path(short_path / "server.pem")
    ours.cert_pem.write_to_path(short_path / "ca.pem")
    plan = SocketPlan(
        tcp=("127.0.0.1", 0), certificate=str(short_path / "server.pem"), client_ca=str(short_path / "ca.pem")
    )
    host = Host(plan)
    opened = list[Any]()
    inner = host.listener._sockets.open_listeners

    async def listeners() -> Any:
        opened.extend(await inner())
        return opened

    host.listener._sockets.open_listeners = listeners  # type: ignore[method-assign]
    async with host.up():
        port = opened[0].socket.getsockname()[1]

        async def talk(authority: trustme.CA | None) -> DaemonMessage:
            context = ssl.create_default_context()
            ours.configure_trust(context)
            if authority is not None:
                authority.issue_cert("client").configure_cert(context)
            raw = await trio.open_tcp_stream("127.0.0.1", port)
            async with trio.SSLStream(raw, context, server_hostname="127.0.0.1") as stream:
                return await Client(stream).ask(ClientHello("shop"))

        assert await talk(ours) == Welcome()
        for stranger in (others, None):
            with pytest.raises((trio.BrokenResourceError, ssl.SSLError, AssertionError)):
                await talk(stranger)
        plain = Client(await trio.open_tcp_stream("127.0.0.1", port))
        await plain.stream.send_all(encode_frame(ClientHello("shop")))
        assert await plain.is_alone()
        await plain.stream.aclose()


async def refusal(host: Host) -> str:
    """Why a listener does not come up."""
    try:
        async with host.up():
            return ""
    except BaseExceptionGroup as group:
        return str(group.split(Misconfigured)[0] and first_of(group))


def first_of(group: BaseException) -> str:
    """The first error in groups of groups."""
    return first_of(group.exceptions[0]) if isinstance(group, BaseExceptionGroup) else str(group)


async def test_an_old_socket_is_taken_away_and_anything_else_is_not(short_path: Path) -> None:
    path = short_path / "p.sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as old:
        await old.bind(str(path))
    async with Host(SocketPlan(path=str(path))).up() as host:
        await host.client()
        assert "another Publisher listens" in await refusal(Host(SocketPlan(path=str(path))))
    path.write_text("precious")
    assert "is no socket" in await refusal(Host(SocketPlan(path=str(path))))
    assert path.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
async def test_socket_folder_that_others_may_change_is_refused(
    short_path: Path,
) -> None:
    folder = short_path / "folder"
    folder.mkdir(mode=0o755)
    plan = SocketPlan(path=str(folder / "p.sock"))
    async with Host(plan).up() as host:
        await host.client()
    os.chown(folder, 12345, 0)
    assert "another user's" in await refusal(Host(plan))
    os.chown(folder, 0, 0)
    folder.chmod(0o775)
    assert "others may write it: chmod 700" in await refusal(Host(plan))


def test_what_systemd_has_opened_is_for_the_process_that_it_says() -> None:
    assert get_inherited_sockets({"LISTEN_PID": "7", "LISTEN_FDS": "2"}, 7) == (3, 4)
    assert get_inherited_sockets({"LISTEN_PID": "8", "LISTEN_FDS": "2"}, 7) == ()
    assert get_inherited_sockets({"LISTEN_PID": "7", "LISTEN_FDS": "x"}, 7) == ()


async def test_a_socket_that_was_opened_already_is_used(short_path: Path) -> None:
    path = str(short_path / "given.sock")
    with trio.socket.socket(trio.socket.AF_UNIX) as given:
        await given.bind(path)
        given.listen(5)
        host = Host(SocketPlan(path=path, inherited=(given.fileno(),)))
        for _ in range(2):  # it stays when the listener goes
            async with host.up():
                one = await host.client()
                assert await one.ask(HAND) == PublishReply((GroupReply(),))
                await one.stream.aclose()


@pytest.mark.parametrize(
    ("address", "plain", "fits"),
    [("0.0.0.0", False, False), ("0.0.0.0", True, True), ("127.0.0.1", False, True)],
)
async def test_a_socket_of_systemds_that_other_hosts_reach_needs_a_certificate(
    address: str, plain: bool, fits: bool
) -> None:
    with socket.socket() as opened:
        opened.bind((address, 0))
        opened.listen()
        doors = PublisherSockets(
            plan=SocketPlan(inherited=(opened.fileno(),), plain=plain), log=Log(worker="w", app="shop")
        )
        with nullcontext() if fits else pytest.raises(Misconfigured, match="other hosts"):
            for listener in await doors.open_listeners():
                await listener.aclose()
