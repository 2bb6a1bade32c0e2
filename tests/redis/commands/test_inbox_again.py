"""Inbox again: what a process was commanded it remembers when it starts again."""

import time
from pathlib import Path

import redis
import trio

from celery5 import App
from celery5.commands.declaration import RESERVED_COMMANDS
from celery5.protocol.commands.definitions import COMMAND_DEFINITIONS
from tests.redis.commands.forging import INBOX, answer, order, put, signed
from tests.redis.commands.test_inbox import pauses, posted
from tests.redis.worker.workers import until

IDEMPOTENT = {definition.name for definition in COMMAND_DEFINITIONS.values() if definition.is_idempotent}


async def test_a_command_that_came_too_late_has_its_worker_ask_what_is_paused(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keyed = App(app_name, broker=url, keys=str(tmp_path / "keys"))

    @keyed.task
    async def nothing() -> None: ...

    async with posted(keyed, redis_client, tmp_path) as post:
        redis_client.sadd(keyed.keys.paused, "default")
        assert (await post.stats())["queues"] == {"default": "read"}
        one = pauses(keyed, expires=time.time() - 0.1)
        assert (await post.sent(one, signed(keyed, one))).reason == "expired"
        with trio.fail_after(30):
            while (await post.stats())["queues"] != {"default": "paused"}:
                await trio.sleep(0.01)
    keyed.close()


async def test_a_replay_is_refused_also_by_the_next_incarnation_of_the_same_process(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    config = tmp_path / "celery5.toml"
    config.write_text("concurrency = 5")
    keyed = App(app_name, broker=url, keys=str(tmp_path / "keys"), config=str(config))

    @keyed.task
    async def nothing() -> None: ...

    async with posted(keyed, redis_client, tmp_path) as post:
        one = pauses(keyed)
        sealed = signed(keyed, one)
        assert (await post.sent(one, sealed)).ok
        await keyed.control.asend("resume-queue", {"queue": "default"}, to=INBOX)
        config.write_text("concurrency = 33")
        assert (await keyed.control.asend("reload", to=INBOX))[0].answer == {"changed": ["concurrency"]}
        await until(lambda: bool(post.lines.of("worker:reload-started")))
        redis_client.delete(keyed.keys.nonce(one.id))
        assert (await post.sent(one, sealed)).reason == "replayed"
    keyed.close()


def test_only_routine_commands_with_reserved_names_are_not_noted() -> None:
    assert {
        definition.name for definition in COMMAND_DEFINITIONS.values() if definition.is_routine
    } & RESERVED_COMMANDS >= IDEMPOTENT


async def test_a_command_that_is_harmless_to_repeat_is_not_noted_on_the_disk(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keyed = App(app_name, broker=url, keys=str(tmp_path / "keys"))
    record = tmp_path / "keys" / "done"

    @keyed.task
    async def nothing() -> None: ...

    async with posted(keyed, redis_client, tmp_path):
        keyed.control.keyring.get_signer()
        before = record.read_bytes(), record.stat().st_ino
        for command in sorted(IDEMPOTENT):
            assert await keyed.control.asend(command, to=INBOX)
        assert (record.read_bytes(), record.stat().st_ino) == before
        assert (await keyed.control.asend("prefetch", to=INBOX))[0].ok
        assert record.read_bytes() != before[0]
    keyed.close()


async def test_a_replay_is_refused_also_by_the_next_process_of_the_same_name(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    """Whatever was deleted in Redis. And what was sent while no process of that name lived is done."""

    def process() -> App:
        app = App(app_name, broker=url, keys=str(tmp_path / "keys"))

        @app.task
        async def nothing() -> None: ...

        return app

    first, second = process(), process()
    async with posted(first, redis_client, tmp_path) as post:
        one = pauses(first)
        sealed = signed(first, one)
        assert (await post.sent(one, sealed)).ok
        await first.control.asend("resume-queue", {"queue": "default"}, to=INBOX)
    redis_client.delete(first.keys.nonce(one.id))
    meanwhile = order(first, "ping")
    put(redis_client, first, meanwhile, signed(first, meanwhile))
    async with posted(second, redis_client, tmp_path) as post:
        assert (await answer(redis_client, second, meanwhile)).ok
        assert (await post.sent(one, sealed)).reason == "replayed"
        assert (await post.stats())["queues"] == {"default": "read"}
    first.close()
    second.close()
