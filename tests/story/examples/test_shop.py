"""Shop: the example runs under `controller start --development`, and all that is promised happens."""

import base64
import importlib
import json
import os
import re
import socket
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery5.examples.webhooks.signature import key_of, signed
from tests.story.cli.commands import Serving, celery5, until

pytestmark = pytest.mark.timeout(300)
SECRET = "whsec_" + base64.b64encode(b"x" * 32).decode()
TARGET = "celery5.examples.shop"


class Shop:
    """The shop, open: its folder, its port, and the environment that everybody shares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            self.port = taken.getsockname()[1]
        self.env = {"SHOP_FOLDER": str(folder), "WEBHOOK_SECRETS": SECRET, "WEBHOOK_PORT": str(self.port)}

    def lines(self, file: str) -> list[dict[str, Any]]:
        """What was noted."""
        path = self.folder / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rows(self) -> list[tuple[Any, ...]]:
        """The ledger."""
        with closing(sqlite3.connect(self.folder / "ledger.db")) as db:
            try:
                return db.execute("SELECT state, value FROM payments").fetchall()
            except sqlite3.OperationalError:
                return []

    def tell(self, body: dict[str, Any], *, name: str, secret: str = SECRET) -> int:
        """Have the warehouse call; gives how it was answered."""
        raw, stamp = json.dumps(body).encode(), str(int(time.time()))
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/webhooks",
            raw,
            {
                "webhook-id": name,
                "webhook-timestamp": stamp,
                "webhook-signature": signed(key_of(secret), name, stamp, raw),
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@contextmanager
def open_shop(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broker: str = "") -> Iterator[Shop]:
    """Open the shop in its own process, on a private server or on that broker, with this process as its page."""
    shop = Shop(folder)
    if broker:
        shop.env["CELERY5_BROKER"] = broker
    words = ("-A", TARGET, "controller", "start", "--development")
    with Serving(*words, cwd=folder, env=shop.env) as serving:
        serving.ready()
        if not broker:
            shown = re.search(r"CELERY5_BROKER='([^']+)'", serving.err)
            assert shown is not None
            shop.env["CELERY5_BROKER"] = shown[1]
        for name, value in shop.env.items():
            monkeypatch.setenv(name, value)
        for name in [name for name in sys.modules if name.startswith(TARGET)]:
            monkeypatch.delitem(
                sys.modules, name
            )  # its application may have read its settings in another test
        yield shop


def test_a_day_in_the_shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_modules: None) -> None:
    with open_shop(tmp_path, monkeypatch) as shop:
        spend_a_day(shop)


def spend_a_day(shop: Shop) -> None:
    """Place orders, and check that all that is promised happens."""
    orders = importlib.import_module(f"{TARGET}.orders")
    since = time.time()
    for order in range(12):
        orders.place(order, "ann" if order < 6 else f"customer{order}", "tea", 100 + order)
    orders.place(99, "nobody", "nothing", 0)
    until(lambda: len(shop.lines("journal.jsonl")) == 12)
    until(lambda: len(shop.rows()) == 12)
    until(lambda: len(shop.lines("mails.jsonl")) == 12)

    _is_charged_once_at_a_time(shop)
    _mails_keep_to_their_rate(shop, since)
    _reorders_what_is_low(shop)
    _reports_at_night(shop)
    orders.app.close()


def _is_charged_once_at_a_time(shop: Shop) -> None:
    now = 0
    for line in shop.lines("charges.jsonl"):
        if line["customer"] == "ann":
            now += 1 if "begins" in line else -1
            assert 0 <= now <= 1, "two payments of one customer at once"
    begun = [line["order"] for line in shop.lines("charges.jsonl") if "begins" in line]
    assert sorted(begun) == list(range(12)), "each order is paid once"


def _mails_keep_to_their_rate(shop: Shop, since: float) -> None:
    at = sorted(line["at"] - since for line in shop.lines("mails.jsonl"))
    assert all(moment >= n // 5 for n, moment in enumerate(at)), at


def _reorders_what_is_low(shop: Shop) -> None:
    assert shop.tell({"item": "tea", "left": 3}, name="msg_1") == 200
    assert shop.tell({"item": "tea", "left": 3}, name="msg_1") == 200  # sent again, and known again
    assert shop.tell({"item": "gold", "left": 0}, name="msg_2", secret="whsec_" + "A" * 44) == 401
    until(lambda: shop.lines("reorders.jsonl"))
    until(lambda: any(line["to"] == "buyer@example.com" for line in shop.lines("mails.jsonl")))
    assert shop.lines("reorders.jsonl") == [{"item": "tea", "more": 97}]


def _reports_at_night(shop: Shop) -> None:
    env = {name: os.environ[name] for name in shop.env}
    shown = celery5("-A", TARGET, "schedule", "list", cwd=shop.folder, env=env)
    assert "nightly-report" in shown.out
    assert celery5("-A", TARGET, "schedule", "trigger", "nightly-report", cwd=shop.folder, env=env).code == 0
    until(lambda: shop.lines("reports.jsonl"))
    assert shop.lines("reports.jsonl") == [{"payments": 12, "cents": sum(range(100, 112))}]
