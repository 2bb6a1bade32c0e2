"""Stream commands: records on the command line, and what operators do with streams and their groups."""

import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from celery5.streams import FileArchive, StoredRecord
from tests.story.cli.commands import COMMAND, Ended, Serving, celery5, environment, until
from tests.story.conftest import Desk

STREAMS = """
from celery5.streams import Record

class Order(Record):
    order_id: int
    amount: int

orders = app.stream("orders", Order, by="order_id", partitions=4)

@app.processor(orders, then="ignore")
async def bill(events):
    async for order in events.records():
        if order.amount < 0:
            raise ValueError(f"no amount: {order.amount}")
"""


@pytest.fixture
def shop(desk: Desk) -> Desk:
    """A desk whose application has a stream and a processor."""
    page = desk.folder / "shop.py"
    page.write_text(page.read_text() + STREAMS)
    return desk


def run(desk: Desk, *words: object) -> Ended:
    return celery5("-A", "shop", *words, cwd=desk.folder)


def tail(desk: Desk, *words: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in desk("stream", "tail", "orders", *words).splitlines()]


def order(order_id: int, amount: int) -> str:
    return json.dumps({"order_id": order_id, "amount": amount})


def process_all(desk: Desk) -> None:
    """Have a worker process all records."""
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder) as worker:
        until(lambda: is_done(desk) or worker.process.poll() is not None)
    assert is_done(desk), worker.err


def is_done(desk: Desk) -> bool:
    (state,) = json.loads(desk("stream", "list", "--json"))
    return bool(state["groups"]) and state["groups"][0]["lag"] == 0


def test_records_are_sent_from_arguments_stdin_and_files(shop: Desk) -> None:
    assert shop("stream", "send", "orders", order(1, 5), order(2, 6)) == "2 records sent\n"
    (entry,) = shop.app.audit.list()
    assert (entry.action, entry.source, entry.target, entry.count) == ("stream:send", "cli", "orders", 2)
    (shop.folder / "more.jsonl").write_text("".join(f"{order(n, n)}\n\n" for n in range(1200)))
    assert shop("stream", "send", "orders", "--file", "more.jsonl") == "1,200 records sent\n"
    done = subprocess.run(
        [*COMMAND, "-A", "shop", "stream", "send", "orders", "-", "--json"],
        input=f"{order(3, 7)}\n{order(3, 8)}\n",
        cwd=shop.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    places = [json.loads(line) for line in done.stdout.splitlines()]
    assert [sorted(place) for place in places] == [["id", "partition"]] * 2
    assert [stored["record"] for stored in tail(shop, "--limit", 2)] == [
        {"order_id": 3, "amount": 7},
        {"order_id": 3, "amount": 8},
    ]
    assert len(tail(shop, "--from", "earliest")) == 1204


def test_what_was_archived_is_sent_again_from_its_file(shop: Desk) -> None:
    archive = FileArchive(shop.folder / "archive")
    archive("orders", 0, [StoredRecord(0, f"5-{n}", {"order_id": n, "amount": n}) for n in range(1, 1100)])
    (file,) = (shop.folder / "archive").iterdir()
    assert shop("stream", "send", "orders", "--file", file) == "1,099 records sent\n"
    assert len(tail(shop, "--from", "earliest")) == 1099
    file.write_bytes(file.read_bytes()[:-20])
    ended = run(shop, "stream", "send", "orders", "--file", file)
    assert f"{file} behind line " in ended.error
    assert "it is no whole gzip file" in ended.error


def test_a_line_that_is_no_record_stops_its_portion_and_says_what_was_sent(shop: Desk) -> None:
    lines = [order(n, n) for n in range(1100)]
    lines[1003] = '{"order_id": 7, "amount": "many"}'
    (shop.folder / "bad.jsonl").write_text("\n".join(lines))
    ended = run(shop, "stream", "send", "orders", "--file", "bad.jsonl")
    assert ended.code == 1
    assert "line 1004 of bad.jsonl: no Order: Expected `int`, got `str`" in ended.error
    assert ended.error.endswith("; 1,000 records sent before")
    assert len(tail(shop, "--from", "earliest")) == 1000
    ended = run(shop, "stream", "send", "orders", order(1, 2), "{")
    assert "record 2: no Order" in ended.error
    assert ended.error.endswith("; 0 records sent before")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("send", "order", "{}"), "no stream 'order' here; did you mean 'orders'?"),
        (("send", "orders"), "nothing to send: give records as JSON"),
        (("tail", "order"), "no stream 'order': nothing was ever sent to it; did you mean 'orders'?"),
        (("tail", "orders", "--partition", "4"), "stream orders has no partition 4: it has 0 to 3"),
        (("tail", "orders", "--from", "noon"), "start is 'noon': give earliest, latest, an id"),
        (("show", "order"), "no stream 'order'"),
        (("seek", "orders", "bil", "--to", "earliest"), "stream orders has no group 'bil'; it has none"),
        (("reset", "orders", "bill", "--forget", "--yes"), "stream orders has no group 'bill'; it has none"),
        (("reset", "orders", "bill", "--forget", "--state", "--yes"), "--forget removes the group wholly"),
        (("quarantine", "orders", "bill"), "stream orders has no group 'bill'"),
        (("quarantine", "orders", "bill", "--clear"), "--clear: give --partition N or --all"),
        (("quarantine", "orders", "bill", "--why", "x"), "give --partition N and --why TEXT"),
        (("reshard", "orders", "5000"), "5000 is not in the range"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(shop: Desk, words: tuple[str, ...], said: str) -> None:
    shop("stream", "send", "orders", order(1, 1))
    ended = run(shop, "stream", *words)
    assert ended.code != 0
    assert said in ended.error


def test_documents_are_shown_without_the_code_of_the_application(shop: Desk, url: str) -> None:
    shop("stream", "send", "orders", order(1, 5))
    ended = celery5(
        *("--app-name", shop.app.name, "stream", "tail", "orders"),
        cwd=Path("/"),
        env={"CELERY5_BROKER": url},
    )
    assert json.loads(ended.out)["record"] == {"order_id": 1, "amount": 5}


def test_a_tail_that_follows_ends_well_at_ctrl_c(shop: Desk) -> None:
    shop("stream", "send", "orders", order(1, 5))
    with Serving("-A", "shop", "stream", "tail", "orders", "--follow", cwd=shop.folder) as following:
        until(lambda: len(following.messages) == 1)
        shop("stream", "send", "orders", order(1, 6))
        until(lambda: len(following.messages) == 2)
        following.signal(signal.SIGINT)
        ended = following.ended()
    assert (ended.code, ended.err) == (0, "")
    assert [message["record"]["amount"] for message in following.messages] == [5, 6]


def test_streams_are_listed_and_shown_with_their_groups(shop: Desk) -> None:
    assert "orders" in shop("stream", "list")
    shop("stream", "send", "orders", *(order(number, number) for number in range(20)))
    process_all(shop)
    shop("stream", "send", "orders", order(1, 1))
    (state,) = json.loads(shop("stream", "list", "--json"))
    assert (state["stream"], state["partitions"], state["records"]) == ("orders", 4, 21)
    (group,) = state["groups"]
    assert (group["group"], group["members"], group["lag"], group["owned"]) == ("bill", [], 1, 0)
    assert group["age"] >= 0
    shown = json.loads(shop("stream", "show", "orders", "--json"))
    (group,) = shown["groups"]
    assert sorted(partition["lag"] for partition in group["partitions"]) == [0, 0, 0, 1]
    text = shop("stream", "show", "orders")
    assert "none is alive" in text
    assert "cursor" in text


def test_a_group_is_moved_reset_and_forgotten(shop: Desk) -> None:
    shop("stream", "send", "orders", *(order(number, number) for number in range(20)))
    with Serving("-A", "shop", "worker", "start", cwd=shop.folder) as worker:
        until(lambda: is_done(shop) or worker.process.poll() is not None)
        refused = run(shop, "stream", "seek", "orders", "bill", "--to", "earliest")
        assert refused.code == 1
        assert "1 member of group bill runs" in refused.error
        forced = run(shop, "stream", "reset", "orders", "bill", "--force", "--yes", "--json")
        assert sorted(json.loads(forced.out)["cursors"]) == ["0", "1", "2", "3"]
        until(lambda: is_done(shop))
    assert "2 " in shop("stream", "seek", "orders", "bill", "--to", "earliest", "--partition", "2")
    (group,) = json.loads(shop("stream", "show", "orders", "--json"))["groups"]
    assert [partition["partition"] for partition in group["partitions"] if partition["lag"]] == [2]
    shop("stream", "seek", "orders", "bill", "--to", "latest")
    assert is_done(shop)
    assert shop("stream", "reset", "orders", "bill", "--yes", "--to", "2020-01-01T00:00:00Z")
    assert json.loads(shop("stream", "list", "--json"))[0]["groups"][0]["lag"] == 20
    assert (
        shop("stream", "reset", "orders", "bill", "--forget", "--yes")
        == "group bill of stream orders is forgotten\n"
    )
    assert json.loads(shop("stream", "list", "--json"))[0]["groups"] == []


def test_partitions_are_quarantined_listed_and_let_go(shop: Desk) -> None:
    shop("stream", "send", "orders", order(1, 1))
    process_all(shop)
    words = ("stream", "quarantine", "orders", "bill")
    assert shop(*words) == "no partition is quarantined\n"
    assert "wrong prices" in shop(*words, "--partition", 2, "--why", "wrong prices")
    shop(*words, "--partition", 3, "--why", "these, too")
    two, _ = json.loads(shop(*words, "--json"))
    assert (two["partition"], two["why"], two["since"] > 1_700_000_000) == (2, "wrong prices", True)
    assert "wrong prices" not in shop(*words, "--clear", "--partition", 2)
    assert shop(*words, "--clear", "--all") == "no partition is quarantined\n"
    assert "no partition 9" in run(shop, *words, "--clear", "--partition", 9).error


def test_parked_keys_are_listed_released_and_discarded(shop: Desk) -> None:
    page = shop.folder / "shop.py"
    page.write_text(page.read_text().replace('then="ignore"', 'then="park-key"'))
    shop("stream", "send", "orders", order(1, -1), order(1, 2), order(3, -3))
    process_all(shop)
    words = ("orders", "bill")
    one, three = sorted(json.loads(shop("stream", "parked", *words, "--json")), key=lambda row: row["key"])
    assert (one["key"], one["records"], one["action"], one["why"]) == (
        "1",
        2,
        "",
        "ValueError('no amount: -1')",
    )
    assert (three["key"], three["records"], three["since"] > 1_700_000_000) == ("3", 1, True)
    assert "no amount: -3" in shop("stream", "parked", *words)
    assert _examine(shop) == ("warn", "keys are parked: orders:bill 2")
    (group,) = json.loads(shop("stream", "list", "--json"))[0]["groups"]
    assert (group["parked_keys"], group["parked_records"]) == (2, 3)
    assert "give keys, or --all" in run(shop, "stream", "release", *words).error
    assert "has not parked key '7'" in run(shop, "stream", "release", *words, "7").error
    assert shop("stream", "release", *words, "1") == "1 key is released by the workers that own them\n"
    assert json.loads(shop("stream", "release", *words, "3", "--discard", "--json")) == {"discarded": 1}
    page.write_text(page.read_text().replace("if order.amount < 0", "if order.amount < -9"))
    with Serving("-A", "shop", "worker", "start", cwd=shop.folder):
        until(lambda: shop("stream", "parked", *words) == "no key is parked\n")
    dead = json.loads(shop("dlq", "read", "--stream", "orders", "--group", "bill", "--json"))
    assert [dead_record["record"]["amount"] for dead_record in dead] == [-3]


def test_the_number_of_partitions_is_changed(shop: Desk) -> None:
    shop("stream", "send", "orders", order(1, 1))
    assert shop("stream", "reshard", "orders", 8) == "stream orders: 4 partitions before, 8 now\n"
    assert json.loads(shop("stream", "reshard", "orders", 2, "--json")) == {
        "stream": "orders",
        "before": 8,
        "partitions": 2,
    }


def test_dead_records_are_read_replayed_and_purged(shop: Desk) -> None:
    shop("stream", "send", "orders", order(1, -1), order(2, 2), order(3, -3))
    process_all(shop)
    of_bill = ("--stream", "orders", "--group", "bill")
    assert shop("dlq", "count", "--json") == "{}\n"
    dead = json.loads(shop("dlq", "read", *of_bill, "--json"))
    assert sorted(dead_record["record"]["amount"] for dead_record in dead) == [-3, -1]
    assert "no amount: -3" in shop("dlq", "read", *of_bill)
    assert "Traceback" in shop("dlq", "read", *of_bill, "--traceback")
    assert (
        shop("dlq", "replay", *of_bill, "--message", "-3", "--dry-run") == "1 dead record would be replayed\n"
    )
    assert shop("dlq", "replay", *of_bill, "--message", "-3") == "1 dead record replayed\n"
    assert [record["record"]["amount"] for record in tail(shop, "--limit", 1)] == [-3]
    assert json.loads(shop("dlq", "replay", *of_bill, "--json", "--id", dead[0]["entry"]))["matched"] <= 1
    assert "add --yes" in run(shop, "dlq", "purge", *of_bill).error
    assert shop("dlq", "purge", *of_bill, "--older-than", "1h", "--yes") == "0 dead records purged\n"
    shop("dlq", "purge", *of_bill, "--yes")
    assert shop("dlq", "read", *of_bill) == "no dead records\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("read --stream orders", "give both --stream and --group"),
        ("read --group bill", "give both --stream and --group"),
        ("replay --stream orders --group bill --task x", "--task is for jobs: leave it out with --stream"),
        ("purge --stream orders --group bil --yes", "stream orders has no group 'bil'"),
        ("read --stream orders --group bill --id x", "'x' is no id of a dead record"),
    ],
)
def test_what_is_wrong_about_dead_records_is_said_in_one_line(shop: Desk, words: str, said: str) -> None:
    shop("stream", "send", "orders", order(1, 1))
    ended = run(shop, "dlq", *words.split())
    assert ended.code != 0
    assert said in ended.error


def test_info_and_doctor_tell_of_streams(shop: Desk) -> None:
    shop("stream", "send", "orders", *(order(1, number) for number in range(20)))
    process_all(shop)
    shop("stream", "send", "orders", order(1, 1))
    (state,) = json.loads(shop("info", "--json"))["streams"]
    assert (state["stream"], state["groups"][0]["lag"], state["groups"][0]["members"]) == ("orders", 1, [])
    assert "without owner" in shop("info")
    assert "without owner" not in shop("info", "--queue", "default")
    assert _examine(shop) == ("warn", "records wait, and no worker runs: orders:bill 1")
    shop("stream", "quarantine", "orders", "bill", "--partition", 1, "--why", "a look")
    assert _examine(shop) == ("fail", "quarantined: orders:bill partition 1")


def _examine(desk: Desk) -> tuple[str, str]:
    found = {entry["check"]: entry for entry in json.loads(run(desk, "doctor", "--json").out)}
    return found["streams"]["state"], found["streams"]["summary"]


def test_the_metrics_of_a_worker_tell_how_far_its_groups_are_behind(shop: Desk) -> None:
    shop("stream", "send", "orders", order(1, 1))
    process_all(shop)
    shop("stream", "quarantine", "orders", "bill", "--partition", 0, "--why", "a look")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Serving("-A", "shop", "worker", "start", "--status-port", port, cwd=shop.folder):
        expected = 'celery5_stream_partitions{stream="orders",group="bill",state="quarantined"} 1'
        until(lambda: expected in _read_metrics(port))
        until(lambda: 'celery5_stream_members{stream="orders",group="bill"} 1' in _read_metrics(port))


def _read_metrics(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""
