"""Bad messages: what a producer sends wrongly is refused before it leaves; what a worker gets is dead-lettered."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import redis
import trio

from celery5 import App, TaskFailed
from celery5.broker.calls import jobs, queues
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BadArguments, BlockingInEventLoop, MessageTooLarge, UnknownTask
from celery5.protocol.job.messages import Document, read_document
from tests.story.cli.commands import Serving, until
from tests.watched import watched

SHOP = """
from celery5 import App

app = App({name!r}, broker={url!r}, unknown_task_grace=0)

@app.task
async def add(a: int, b: int) -> int:
    return a + b

@app.task
async def echo(value):
    return value

@app.task
def thing():
    return object()

@app.task
async def circle():
    around = []
    around.append(around)
    return around

@app.task
async def flood():
    return "x" * 2_000_000
"""


@dataclass
class Shop:
    """An application, its module, and the one worker process that all tests here send their mistakes to."""

    module: ModuleType
    worker: Serving
    client: "redis.Redis"

    @property
    def app(self) -> App:
        app = self.module.app
        assert isinstance(app, App)
        return app

    @property
    def stream(self) -> str:
        return self.app.queue("default").stream

    def graves(self) -> list[Document]:
        """The documents in the dead-letter queue."""
        return [
            read_document(raw)
            for _, _, raw in self.app.perform(jobs.list_dead_jobs(self.app.queue("default"), count=1000))
        ]

    def is_well(self) -> None:
        """The worker is alive, does a good job, and has nothing left to do: nothing was lost on the way."""
        assert self.module.add.delay(2, 3).get() == 5
        depth = self.app.perform(queues.get_queue_depth(self.app.queue("default")))
        assert (depth.waiting, depth.running, depth.scheduled) == (0, 0, 0)
        assert self.worker.process.poll() is None
        assert self.worker.err == ""


def imported(source: str, name: str) -> ModuleType:
    """The module that the worker loads, as a producer has it: under the same name, so that its tasks are the same."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    name = f"shop_{uuid4().hex[:8]}"
    source = SHOP.format(name=name, url=server.url)
    folder = tmp_path_factory.mktemp(name)
    (folder / f"{name}.py").write_text(source)
    module = imported(source, name)
    with (
        watched(server),
        redis.Redis.from_url(server.url) as client,
        Serving("-A", name, "worker", "start", cwd=folder) as worker,
    ):
        yield Shop(module, worker.ready(), client)
        module.app.close()
    del sys.modules[name]


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


async def _noop() -> None: ...


# What a producer sends: refused before anything leaves


@pytest.fixture
def nothing_is_sent(shop: Shop) -> Iterator[None]:
    """After the test no job has been added to the queue."""
    before = shop.client.xinfo_stream(shop.stream)["entries-added" if _counts(shop) else "last-generated-id"]
    yield
    after = shop.client.xinfo_stream(shop.stream)["entries-added" if _counts(shop) else "last-generated-id"]
    assert after == before
    shop.is_well()


def _counts(shop: Shop) -> bool:
    return "entries-added" in shop.client.xinfo_stream(shop.stream)  # since Redis 7.0


@pytest.mark.usefixtures("nothing_is_sent")
def test_a_task_that_a_producer_does_not_know(shop: Shop) -> None:
    name = shop.module.add.name
    with pytest.raises(UnknownTask) as caught:
        shop.app.signature(name.replace(".add", ".ad"), 1, 2)
    assert f"did you mean {name!r}?" in one_line(caught.value)


@pytest.mark.usefixtures("nothing_is_sent")
def test_an_argument_of_a_wrong_type(shop: Shop) -> None:
    with pytest.raises(TypeError) as caught:
        shop.module.add.delay(1, "two")
    text = one_line(caught.value)
    assert isinstance(caught.value, BadArguments)
    assert all(word in text for word in (shop.module.add.name, "'b'", "int", "str"))


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3)])
@pytest.mark.usefixtures("nothing_is_sent")
def test_arguments_too_few_or_too_many(shop: Shop, args: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=shop.module.add.name) as caught:
        shop.module.add.delay(*args)
    one_line(caught.value)


@pytest.mark.parametrize("value", [object(), {1j: 2}, lambda: None, {"deep": [object()]}, "\ud800"])
@pytest.mark.usefixtures("nothing_is_sent")
def test_an_argument_that_cannot_be_encoded(shop: Shop, value: object) -> None:
    with pytest.raises(TypeError, match=shop.module.echo.name) as caught:
        shop.module.echo.delay(value)
    one_line(caught.value)


@pytest.mark.usefixtures("nothing_is_sent")
def test_a_message_over_the_limit(shop: Shop) -> None:
    with pytest.raises(MessageTooLarge) as caught:
        shop.module.echo.delay("x" * (1 << 20))
    assert "over the limit of 1048576" in one_line(caught.value)
    assert "message_limit" in str(caught.value)
    with pytest.raises(MessageTooLarge):
        shop.app.send_many([shop.module.echo.s("good"), shop.module.echo.s("x" * (1 << 20))])


def test_the_limit_of_a_message_is_a_setting() -> None:
    app = App("shop", message_limit=2000)
    with pytest.raises(MessageTooLarge, match="over the limit of 2000"):
        app.task(_noop_of).job("x" * 2000)
    app.task(_noop_of).job("x" * 1000)


async def _noop_of(_value: str) -> None: ...


@pytest.mark.usefixtures("nothing_is_sent")
def test_delay_inside_a_trio_loop(shop: Shop) -> None:
    async def call() -> None:
        shop.module.add.delay(1, 2)

    with pytest.raises(BlockingInEventLoop, match="await adelay") as caught:
        trio.run(call)
    assert "trio" in one_line(caught.value)


@pytest.mark.usefixtures("nothing_is_sent")
def test_delay_inside_an_asyncio_loop(shop: Shop) -> None:
    async def call() -> None:
        shop.module.add.delay(1, 2)

    with pytest.raises(BlockingInEventLoop, match="await adelay") as caught:
        asyncio.run(call())
    assert "asyncio" in one_line(caught.value)


# What a worker gets: dead-lettered with the reason, and the worker lives


def dead_letter(shop: Shop, send: Callable[[], object]) -> Document:
    """The document of the one job that `send` brings into the dead-letter queue."""
    before = len(shop.graves())
    send()
    until(lambda: len(shop.graves()) == before + 1)
    return shop.graves()[-1]


def test_a_task_that_the_worker_does_not_know(shop: Shop) -> None:
    other = App(shop.app.name, broker=shop.app.settings.broker)
    ghost = other.task(name="ghost")(_noop)
    with closing(other), pytest.raises(TaskFailed) as caught:
        ghost.delay().get()
    assert caught.value.reason == "unknown-task"
    assert "no task 'ghost' on this worker" in one_line(caught.value)
    assert shop.graves()[-1].id == caught.value.job_id
    shop.is_well()


def test_arguments_that_do_not_fit_the_workers_version_of_the_task(shop: Shop) -> None:
    other = App(shop.app.name, broker=shop.app.settings.broker)
    older = other.task(name=shop.module.add.name)(_noop_of)
    with closing(other), pytest.raises(TaskFailed) as caught:
        older.delay("one").get()
    assert caught.value.reason == "bad-arguments"
    assert shop.module.add.name in one_line(caught.value)
    shop.is_well()


@pytest.mark.parametrize(
    "fields",
    [
        {"job": b"\xff\x00 no JSON at all"},
        {"job": b""},
        {"job": b"[1, 2, 3]"},
        {"job": b'{"v": 1}'},
        {"job": b'{"v": 99, "id": "a", "task": "b"}'},
        {"job": b'{"v": 1, "id": "", "task": ""}'},
        {"job": b'{"v": 1, "id": "\xff", "task": "b"}'},
        {"something": b"else"},
    ],
    ids=["bytes", "nothing", "list", "half", "version", "empty", "no UTF-8", "no job"],
)
def test_a_corrupt_command_on_the_stream(shop: Shop, fields: dict[Any, Any]) -> None:
    document = dead_letter(shop, lambda: shop.client.xadd(shop.stream, fields))
    assert (document.state, document.reason) == ("DEAD", "corrupt")
    assert document.failure is not None
    assert document.failure.message
    newest: Any = shop.client.xrevrange(shop.app.queue("default").dead, count=1)
    assert newest[0][1][b"job"] == fields.get("job", b""), (
        "the message itself is kept, for whoever looks into it"
    )
    shop.is_well()


@pytest.mark.parametrize("task", ["thing", "circle"])
def test_a_result_that_cannot_be_encoded(shop: Shop, task: str) -> None:
    with pytest.raises(TaskFailed) as caught:
        getattr(shop.module, task).delay().get()
    assert caught.value.reason == "unencodable-result"
    assert caught.value.attempt == 1, "trying again would not help"
    assert "cannot be encoded" in one_line(caught.value)
    shop.is_well()


def test_a_result_over_the_limit(shop: Shop) -> None:
    with pytest.raises(TaskFailed) as caught:
        shop.module.flood.delay().get()
    assert caught.value.reason == "result-too-large"
    assert "return a reference" in one_line(caught.value)
    shop.is_well()


def test_all_of_it_at_once_costs_no_good_job(shop: Shop) -> None:
    before = len(shop.graves())
    good = []
    for number in range(50):
        good += shop.app.send_many([shop.module.add.s(number, 1), shop.module.thing.s()])[:1]
        shop.client.xadd(shop.stream, {"job": b"nonsense"})
    assert [job.get() for job in good] == list(range(1, 51))
    until(lambda: len(shop.graves()) == before + 100)
    shop.is_well()
