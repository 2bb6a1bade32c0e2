"""Inbox: a command is done once if it is signed, for this inbox and in time; else refused, logged, counted,
answered."""

import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.commands.keyring import Keyring
from celery5.protocol.commands.certificates import fingerprint, parse_certificates
from celery5.protocol.commands.definitions import MAX_COMMAND_SIZE, CommandReply
from celery5.protocol.commands.signing import ControlCommand, Signer, format_audience, sign_command
from tests.pure.commands.test_signing import flipped
from tests.redis.commands import forging
from tests.redis.commands.forging import INBOX, order, put, signed
from tests.redis.worker.workers import Lines, until, working


@dataclass
class Post:
    """A worker with an inbox, what it logs, and how often it was paused, which is how we know what it did."""

    app: App
    client: "redis.Redis"
    lines: Lines
    folder: Path

    async def sent(self, one: ControlCommand, sealed: bytes) -> CommandReply:
        """Put a command into the inbox and wait for the answer."""
        put(self.client, self.app, one, sealed)
        return await forging.answer(self.client, self.app, one)

    async def stats(self) -> dict[str, Any]:
        """What the worker tells of itself."""
        (reply,) = await self.app.control.asend("stats", to=INBOX)
        assert reply.ok, reply
        told: dict[str, Any] = reply.answer
        return told

    def done(self) -> int:
        """How many commands the worker says to have done."""
        return len(self.lines.of("inbox:command-executed"))


@pytest.fixture
def keyed(url: str, app_name: str, tmp_path: Path) -> Iterator[App]:
    """An application with keys of its own and one queue to pause."""
    app = App(app_name, broker=url, keys=str(tmp_path / "keys"))

    @app.task
    async def nothing() -> None: ...

    yield app
    app.close()


@asynccontextmanager
async def posted(app: App, client: "redis.Redis", folder: Path) -> AsyncGenerator[Post, None]:
    """A worker named INBOX that logs to us."""
    app.control.keyring.get_signer()
    with Lines() as lines:
        async with working(app, name=INBOX):
            yield Post(app, client, lines, folder)


def pauses(app: App, **changes: Any) -> ControlCommand:
    """A command whose effect can be seen."""
    return order(app, "pause-queue", parameters={"queue": "default"}, **changes)


def changed_signature(post: Post) -> tuple[ControlCommand, bytes]:
    one = pauses(post.app)
    head, payload, signature = signed(post.app, one).split(b".")
    flipped = (b"B" if signature[:1] == b"A" else b"A") + signature[1:]
    return one, b".".join((head, payload, flipped))


def changed_payload(post: Post) -> tuple[ControlCommand, bytes]:
    one = pauses(post.app)
    head, _, signature = signed(post.app, order(post.app)).split(b".")
    return one, b".".join((head, signed(post.app, one).split(b".")[1], signature))


def of_a_stranger(post: Post) -> tuple[ControlCommand, bytes]:
    one = pauses(post.app)
    return one, sign_command(one, forging.stranger(post.folder))


def denied(post: Post) -> tuple[ControlCommand, bytes]:
    one = pauses(post.app)
    sealed = signed(post.app, one)
    keyring = post.app.control.keyring
    keyring.revoke(str(keyring.folder / "mine.pem"))
    return one, sealed


def denied_and_flipped(post: Post) -> tuple[ControlCommand, bytes]:
    """Whoever was denied has changed the certificate's signature into the other one that fits."""
    one, signer = pauses(post.app), post.app.control.keyring.get_signer()
    post.app.control.keyring.revoke(fingerprint(signer.chain[0]))
    return one, sign_command(one, Signer(signer.key, (flipped(signer.chain[0]), *signer.chain[1:])))


def oversized(post: Post) -> tuple[ControlCommand, bytes]:
    return pauses(post.app), b"x" * (MAX_COMMAND_SIZE + 1)


def of_no_version(post: Post) -> tuple[ControlCommand, bytes]:
    """Its certificate is of a version that there is not: the library raises another error for that."""
    one, signer = pauses(post.app), post.app.control.keyring.get_signer()
    der = signer.chain[0].replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", 1)
    return one, sign_command(one, Signer(signer.key, (der, *signer.chain[1:])))


def with_claims(**changes: Callable[[Post], Any]) -> Callable[[Post], tuple[ControlCommand, bytes]]:
    def forge(post: Post) -> tuple[ControlCommand, bytes]:
        one = pauses(post.app, **{name: value(post) for name, value in changes.items()})
        return one, signed(post.app, one)

    return forge


def bytes_of(sealed: bytes) -> Callable[[Post], tuple[ControlCommand, bytes]]:
    return lambda post: (pauses(post.app), sealed)


def unsigned(post: Post) -> tuple[ControlCommand, bytes]:
    one = pauses(post.app)
    return one, sign_command(one, None)


REFUSED: dict[str, tuple[Callable[[Post], tuple[ControlCommand, bytes]], str, str]] = {
    "a changed signature": (changed_signature, "bad-signature", "the signature does not fit"),
    "a changed payload": (changed_payload, "bad-signature", "the signature does not fit"),
    "another worker's": (
        with_claims(audience=lambda post: format_audience(post.app.name, "w2")),
        "wrong-audience",
        "signed for another inbox",
    ),
    "another application's": (
        with_claims(audience=lambda _post: format_audience("other", INBOX)),
        "wrong-audience",
        "signed for another inbox",
    ),
    "one whose time is over": (
        with_claims(issued=lambda _p: time.time() - 31, expires=lambda _p: time.time() - 1),
        "expired",
        "its time is over",
    ),
    "one that lives for too long": (
        with_claims(expires=lambda _p: time.time() + 3600),
        "too-long-lived",
        "longer than 60 s",
    ),
    "one from the future": (
        with_claims(issued=lambda _p: time.time() + 20),
        "not-yet",
        "the clocks of sender and worker differ",
    ),
    "a stranger's": (of_a_stranger, "unknown-issuer", "celery5 keys trust"),
    "one of a denied key": (denied, "revoked", "denylist"),
    "one of a denied key, with the other signature": (denied_and_flipped, "revoked", "denylist"),
    "one with a certificate of no version": (of_no_version, "unknown-issuer", "not a valid X509 version"),
    "one too large": (oversized, "oversized", "larger than 65536 bytes"),
    "an unsigned one": (unsigned, "unsigned", "takes signed commands only"),
    "noise": (bytes_of(b"\x00\xff noise"), "malformed", "no command of ours"),
    "nothing": (bytes_of(b""), "malformed", "no command of ours"),
    "one with no algorithm": (
        bytes_of(b"eyJhbGciOiJub25lIn0.e30."),  # {"alg":"none"}, {}
        "malformed",
        "no command of ours",
    ),
}


@pytest.mark.parametrize(("forge", "reason", "why"), REFUSED.values(), ids=REFUSED)
async def test_invalid_command_is_refused_logged_counted_and_answered(
    keyed: App,
    redis_client: "redis.Redis",
    tmp_path: Path,
    forge: Callable[[Post], tuple[ControlCommand, bytes]],
    reason: str,
    why: str,
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        before = await post.stats()
        one, sealed = forge(post)
        answer = await post.sent(one, sealed)
        assert (answer.ok, answer.reason) == (False, reason)
        assert why in answer.why
        keyed.control.keyring.renew()  # whose key was denied signs with another one
        after = await post.stats()
        assert after["queues"] == {"default": "read"}
        assert after["commands"][reason] == before["commands"].get(reason, 0) + 1
        assert redis_client.exists(keyed.keys.nonce(one.id)) == 0
        await until(lambda: [line["reason"] for line in post.lines.of("inbox:command-refused")] == [reason])
        assert redis_client.xlen(keyed.keys.inbox(INBOX)) == 0


async def test_a_command_in_order_is_done_and_counted(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        one = pauses(keyed)
        answer = await post.sent(one, signed(keyed, one))
        assert answer.ok, answer
        told = await post.stats()
        assert told["queues"] == {"default": "paused"}
        assert told["commands"] == {"done": 1}
        await until(lambda: post.done() >= 1)
        assert post.lines.of("inbox:command-executed")[0]["sender"] == "the test"


async def test_a_replayed_command_is_refused_whatever_redis_has_lost_of_it(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        one = pauses(keyed)
        sealed = signed(keyed, one)
        assert (await post.sent(one, sealed)).ok
        await keyed.control.asend("resume-queue", {"queue": "default"}, to=INBOX)
        for forget in (False, True):
            if forget:
                redis_client.delete(keyed.keys.nonce(one.id))
            answer = await post.sent(one, sealed)
            assert (answer.ok, answer.reason) == (False, "replayed")
        told = await post.stats()
        assert told["queues"] == {"default": "read"}
        assert told["commands"]["replayed"] == 2


async def test_a_replay_does_not_hide_the_answer_from_whoever_waits_for_it(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        one = pauses(keyed)
        sealed = signed(keyed, one)
        put(redis_client, keyed, one, sealed)
        put(redis_client, keyed, one, sealed)
        await until(lambda: len(post.lines.of("inbox:command-refused")) == 1)
        assert (await forging.answer(redis_client, keyed, one)).ok


async def test_keys_are_replaced_denied_and_trusted_without_a_restart(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    stranger = Keyring(tmp_path / "another host", owner="shop")
    async with posted(keyed, redis_client, tmp_path) as post:

        async def says(signer: Any) -> str:
            one = order(keyed, "ping")
            answer = await post.sent(one, sign_command(one, signer))
            return answer.reason or "done"

        ours = keyed.control.keyring
        old = ours.get_signer()
        assert await says(old) == "done"
        assert await says(stranger.get_signer()) == "unknown-issuer"
        ours.trust_file(stranger.folder / "ca.pem")
        assert await says(stranger.get_signer()) == "done"
        new = ours.renew(authority=True)
        assert new.key != old.key
        assert new.chain != old.chain
        assert await says(new) == "done"
        assert await says(old) == "done"  # until it is denied
        ours.revoke(fingerprint(old.chain[0]))
        assert await says(old) == "revoked"
        assert await says(new) == "done"
        (authority,) = parse_certificates((stranger.folder / "ca.pem").read_bytes())
        ours.revoke(fingerprint(authority))
        assert await says(stranger.get_signer()) == "revoked"


async def test_keys_that_others_may_read_are_not_believed(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        one = order(keyed, "ping")
        sealed = signed(keyed, one)
        keyed.control.keyring.folder.chmod(0o755)
        answer = await post.sent(one, sealed)
        assert answer.reason == "no-keys"
        assert "chmod 700" in answer.why
        keyed.control.keyring.folder.chmod(0o700)


async def test_a_denylist_that_cannot_be_read_refuses_all_and_ends_nobody(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        one = pauses(keyed)
        sealed = signed(keyed, one)
        (keyed.control.keyring.folder / "revoked").write_bytes(b"\xff\xfe")
        assert (await post.sent(one, sealed)).reason == "no-keys"


async def test_a_flood_of_refusals_is_answered_and_counted_and_the_log_bounded(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        many = [order(keyed, "ping") for _ in range(200)]
        for answer_id in many:
            put(redis_client, keyed, answer_id, b"noise")
        for answer_id in many:
            assert (await forging.answer(redis_client, keyed, answer_id)).reason == "malformed"
        told = await post.stats()
        assert told["commands"]["malformed"] == 200
        assert told["commands"]["untold"] == 200 - len(post.lines.of("inbox:command-refused"))


async def test_a_command_for_a_worker_that_is_down_is_done_when_it_returns(
    keyed: App, redis_client: "redis.Redis"
) -> None:
    (silent,) = await keyed.control.asend("pause-queue", {"queue": "default"}, to=INBOX, timeout=0.05)
    assert (silent.ok, silent.reason) == (False, "no-answer")
    async with working(keyed, name=INBOX):
        with trio.fail_after(30):
            while True:
                (reply,) = await keyed.control.asend("stats", to=INBOX)
                if reply.answer["queues"] == {"default": "paused"}:
                    break


async def test_a_command_that_expired_while_its_worker_was_down_is_refused(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    one = pauses(keyed, expires=time.time() + 0.05)
    put(redis_client, keyed, one, signed(keyed, one))
    await trio.sleep(0.06)
    async with posted(keyed, redis_client, tmp_path) as post:
        answer = await forging.answer(redis_client, keyed, one)
        assert (answer.ok, answer.reason) == (False, "expired")
        assert (await post.stats())["queues"] == {"default": "read"}


async def test_of_two_processes_of_one_name_one_does_a_command(
    keyed: App, redis_client: "redis.Redis"
) -> None:
    with Lines() as lines:
        async with working(keyed, name=INBOX), working(keyed, name=INBOX):
            for _ in range(20):
                (reply,) = await keyed.control.asend("ping", to=INBOX)
                assert reply.ok, reply
            await until(lambda: len(lines.of("inbox:command-executed")) == 20)
            assert lines.of("inbox:command-refused") == []


async def test_without_signatures_bare_commands_are_taken_and_the_log_says_what_is_lost(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    app = App(app_name, broker=url, inbox_signatures=False, keys=str(tmp_path / "none"))

    @app.task
    async def nothing() -> None: ...

    with Lines() as lines:
        async with working(app, name=INBOX):
            (reply,) = await app.control.asend("ping")
            assert reply.ok, reply
            one = order(app, "ping", audience="another")
            put(redis_client, app, one, sign_command(one, None))
            assert (await forging.answer(redis_client, app, one)).reason == "wrong-audience"
    (warned,) = lines.of("inbox:signatures-disabled")
    assert "can command this worker" in warned["lost"]
    assert not (tmp_path / "none").exists()
    app.close()


async def test_without_an_inbox_nothing_is_taken_and_the_log_says_what_is_lost(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, inbox=False)

    @app.task
    async def nothing() -> None: ...

    with Lines() as lines:
        # One command waits when it begins, another one comes while it works.
        (before,) = await app.control.asend("ping", to=INBOX, timeout=0.1)
        async with working(app, name=INBOX):
            (reply,) = await app.control.asend("ping", timeout=0.1)
            assert (before.reason, reply.reason) == ("no-answer", "no-answer")
            assert redis_client.xlen(app.keys.inbox(INBOX)) == 2
    (warned,) = lines.of("inbox:disabled")
    assert "retry-boot-step" in warned["lost"]
    app.close()


async def test_a_clock_that_is_no_number_is_refused(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        for value in (math.nan, math.inf):
            one = pauses(keyed, expires=value)
            answer = await post.sent(one, signed(keyed, one))
            assert answer.ok is False
        assert (await post.stats())["queues"] == {"default": "read"}


async def test_routine_commands_are_debug_lines_and_all_others_are_told(
    keyed: App, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    async with posted(keyed, redis_client, tmp_path) as post:
        for command, parameters in (
            ("ping", {}),
            ("check-expired", {"checks": []}),
            ("pause-queue", {"queue": "default"}),
            ("ping", {"wrong": 1}),
        ):
            await keyed.control.asend(command, parameters, to=INBOX)
        await until(lambda: post.done() >= 4)
        told = [(line["command"], line["level"]) for line in post.lines.of("inbox:command-executed")]
    assert told == [
        ("ping", "debug"),
        ("check-expired", "debug"),
        ("pause-queue", "info"),
        ("ping", "warning"),
    ]
