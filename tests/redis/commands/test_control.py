"""Control: what workers do when they are told to, and what each of them answers."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, BootStep, Misconfigured, TaskRevoked, agather
from celery5.broker.calls import commands
from celery5.commands.control import find_failures
from celery5.errors import BrokerUnavailable, CommandRefused, UnknownQueue
from celery5.protocol.commands.definitions import list_commands
from celery5.results import JobDetails
from tests.redis.commands.forging import order, put, signed
from tests.redis.worker.workers import Lines, until, working


async def told(app: App, command: str, to: str = "w1", **parameters: Any) -> Any:
    """What one worker answers, which must do it."""
    (reply,) = await app.control.asend(command, parameters, to=to, timeout=30)
    assert reply.ok, reply
    return reply.answer


def with_tasks(app: App) -> tuple[Any, Any]:
    """A job that ends at once, and one that does not."""

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    async def stay() -> None:
        await trio.sleep_forever()

    return double, stay


async def test_each_worker_that_lives_answers(app: App) -> None:
    with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2"):
        assert await app.control.aworkers() == ("w1", "w2")
        replies = await app.control.aping()
        assert [(reply.worker, reply.ok) for reply in replies] == [("w1", True), ("w2", True)]
        assert replies[0].answer["pong"].startswith("w1:")
        with trio.fail_after(30):
            answered = False
            while not answered:  # on a machine that stands still even one who lives may need longer than that
                gone, lives = await app.control.asend("ping", to=["w1", "nobody"], timeout=0.1)
                assert (gone.worker, gone.ok, gone.reason) == ("nobody", False, "no-answer")
                assert "within 60 s of the sending" in gone.why
                answered = lives.ok


async def test_a_queue_is_paused_and_resumed_from_python_while_no_worker_lives(app: App) -> None:
    with_tasks(app)
    assert await app.control.asend("pause-queue", {"queue": "default"}) == []
    assert await trio.to_thread.run_sync(lambda: app.info().queues["default"].paused)
    async with working(app, name="w1"):
        assert (await told(app, "stats"))["queues"] == {"default": "paused"}
    assert await trio.to_thread.run_sync(lambda: app.control.send("resume-queue", {"queue": "default"})) == []
    async with working(app, name="w1"):
        assert (await told(app, "stats"))["queues"] == {"default": "read"}
    with pytest.raises(UnknownQueue, match="did you mean 'default'"):
        await app.control.asend("pause-queue", {"queue": "defualt"})
    with pytest.raises(CommandRefused, match="pause-queue does not take 'que'"):
        await app.control.asend("pause-queue", {"queue": "default", "que": 1})


async def test_a_worker_has_a_handler_for_each_command_that_is_defined_for_workers(app: App) -> None:
    with_tasks(app)
    async with working(app, name="w1"):
        (reply,) = await app.control.asend("0", to="w1")
    assert frozenset(reply.why.partition("; known: ")[2].split(", ")) == list_commands("worker")


async def test_plain_python_and_asyncio_send_commands_too(app: App) -> None:
    with_tasks(app)

    async def ask() -> list[Any]:
        return await app.control.aping()

    async with working(app, name="w1"):
        (reply,) = await trio.to_thread.run_sync(app.control.ping)
        assert reply.ok
        (reply,) = await trio.to_thread.run_sync(lambda: asyncio.run(ask()))
        assert reply.ok
        assert await trio.to_thread.run_sync(app.control.workers) == ("w1",)


async def test_a_worker_tells_how_it_does_and_what_it_runs(app: App) -> None:
    @app.task
    async def stay(order: int, token: str) -> None:
        await trio.sleep_forever()

    async with working(app, name="w1"):
        handle = await stay.adelay(7, "hush")
        with trio.fail_after(30):
            while not (running := await told(app, "active")):
                pass
        assert running[0]["arguments"] == 'order=7, token="***"'
        assert [(job["id"], job["task"], job["queue"]) for job in running] == [
            (handle.id, stay.name, "default")
        ]
        stats = await told(app, "stats")
        assert stats["running"] == 1
        assert stats["queues"] == {"default": "read"}
        assert stats["slots"]["trio"]["executing"] == 1
        assert stats["memory"] > 1_000_000
        await told(app, "revoke", id=handle.id)
        with pytest.raises(TaskRevoked):
            await handle.aget(timeout=30)
        (refused,) = await app.control.asend("revoke", {"id": handle.id}, to="w1")
        assert "celery5 task revoke" in refused.why


async def test_a_paused_queue_is_read_by_nobody_also_not_by_workers_that_begin_later(app: App) -> None:
    double, _ = with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2"):
        replies = await app.control.asend("pause-queue", {"queue": "default"})
        assert [reply.answer for reply in replies] == [{"queue": "default", "state": "paused"}] * 2
    async with working(app, name="w1"):
        handle = await double.adelay(2)
        assert (await told(app, "stats"))["queues"] == {"default": "paused"}
        assert await handle.astatus() == "SENT"
        await told(app, "resume-queue", queue="default")
        assert await handle.aget(timeout=30) == 4


def come_too_late(app: App, client: "redis.Redis") -> None:
    """A command whose time is over: the worker then asks what is paused."""
    late = order(app, "ping", issued=time.time() - 31, expires=time.time() - 1)
    put(client, app, late, signed(app, late))


async def test_a_worker_that_begins_warns_once_of_its_queues_that_are_paused(
    app: App, redis_client: "redis.Redis"
) -> None:
    double, _ = with_tasks(app)
    for queue in ("default", "another"):
        await app.aperform(commands.pause_queue(app.keys, queue))
    with Lines() as lines:
        async with working(app, name="w1"):
            await until(lambda: bool(lines.of("queue:paused")))
            come_too_late(app, redis_client)  # a command that came too late has it look again: nothing is new
            await until(lambda: bool(lines.of("inbox:command-refused")))
            await told(app, "resume-queue", queue="default")
            assert await (await double.adelay(2)).aget(timeout=30) == 4
            await app.aperform(commands.pause_queue(app.keys, "default"))
            come_too_late(app, redis_client)
            await until(lambda: len(lines.of("queue:paused")) > 1)
            await told(app, "resume-queue", queue="default")
    first, second = lines.of("queue:paused")
    assert (first["level"], first["queues"], second["queues"]) == ("warning", ["default"], ["default"])
    assert "queue resume" in first["why"]


async def test_a_queue_that_is_paused_is_seen_to_be_also_before_anything_was_sent(app: App) -> None:
    assert not (await app.ainfo()).queues
    await app.aperform(commands.pause_queue(app.keys, "default"))
    assert (await app.ainfo("default")).queues["default"].paused
    assert [(queue.queue, queue.paused) for queue in (await app.ainfo()).queues.values()] == [
        ("default", True)
    ]
    await app.aperform(commands.resume_queue(app.keys, "default"))
    assert not (await app.ainfo()).queues


async def test_workers_that_do_not_read_a_queue_make_its_pause_no_failure(app: App) -> None:
    with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2", queues=["mail"]):
        for command in ("pause-queue", "resume-queue"):
            replies = await app.control.asend(command, {"queue": "default"})
            assert [(reply.worker, reply.ok, reply.concerned) for reply in replies] == [
                ("w1", True, True),
                ("w2", False, False),
            ]
            assert find_failures(replies) == []
            (entry, *_) = await app.audit.alist()
            assert (entry.action, entry.count, entry.outcome) == (f"worker:{command}", 1, "done")
        for name in ("pause-queue", "resume-queue"):
            with pytest.raises(UnknownQueue, match="did you mean 'default'"):
                await app.control.asend(name, {"queue": "defualt"})
        replies = await app.control.asend("pause-queue", {"queue": "default"}, to=["w1", "gone"], timeout=0.5)
        assert [failure.worker for failure in find_failures(replies)] == ["gone"]
        (entry, *_) = await app.audit.alist()
        assert (entry.count, entry.outcome.startswith("failed: gone: ")) == (1, True)


CHANGING: dict[str, dict[str, Any]] = {
    "pause-queue": {"queue": "default"},
    "resume-queue": {"queue": "default"},
    "budget": {"kind": "trio", "minimum": 1, "maximum": 7},
    "prefetch": {"factor": 2.0},
    "shutdown": {},
}
"""Commands that change a worker, each with parameters that a worker accepts."""


@pytest.mark.parametrize("command", CHANGING)
async def test_a_command_that_is_done_is_done_in_the_audit_trail(app: App, command: str) -> None:
    with_tasks(app)
    async with working(app, name="w1"):
        await told(app, command, **CHANGING[command])
        (entry,) = await app.audit.alist()
    assert (entry.action, entry.target, entry.count, entry.outcome) == (f"worker:{command}", "w1", 1, "done")


async def test_a_job_that_one_worker_stops_is_no_failure_of_the_others(app: App) -> None:
    _, stay = with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2", queues=["mail"]):
        handle = await stay.adelay()
        with trio.fail_after(30):
            while await handle.astatus() != "EXECUTING":
                await trio.sleep(0.05)
        replies = await app.control.asend("revoke", {"id": handle.id}, timeout=30)
        assert [(reply.worker, reply.ok) for reply in replies] == [("w1", True), ("w2", False)], replies
        assert find_failures(replies) == []
        (entry,) = await app.audit.alist()
        assert (entry.action, entry.count, entry.outcome) == ("worker:revoke", 1, "done")


async def test_a_queue_is_paused_for_one_worker_alone(app: App, redis_client: "redis.Redis") -> None:
    double, _ = with_tasks(app)
    async with working(app, name="w1"):
        await told(app, "pause-queue", queue="default", here=True)
        handle = await double.adelay(2)
        assert (await told(app, "stats"))["queues"] == {"default": "paused here"}
        async with working(app, name="w2"):
            assert await handle.aget(timeout=30) == 4
        await told(app, "resume-queue", queue="default")
        assert await (await double.adelay(3)).aget(timeout=30) == 6
    assert redis_client.exists(app.keys.paused) == 0


async def test_a_job_runs_on_the_worker_that_was_named(app: App) -> None:
    double, _ = with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2"):
        for name in ("w1", "w2"):
            handle = await app.control.arun(double.s(4), to=name)
            assert await handle.aget(timeout=30) == 8
            assert (await told(app, "stats", to=name))["commands"]["done"] >= 1
        with pytest.raises(CommandRefused, match="no answer"):
            await app.control.arun(double.s(4), to="nobody", timeout=0.05)
        with pytest.raises(Misconfigured, match="countdown"):
            await app.control.arun(double.options(countdown=5).s(4), to="w1")


async def test_no_other_worker_runs_what_was_sent_to_one_whatever_it_could_do(app: App) -> None:
    double, _ = with_tasks(app)
    async with working(app, name="w1"), working(app, name="w2"), working(app, name="w3"):
        # Both ways, several at once: a worker that takes what is another's would have some of them.
        for name in ("w1", "w3"):
            sent = [await app.control.arun(double.s(number), to=name) for number in range(12)]
            assert await agather(sent, timeout=30) == [2 * number for number in range(12)]
            ran = {(await story(app, job.id)).worker.partition(":")[0] for job in sent}
            assert ran == {name}
            done = {
                who: (await told(app, "stats", to=who))["commands"].get("done", 0)
                for who in ("w1", "w2", "w3")
            }
            assert done["w2"] <= 2  # the questions of this test


async def test_a_command_for_a_worker_that_is_gone_is_no_other_workers(
    app: App, redis_client: "redis.Redis"
) -> None:
    double, _ = with_tasks(app)
    inbox = app.keys.inbox("w2")
    async with working(app, name="w1"):
        async with working(app, name="w2"):
            pass
        with pytest.raises(CommandRefused, match="no answer"):
            await app.control.arun(double.s(1), to="w2", timeout=0.5)
        assert (await told(app, "stats", to="w1"))["commands"].get("done", 0) <= 1
        assert redis_client.xlen(inbox) == 1  # it waits where it was sent


async def story(app: App, job_id: str) -> JobDetails:
    found = await app.afind(job_id)
    assert found is not None
    return found


async def test_a_job_is_not_run_where_it_cannot_be(app: App, url: str) -> None:
    double, _ = with_tasks(app)
    other = App(app.name, broker=url)

    @other.task(name="strange")
    async def strange() -> None: ...

    async with working(app, name="w1"):
        with pytest.raises(CommandRefused, match="no task 'strange' on this worker"):
            await other.control.arun(strange.s(), to="w1")
        with pytest.raises(CommandRefused, match="does not read queue 'elsewhere'"):
            await app.control.arun(double.options(queue="elsewhere").s(1), to="w1")
    other.close()


async def test_a_worker_ends_when_it_is_told_to(app: App) -> None:
    with_tasks(app)
    async with working(app, name="w1") as one:
        assert await told(app, "shutdown") == {"how": "warm", "running": 0}
        with trio.fail_after(30):
            await one.done.wait()


@pytest.mark.parametrize(
    ("command", "parameters", "why"),
    [
        ("pnig", {}, "did you mean 'ping'?"),
        ("ping", {"x": 1}, "ping does not take 'x': it takes no parameters"),
        ("pause-queue", {"queue": "default", "here": "yes"}, "give true or false"),
        ("shutdown", {"how": "now"}, "give warm"),
        ("revoke", {}, "give a text"),
        ("run-task", {"job": "{}"}, "its job is none"),
        ("retry-boot-step", {"step": "inbox"}, "mandatory"),
    ],
)
async def test_a_command_that_makes_no_sense_is_refused_with_a_reason(
    app: App, command: str, parameters: dict[str, Any], why: str
) -> None:
    with_tasks(app)
    async with working(app, name="w1"):
        (reply,) = await app.control.asend(command, parameters, to="w1")
        assert (reply.ok, reply.reason) == (False, "refused")
        assert why in reply.why


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"expires": 61}, "at most 60"),
        ({"to": []}, "to is"),
        ({"to": [1]}, "to is"),
    ],
)
def test_what_cannot_be_sent_is_told_at_once(app: App, said: dict[str, Any], why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        app.control.send("ping", **said)


def test_where_nobody_lives_nobody_answers(app: App) -> None:
    assert app.control.ping() == []


async def test_a_boot_step_that_failed_is_tried_again_on_command(url: str, app_name: str) -> None:
    tries: list[bool] = []
    broken = True

    async def fill() -> None:
        tries.append(broken)
        if broken:
            raise ValueError("no cache")

    app = App(
        app_name, broker=url, bootsteps=[BootStep("cache", fill, optional=True, retry={"max_retries": 0})]
    )
    with_tasks(app)
    async with working(app, name="w1"):
        await until(lambda: tries == [True])
        broken = False
        with trio.fail_after(30):
            while True:  # the failure is noted a moment after it happened
                (reply,) = await app.control.asend("retry-boot-step", {"step": "cache"}, to="w1")
                if reply.ok:
                    break
        assert reply.answer["step"] == "cache"
        await until(lambda: tries == [True, False])
    app.close()


async def test_a_configuration_is_read_again_on_command(url: str, app_name: str, tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text("concurrency = 7\n")
    app = App(app_name, broker=url, config=str(file))
    with_tasks(app)

    async def slots() -> int:
        try:
            return int((await told(app, "stats"))["slots"]["trio"]["current"])
        except BrokerUnavailable:  # here it is asked over the connection of the worker that begins again
            return 0

    async with working(app, name="w1"):
        file.write_text("concurrency = 8\n")
        assert await told(app, "reload") in ({"changed": ["concurrency"]}, {"changed": []})
        with trio.fail_after(30):
            while await slots() != 8:
                await trio.sleep(0.05)
        (refused,) = await app.control.asend("ping", {"x": 1}, to="w1")
        assert refused.reason == "refused"
    app.close()


async def test_a_worker_is_known_by_its_full_name_too_and_a_misspelt_one_is_told(app: App) -> None:
    with_tasks(app)
    async with working(app, name="web"), working(app, name="mail"):
        full = (await told(app, "ping", to="web"))["pong"]
        assert full.startswith("web:")
        (reply,) = await app.control.asend("ping", to=[full, "web"])
        assert (reply.worker, reply.ok) == ("web", True)
        (plain,) = await trio.to_thread.run_sync(lambda: app.control.ping(to=full))
        assert (plain.worker, plain.ok) == ("web", True)
        for wrong in ("wbe", "web:Former"):
            (silent,) = await app.control.asend("ping", to=wrong, timeout=0.05)
            assert f"no worker {wrong!r} lives: did you mean 'web'?" in silent.why
        (silent,) = await app.control.asend("ping", to="zzz", timeout=0.05)
        assert "those that do: mail, web" in silent.why


async def test_a_shutdown_that_nobody_answered_does_not_end_the_next_worker_of_that_name(app: App) -> None:
    with_tasks(app)
    (silent,) = await app.control.asend("shutdown", to="w1", timeout=0.05)
    assert silent.reason == "no-answer"
    assert "it does not do" in silent.why
    async with working(app, name="w1"):
        with trio.fail_after(30):
            while not (refused := (await told(app, "stats"))["commands"].get("expired")):
                pass
        assert refused == 1
    kept = await app.control.asend("stats", to="w1", timeout=0.05)
    assert "within 60 s of the sending" in kept[0].why
