"""Data sinks: what is said of a sink, how documents are counted out to it, and the sinks that celery5 brings along."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.errors import Misconfigured
from celery5.processes.router import ROUTER
from celery5.protocol.events.documents import (
    MAX_DELIVERY_DELAY,
    DeliveryPacing,
    ResultDocument,
    group_recipients,
    parse_result_document,
)
from celery5.protocol.events.sinks import RedisResults, get_all_sink_options, get_sink_options
from celery5.results.file_sink import FileSink
from celery5.results.sql_sink import SQLSink


def document(name: str, value: Any = None, state: str = "SUCCESS") -> ResultDocument:
    return ResultDocument(id=name, job=name, task="shop.charge", queue="default", state=state, value=value)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what is said of a sink


class Named:
    def __init__(self, name: Any = "own", **said: Any) -> None:
        self.name = name
        self.__dict__.update(said)

    def write(self, documents: Any) -> None: ...


class WithoutDocuments(Named):
    def write(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (object(), "is no sink"),
        (Named(None), "has no name: give a sink one"),
        (WithoutDocuments(), r"sink 'own': write must take the documents, .*write\(self, documents\)"),
        (Named, "is no sink"),
        (Named("a b"), "sink name 'a b'"),
        (Named("a:b"), "sink name 'a:b'"),
        (Named(7), "sink name 7"),
        (Named(batch=0), "batch is 0"),
        (Named(timeout=0), "timeout is 0"),
        (Named(on="WELL"), "on is 'WELL'"),
        (Named(on=()), "on is"),
        (Named(retry={"often": 1}), "retry_policy has 'often'"),
    ],
)
def test_a_sink_that_makes_no_sense_is_refused_when_its_task_is_declared(sink: Any, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        App("shop").task(sinks=[sink])(len_of)


def len_of(a: str) -> int:
    return len(a)


def test_two_sinks_of_one_name_are_refused_and_one_of_two_tasks_is_not() -> None:
    app, shared = App("shop"), Named()
    with pytest.raises(Misconfigured, match="two sinks named 'own'"):
        app.task(sinks=[Named(), Named()])(len_of)
    one = app.task(name="one", sinks=[shared])(len_of)
    two = app.task(name="two", sinks=[shared])(len_of)
    assert [option.name for option in get_all_sink_options([one, two])] == ["own"]
    three = app.task(name="three", sinks=[Named()])(len_of)
    with pytest.raises(Misconfigured, match="two sinks are named 'own'"):
        get_all_sink_options([one, three])


def test_results_in_redis_are_kept_as_their_sink_says() -> None:
    task = App("shop").task(sinks=[RedisResults(ttl=7200), Named()])(len_of)
    assert task.send_options.results_ttl == 7200
    assert [sink.name for sink in task.sinks] == ["own"]
    assert App("shop").task(sinks=[RedisResults()])(len_of).recipients is None


def test_who_takes_what() -> None:
    assert group_recipients([("a", ("SUCCESS", "DEAD")), ("b", ("DEAD",))]) == {"SUCCESS": "a", "DEAD": "a b"}
    assert group_recipients([]) is None


def test_a_document_for_sinks_tells_all() -> None:
    raw = (
        b'{"v":1,"id":"j","task":"t","state":"DEAD","failure":{"type":"E","message":"m"},"replays":2,"new":1}'
    )
    told = parse_result_document("mail", raw)
    assert (told.id, told.job, told.queue, told.error, told.value) == ("j.2", "j", "mail", "E: m", None)
    assert json.loads(told.to_json())["failure"]["type"] == "E"
    assert get_sink_options(Named()).states == ("SUCCESS",)


# ---- how many at once


def test_a_batch_that_fails_is_halved_until_one_stands_alone_and_grows_again() -> None:
    flow, sizes = DeliveryPacing.start(100), list[int]()
    while not flow.failures:
        sizes.append(flow.batch_size)
        flow = flow.after_failure(flow.batch_size)
    assert sizes == [100, 50, 25, 12, 6, 3, 1]
    assert flow.batch_size == 1
    assert DeliveryPacing.start(100).after_failure(100).get_delay(lambda: 1.0) == 0.0
    for _ in range(9):
        flow = flow.after_success()
    assert (flow.batch_size, flow.failures) == (100, 0)


def test_failing_sink_pauses_for_longer_up_to_a_limit() -> None:
    flow, rests = DeliveryPacing.start(1), list[float]()
    for _ in range(12):
        flow = flow.after_failure(1)
        rests.append(flow.get_delay(lambda: 1.0))
    assert rests == sorted(rests)
    assert rests[:3] == [0.2, 0.4, 0.8]
    assert rests[-1] == MAX_DELIVERY_DELAY


# ---- files


def test_a_file_has_a_line_of_json_for_each_document(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "deep" / "orders.jsonl", fsync=True)
    sink.write([document("a", {"text": "two\nlines ü"}), document("b", 2)])
    sink.write([document("c")])
    found = lines(tmp_path / "deep" / "orders.jsonl")
    assert [(record["id"], record["value"]) for record in found] == [
        ("a", {"text": "two\nlines ü"}),
        ("b", 2),
        ("c", None),
    ]
    assert sink.name == "orders.jsonl"


def test_a_file_that_is_large_gets_another_name_and_nothing_is_lost(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "orders.jsonl", rotate=1000)
    for number in range(40):
        sink.write([document(str(number))])
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert all(file.stat().st_size < 1300 for file in files)
    assert sorted(int(line["id"]) for file in files for line in lines(file)) == list(range(40))


def test_a_file_for_each_day_has_the_day_in_its_name(tmp_path: Path) -> None:
    FileSink(tmp_path / "orders.jsonl", rotate="day").write([document("a")])
    (file,) = tmp_path.iterdir()
    assert __import__("re").fullmatch(r"orders\.\d{4}-\d\d-\d\d\.jsonl", file.name)


@pytest.mark.parametrize(("private", "modes"), [(True, {0o700, 0o600}), (False, {0o777, 0o644})])
def test_a_file_is_for_its_user_alone_when_it_is_to_be(
    tmp_path: Path, private: bool, modes: set[int]
) -> None:
    before = os.umask(0)
    try:
        FileSink(tmp_path / "a" / "b" / "orders.jsonl", private=private).write([document("a")])
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")} == modes
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == max(modes)


def test_a_line_that_somebody_was_killed_in_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(b'{"id":"torn')
    FileSink(path).write([document("a")])
    torn, whole = path.read_text().splitlines()
    assert torn == '{"id":"torn'
    assert json.loads(whole)["id"] == "a"


def test_a_write_that_has_no_room_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    script = f"""
import resource, signal
from tests.pure.events.test_data_sinks import FileSink, document
sink = FileSink({str(path)!r})
sink.write([document("a")])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    sink.write([document("b", "x" * 5000)])
except OSError as error:
    print("OSError", error)
"""
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert completed.stdout.startswith("OSError")
    assert [line["id"] for line in lines(path)] == ["a"]


@pytest.mark.parametrize("rotate", [None, 2000])
def test_many_processes_write_to_one_file(tmp_path: Path, rotate: int | None) -> None:
    path = tmp_path / "orders.jsonl"
    script = f"""
import sys
from celery5.protocol.events.documents import ResultDocument
from celery5.results import FileSink
sink = FileSink({str(path)!r}, rotate={rotate})
for number in range(100):
    name = f"{{sys.argv[1]}}-{{number}}"
    written = ResultDocument(
        id=name, job=name, task="shop.charge", queue="default", state="SUCCESS", value="x" * (number * 3)
    )
    sink.write([written, written])
"""
    many = [subprocess.Popen([sys.executable, "-c", script, str(n)], env=dict(os.environ)) for n in range(3)]
    assert [thread.wait(30) for thread in many] == [0, 0, 0]
    found = [line["id"] for file in tmp_path.iterdir() for line in lines(file)]
    assert sorted(found) == sorted(
        f"{n}-{number}" for n in range(3) for number in range(100) for _ in range(2)
    )


@pytest.mark.parametrize("rotate", ["week", 0, -1, True, 2.5])
def test_a_rotation_that_there_is_not_is_refused(rotate: Any) -> None:
    with pytest.raises(Misconfigured, match="rotate is"):
        FileSink("x", rotate=rotate)


# ---- databases


def rows(path: Path, sql: str) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def test_a_table_is_made_and_has_each_document_once(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    sink = SQLSink(f"sqlite:///{file}", table="charges")
    sink.write([document("a", {"n": 1}), document("b", 2), document("b", 2)])
    sink.write([document("b", 2), document("c", None, "DEAD")])
    found = rows(file, "SELECT id, task, state, value FROM charges ORDER BY id")
    sink.close()
    assert [(a, task, state) for a, task, state, _ in found] == [
        ("a", "shop.charge", "SUCCESS"),
        ("b", "shop.charge", "SUCCESS"),
        ("c", "shop.charge", "DEAD"),
    ]
    assert json.loads(found[0][3]) == {"n": 1}
    assert sink.name == "charges"


def test_several_routers_that_are_given_the_same_documents_have_each_once(tmp_path: Path) -> None:
    file, failed = tmp_path / "shop.db", list[Exception]()

    def write() -> None:
        sink = SQLSink(f"sqlite:///{file}", table="charges", engine={"connect_args": {"timeout": 20}})
        for number in range(30):
            try:
                sink.write([document(str(document_id)) for document_id in range(number, number + 10)])
            except Exception as error:
                failed.append(error)
        sink.close()

    many = [threading.Thread(target=write) for _ in range(4)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join(30)
    assert failed == []
    assert rows(file, "SELECT COUNT(*), COUNT(DISTINCT id) FROM charges") == [(39, 39)]


def test_a_table_of_ones_own_has_rows_as_one_likes(tmp_path: Path) -> None:
    from sqlalchemy import Column, Integer, MetaData, String, Table

    file = tmp_path / "shop.db"
    table = Table(
        "receipts",
        MetaData(),
        Column("number", Integer, primary_key=True),
        Column("document", String, unique=True),
        Column("total", Integer),
    )
    db = sqlite3.connect(file)
    db.execute("CREATE TABLE receipts (number INTEGER PRIMARY KEY, document TEXT UNIQUE, total INTEGER)")
    db.close()
    sink = SQLSink(
        f"sqlite:///{file}",
        table,
        key="document",
        row=lambda document: {"document": document.id, "total": document.value["total"]},
    )
    for _ in range(2):
        sink.write([document("a", {"total": 7})])
    sink.close()
    assert rows(file, "SELECT document, total FROM receipts") == [("a", 7)]
    with pytest.raises(Misconfigured, match="say with row="):
        SQLSink("sqlite://", table)


def test_what_the_database_refuses_is_raised(tmp_path: Path) -> None:
    sink = SQLSink(f"sqlite:///{tmp_path}/not/there.db")
    with pytest.raises(Exception, match="unable to open"):
        sink.write([document("a")])
    assert "not/there" not in repr(sink)


def test_nothing_of_sqlalchemy_is_loaded_before_the_first_document() -> None:
    script = "import sys, celery5.results.sql_sink as s; s.SQLSink('sqlite://'); print('sqlalchemy' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert completed.stdout.strip() == "False"


def test_a_router_refuses_a_table_where_there_is_no_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("shop")
    app.task(sinks=[SQLSink("sqlite://", "charges")])(len_of)
    ROUTER.check(app)
    monkeypatch.setattr("celery5.results.sql_sink.find_spec", lambda name: None)
    with pytest.raises(
        Misconfigured,
        match=r"^sink 'charges': an SQLSink needs.* pip install 'sqlalchemy>=2.0' \(the extra celery5\[sql\]\)$",
    ):
        ROUTER.check(app)
