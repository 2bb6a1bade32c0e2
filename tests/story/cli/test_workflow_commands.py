"""Workflow commands: what the terminal shows of runs, and what it does with them."""

import importlib
import json
import re
import sys

from celery5 import App
from celery5.workflows import Flow
from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk


def refused(desk: Desk, *words: str) -> str:
    """What a command prints that exits with 1."""
    done = celery5("-A", "shop", *words, cwd=desk.folder)
    assert (done.code, done.out) == (1, "")
    return done.error


def test_runs_are_shown_cancelled_and_retried(desk: Desk) -> None:
    shop = sys.modules["shop"]
    assert "nothing is known of run 'none'" in refused(desk, "workflow", "show", "none")
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready():
        ended = (shop.add.s(1, 2) | shop.add.s(3)).start()
        assert ended.get() == 6
        running = (shop.add.s(1, 2) >> shop.stuck.s()).start(id="night-1")
        until(lambda: running.status().done == 1)
        rows = {row["id"]: row for row in json.loads(desk("workflow", "list", "--json"))}
        assert (rows[ended.id]["state"], rows["night-1"]["state"]) == ("SUCCESS", "RUNNING")
        assert re.search(r"(?m)^night-1 +shop.add +RUNNING +1 of 2", desk("workflow", "list", "--live"))
        assert ended.id not in desk("workflow", "list", "--live")
        assert re.search(r"(?m)^run +night-1$", desk("task", "show", "night-1~1"))
        (shop.stuck.s() >> shop.add.s(1, 2)).start(id="later")
        assert json.loads(desk("task", "show", "later~1", "--json")) == {
            "id": "later~1",
            "task": "shop.add",
            "run": "later",
            "node": 1,
            "state": "PENDING",
            "state of the run": "RUNNING",
        }
        as_json = json.loads(desk("workflow", "show", "night-1", "--json"))
        assert (as_json["id"], as_json["state"], as_json["done"], as_json["total"]) == (
            "night-1",
            "RUNNING",
            1,
            2,
        )
        shown = desk("workflow", "show", "night-1")
        assert re.search(r"(?m)^state +RUNNING$", shown)
        assert 'n1["shop.stuck"]:::active' in desk("workflow", "graph", "night-1")
        nodes = json.loads(desk("workflow", "graph", "night-1", "--format", "json"))["nodes"]
        assert [(node["name"], node["state"]) for node in nodes] == [
            ("shop.add", "SUCCESS"),
            ("shop.stuck", "ACTIVE"),
        ]
        assert desk("workflow", "cancel", "night-1") == "night-1: cancelled\n"
        until(lambda: running.status().state.value == "CANCELLED")
        assert "it is CANCELLED" in refused(desk, "workflow", "cancel", "night-1")
        assert "has not failed" in refused(desk, "workflow", "retry", ended.id)
        until(lambda: running.status().active == 0)
        assert desk("workflow", "retry", "night-1") == "night-1: running again\n"
        until(lambda: running.status().active == 1)
        assert desk("workflow", "signal", "night-1", "go", "--value", "7") == "night-1: signal go is given\n"
        assert desk("workflow", "cancel", "night-1") == "night-1: cancelled\n"
        until(lambda: running.status().state.value == "CANCELLED")
        assert "takes no signal: it is CANCELLED" in refused(desk, "workflow", "signal", "night-1", "go")


def test_a_value_that_is_no_json_is_refused(desk: Desk) -> None:
    shop = sys.modules["shop"]
    run = shop.add.s(1, 2).start()
    done = celery5("-A", "shop", "workflow", "signal", run.id, "go", "--value", "{", cwd=desk.folder)
    assert done.code == 2
    assert "--value is not JSON" in done.error
    run.cancel()


def test_what_a_run_waits_for_is_shown(desk: Desk) -> None:
    app: App = sys.modules["shop"].app

    @app.workflow(name="approval")
    def approval(flow: Flow) -> object:
        return flow.wait_for("approved")

    run = approval.start()
    assert re.search(r"(?m)^waits for +approved$", desk("workflow", "show", run.id))
    assert json.loads(desk("workflow", "show", run.id, "--json"))["waits_for"] == ["approved"]
    run.signal("approved")
    assert json.loads(desk("workflow", "show", run.id, "--json"))["waits_for"] == []


BANK = """
from shop import add, app

@app.task(max_retries=0)
async def refund(amount: int) -> None:
    raise ConnectionError("the bank is closed")

@app.task(max_retries=0)
async def ship() -> None:
    raise ValueError("no box")

def order():
    return (add.options(undo=refund).s(1, 2) >> ship.s()).start(id="order-1")
"""


def test_where_a_run_failed_and_what_is_not_undone_is_shown(desk: Desk) -> None:
    (desk.folder / "bank.py").write_text(BANK)
    failure = "node 2, bank.ship: ValueError: no box"
    undo = "undone 0 of 1; bank.refund of node 0 died: ConnectionError: the bank is closed"
    with Serving("-A", "bank", "worker", "start", cwd=desk.folder).ready():
        run = importlib.import_module("bank").order()
        until(lambda: run.status().ended is not None)

        def show(*words: str) -> str:
            done = celery5("-A", "bank", "workflow", *words, cwd=desk.folder)
            assert done.code == 0, done.error
            return done.out

        shown = show("show", "order-1")
        assert re.search(rf"(?m)^error +{re.escape(failure)}$", shown)
        assert re.search(rf"(?m)^undo +{re.escape(undo)}$", shown)
        assert re.search(rf"(?m)^order-1 .* {re.escape(f'{failure}; {undo}')}$", show("list"))
        as_json = json.loads(show("show", "order-1", "--json"))
        named = {
            name: as_json[name] for name in ("failed_node", "failed_task", "undos", "undone", "undo_failed")
        }
        assert named == {
            "failed_node": 2,
            "failed_task": "bank.ship",
            "undos": 1,
            "undone": 0,
            "undo_failed": 1,
        }
        nodes = json.loads(show("graph", "order-1", "--json"))["nodes"]
        assert [(node["kind"], node.get("of"), node["state"], node["job"]) for node in nodes] == [
            ("job", None, "SUCCESS", "order-1~0"),
            ("undo", 0, "FAILED", "order-1~1"),
            ("job", None, "FAILED", "order-1~2"),
        ]
