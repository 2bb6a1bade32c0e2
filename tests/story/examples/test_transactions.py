"""Transactions: a job is sent when its transaction was committed, and only then, also when somebody is killed
between."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.outbox import app
from celery5.examples.outbox.relay import relay
from celery5.examples.outbox.shop import place_order, send_receipt
from celery5.examples.outbox.table import opened

LIMIT = 20.0
STREAM = app.queue("default").stream
ORDER_AND_DIE = """
import os, signal, sys
from celery5.examples.outbox.shop import place_order
from celery5.examples.outbox.table import opened
place_order(opened(sys.argv[1]), "ada")
os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` holds, with a limit."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


@pytest.fixture
def shop(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The shop's database; the example's application uses a server of the test's own meanwhile."""
    before = app.settings.broker
    app.use_broker(own_server.url)
    db = opened(tmp_path / "shop.db")
    yield db
    db.close()
    app.use_broker(before)


@pytest.fixture
def start(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Starts relays, and ends those that are left."""
    started: list[subprocess.Popen[bytes]] = []

    def one() -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "celery5.examples.outbox.relay", str(tmp_path / "shop.db")]
        started.append(subprocess.Popen(words, env={**os.environ, "CELERY5_BROKER": own_server.url}))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait(LIMIT)


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(own_server.url) as one:
        yield one


def waiting(db: sqlite3.Connection) -> int:
    """How many jobs are in the outbox."""
    found: int = db.execute("SELECT count(*) FROM outbox").fetchone()[0]
    return found


def test_an_order_that_is_rolled_back_leaves_no_job(shop: sqlite3.Connection, client: "redis.Redis") -> None:
    with pytest.raises(TypeError):
        place_order(shop, 7)  # type: ignore[arg-type]  # the database takes it, the job does not
    assert shop.execute("SELECT count(*) FROM orders").fetchone() == (0,)
    assert (waiting(shop), relay(shop), client.exists(STREAM)) == (0, 0, 0)


def test_a_shop_that_is_killed_after_its_commit_has_sent_its_job_all_the_same(
    shop: sqlite3.Connection,
    tmp_path: Path,
    client: "redis.Redis",
    start: Callable[[], "subprocess.Popen[bytes]"],
) -> None:
    words = [sys.executable, "-c", ORDER_AND_DIE, str(tmp_path / "shop.db")]
    assert subprocess.run(words, check=False, timeout=LIMIT).returncode == -signal.SIGKILL
    assert (waiting(shop), client.exists(STREAM)) == (1, 0)
    start()
    wait_until(lambda: waiting(shop) == 0)
    assert client.xlen(STREAM) == 1


def test_a_relay_that_is_killed_between_sending_and_deleting_has_sent_its_jobs_once(
    shop: sqlite3.Connection, client: "redis.Redis", start: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    for customer in ("ada", "bob"):
        place_order(shop, customer)
    shop.execute("BEGIN IMMEDIATE")  # whoever holds this keeps the relay from deleting, not from reading
    first = start()
    wait_until(lambda: client.xlen(STREAM) == 2)
    first.kill()
    first.wait(LIMIT)
    shop.rollback()
    assert waiting(shop) == 2
    start()
    start()
    wait_until(lambda: waiting(shop) == 0)
    assert client.xlen(STREAM) == 2


def test_a_relay_waits_for_redis_and_goes_on(
    shop: sqlite3.Connection, own_server: EmbeddedServer, start: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    own_server.kill()
    place_order(shop, "ada")
    one = start()
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(1.0)
    assert waiting(shop) == 1
    own_server.revive()
    wait_until(lambda: waiting(shop) == 0)
    with redis.Redis.from_url(own_server.url) as client:
        assert client.xlen(STREAM) == 1


def test_the_relays_jobs_are_jobs_like_any_other(shop: sqlite3.Connection) -> None:
    place_order(shop, "ada")
    assert relay(shop) == 1
    job = send_receipt.options(key="order-9", countdown=60).job(9, "bob")
    first, again = app.send_jobs([job]), app.send_jobs([type(job).from_bytes(job.to_bytes())])
    assert first == again
    assert app.send_jobs([send_receipt.options(key="order-9").job(9, "bob")])[0].duplicate
    assert first[0].status() == "SCHEDULED"


# SQLAlchemy: the file that the guide shows

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "transactions.md"
SHOP = """
import os
from celery5 import App

app = App("shop", broker=os.environ["BROKER"], backlog=0)
send_receipt = app.task(name="send_receipt")(lambda order: None)
"""
STORY = """
import contextlib, json, os
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session
from celery5 import BrokerUnavailable
from celery5.broker.calls import jobs, leases
from after_commit import send_after_commit
from shop import app, send_receipt

def sent():
    entries = app.perform(jobs.read_jobs([app.queue("default")], "w", count=100, block_seconds=0))
    return [json.loads(entry.message)["args"][0] for entry in entries]

def write(session, word):
    session.execute(text("INSERT INTO words VALUES (:word)"), {"word": word})
    send_after_commit(session, send_receipt.s(word))

app.perform(leases.join_queue(app.queue("default"), "w", lease=60))
engine = create_engine("sqlite://")
with Session(engine) as session, session.begin():
    session.execute(text("CREATE TABLE words (word TEXT)"))

with Session(engine) as session:
    write(session, "a")
    assert sent() == []
    session.commit()
    assert sent() == ["a"]
    write(session, "rolled back")
    session.rollback()
    session.commit()
    assert sent() == []

    write(session, "b")
    with session.begin_nested():
        write(session, "c")
    with contextlib.suppress(ValueError), session.begin_nested():
        write(session, "rolled back")
        with session.begin_nested():
            write(session, "rolled back with what is around it")
        raise ValueError
    assert sent() == [], "a savepoint is not the end"
    session.commit()
    assert sent() == ["b", "c"]

    write(session, "never committed")
    session.close()
    write(session, "d")
    session.commit()
    assert sent() == ["d"]

    write(session, "rolled back")  # SQLite begins a transaction with a write, not with a savepoint
    with session.begin_nested():
        write(session, "rolled back in the end")
    session.rollback()
    session.commit()
    assert sent() == []

with contextlib.suppress(KeyError), Session(engine) as session, session.begin():
    write(session, "rolled back")
    raise KeyError

refused = []
@event.listens_for(engine, "commit")
def refuse(connection):
    if not refused:
        refused.append(1)
        raise OSError("the database does not commit")

with contextlib.suppress(OSError), Session(engine) as session, session.begin():
    write(session, "not committed")
with Session(engine) as session:
    session.commit()
assert refused and sent() == []

app.use_broker("redis://127.0.0.1:1/0")
with Session(engine) as session:
    write(session, "committed, not sent")
    try:
        session.commit()
    except BrokerUnavailable:
        pass
    else:
        raise AssertionError("it was told")
    app.use_broker(os.environ["BROKER"])
    words = session.scalars(text("SELECT word FROM words")).all()  # the session is as good as ever
    assert words == ["a", "b", "c", "d", "committed, not sent"], words
    write(session, "e")
    session.commit()
assert sent() == ["e"]
print("all well")
"""


def test_the_guides_file_for_sqlalchemy_sends_after_the_commit_and_only_then(
    url: str, tmp_path: Path
) -> None:
    found = re.search(r'(?ms)^```python title="after_commit.py"\n(.*?)^```$', PAGE.read_text())
    assert found
    for name, text in (("after_commit", found[1]), ("shop", SHOP), ("story", STORY)):
        (tmp_path / f"{name}.py").write_text(text)
    completed = subprocess.run(
        [sys.executable, "-W", "error", "story.py"],
        env={**os.environ, "BROKER": url, "PYTHONPATH": os.getcwd()},
        cwd=tmp_path,
        timeout=LIMIT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert completed.stdout == "all well\n", completed.stderr
