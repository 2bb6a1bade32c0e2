"""Terminal: whatever other programs have written to Redis, no command writes a control character, or a line of
theirs."""

import json
import re
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import redis

import celery5.cli
from celery5 import App
from celery5.broker.calls.scaling import Scaling
from celery5.cli.main import cli
from celery5.cli.terminal.errors import run_reporting_errors
from celery5.cli.terminal.output import clean_lines, format_cell
from celery5.protocol.commands.definitions import CommandReply
from celery5.protocol.limits import LimitOverride, Suspension
from celery5.protocol.masking import escape_json, escape_text
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.conftest import Desk

BAD = "\x1b]52;c;QUJD\x07\x9b31m\x7f\u202e\u2066\u200f\x00\x08"
POISON = f"x{BAD}\r\nFORGED line {BAD}"
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

COMMANDS = {
    "audit list": [""],
    "autoscale status": [""],
    "config check": [""],
    "config show": ["", "--origin"],
    "controller reload": ["--timeout 1"],
    "controller restart": ["POISON --timeout 1"],
    "controller scale": ["--workers 2 --yes --timeout 1 --wait 0"],
    "controller status": ["--timeout 1"],
    "controller stop": ["--timeout 1 --wait 0"],
    "dlq count": ["", "--by task", "--by error", "--by reason", "--by queue"],
    "dlq purge": ["--task POISON --dry-run", "--stream orders --group POISON --dry-run"],
    "dlq read": [
        *("", "--traceback", "--queue POISON", "--error POISON", "--sink POISON"),
        *("--stream orders --group POISON", "--stream POISON --group POISON"),
    ],
    "alert history": [""],
    "alert list": ["", "--check"],
    "alert rules": [""],
    "alert silence": ["POISON --why POISON"],
    "alert test": [""],
    "alert unsilence": ["POISON"],
    "migrate": ["POISON", "old.py", "old.py --beat old.py", "--beat old.py", "--results old.py"],
    "bulk list": [""],
    "bulk resume": ["POISON"],
    "bulk retry": ["--workflow POISON --dry-run"],
    "bulk revoke": ["POISON --dry-run"],
    "bulk show": ["POISON"],
    "bulk stop": ["POISON"],
    "dlq groups": ["", "--error-group POISON"],
    "queue storage": [""],
    "dlq replay": ["--dry-run", "--stream orders --group POISON"],
    "doctor": [""],
    "event list": [""],
    "event resubscribe": ["POISON POISON"],
    "event send": ["POISON"],
    "event show": ["POISON"],
    "event unsubscribe": ["POISON POISON --yes", "POISON POISON"],
    "health": [""],
    "info": ["", "--queue POISON"],
    "keys new": [""],
    "keys revoke": ["POISON"],
    "keys show": [""],
    "keys trust": ["POISON"],
    "metrics history": ["", "--queue POISON"],
    "metrics show": ["", "POISON"],
    "queue list": [""],
    "queue purge": ["POISON --yes", "POISON --dry-run"],
    "queue show": ["POISON"],
    "schedule add": ["POISON POISON --every 5"],
    "schedule change": ["POISON --every 5"],
    "schedule list": [""],
    "schedule pause": ["POISON"],
    "schedule remove": ["POISON --yes", "POISON"],
    "schedule resume": ["POISON"],
    "schedule show": ["nightly", "POISON"],
    "schedule trigger": ["POISON"],
    "stream list": [""],
    "stream parked": ["orders POISON"],
    "stream release": ["orders POISON --all"],
    "stream quarantine": ["orders POISON", "orders POISON --why POISON --partition 0", "orders x"],
    "stream reset": [
        "orders POISON --yes",
        "orders POISON --forget --yes",
        "POISON POISON --yes",
        "POISON POISON",
    ],
    "stream reshard": ["POISON 3"],
    "stream seek": ["orders POISON --to earliest", "POISON POISON --to POISON"],
    "stream send": ["POISON POISON"],
    "stream show": ["orders", "POISON"],
    "stream tail": ["orders", "POISON", "orders --from POISON"],
    "task limit": ["POISON 3", "shop.add POISON"],
    "task limits": [""],
    "task list": ["", "--prefix POISON"],
    "task resume": ["POISON"],
    "task revoke": ["POISON"],
    "task search": ["", "--id POISON", "--task POISON --queue POISON", "--argument POISON --cursor POISON"],
    "task send": ["POISON", "shop.add --args POISON"],
    "task show": ["job1", "POISON"],
    "task suspend": ["POISON --why POISON"],
    "top": ["--once", "--json"],
    "worker active": ["--to ghost --timeout 2"],
    "worker budget": ["--to ghost --timeout 2"],
    "worker concurrency": ["2 --to ghost --timeout 2"],
    "worker health": ["--to ghost --timeout 2"],
    "worker list": ["--timeout 1"],
    "queue pause": ["POISON --to ghost --timeout 2"],
    "worker ping": ["--to ghost --timeout 2", "--timeout 1"],
    "worker prefetch": ["2 --to ghost --timeout 2"],
    "worker reload": ["--to ghost --timeout 2"],
    "queue resume": ["POISON --to ghost --timeout 2"],
    "worker retry-boot-step": ["POISON --to ghost --timeout 2"],
    "worker revoke": ["POISON --to ghost --timeout 2"],
    "worker run": ["POISON --to ghost --timeout 2"],
    "worker set-log-level": ["info --to ghost --timeout 2"],
    "worker shutdown": ["--to ghost --timeout 2"],
    "worker stack": ["--to ghost --job POISON --timeout 2", "--to ghost --timeout 2"],
    "worker stats": ["--to ghost --timeout 2"],
    "worker tell": ["anything --to ghost --timeout 2"],
    "workflow cancel": ["POISON"],
    "workflow graph": ["POISON"],
    "workflow list": [""],
    "workflow retry": ["POISON"],
    "workflow show": ["POISON"],
    "workflow signal": ["POISON POISON"],
}
"""Each command that prints what is from outside, with its arguments."""
NOT_TRIED = {
    "acl",  # what it prints is made from our own code
    # which print nothing from outside
    *(
        "completion",
        "demo",
        "docs",
        "metrics dashboard",
        "metrics rules",
        "systemd install",
        "kubernetes manifests",
    ),
    *("controller start", "publisher start", "router start", "scheduler start", "worker start"),  # which log
    *("dashboard start", "dashboard token"),  # which print an address or a token
}


def leaves(command: click.Command, path: str = "") -> Iterator[str]:
    """Yield every command, as it is typed."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, f"{path} {name}".strip())


def test_every_command_is_tried_or_prints_nothing_from_outside() -> None:
    assert set(leaves(cli)) == COMMANDS.keys() | NOT_TRIED


class _Forger(threading.Thread):
    """Answers every command of an application, unsigned, with what an enemy would write."""

    def __init__(self, app: App, client: "redis.Redis") -> None:
        super().__init__(daemon=True)
        self._keys, self._client, self._ended = app.keys, client, threading.Event()
        self.count = 0

    def run(self) -> None:
        heard: Any = self._client.pubsub()  # type: ignore[no-untyped-call]
        heard.psubscribe(self._keys.inbox("*"))
        while not self._ended.is_set():
            message = heard.get_message(timeout=0.05)
            if message is None or message["type"] != "pmessage":
                continue
            key = self._keys.reply(message["data"].decode())
            ok = self.count % 2 == 0
            answer = CommandReply(
                worker=POISON,
                ok=ok,
                answer=msgspec.Raw(json.dumps({POISON: [POISON, {POISON: 1}]}, ensure_ascii=False).encode()),
                reason=POISON,
                why=POISON,
            )
            self.count += 1
            words = msgspec.json.encode(answer)
            self._client.set(key, words, px=5000)
            self._client.publish(key, words)
        heard.close()

    def stop(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture
def poisoned(desk: Desk, redis_client: "redis.Redis") -> Iterator[_Forger]:
    """An application in whose keys an enemy has written all that can be written."""
    app, keys, client = desk.app, desk.app.keys, redis_client
    queue, soon = keys.for_queue("default"), (time.time() + 60) * 1000
    add_dead_letters(app, client, POISON, "job1", task=POISON, error=POISON, key=POISON)
    add_dead_letters(app, client, "job2", queue=POISON, task=POISON)
    client.sadd(keys.queues, POISON, "default")
    client.sadd(keys.paused, POISON, "default")
    client.zadd(queue.leases, {POISON: soon, "ghost:abc": soon})
    client.xadd(
        keys.audit, dict.fromkeys(("who", "source", "action", "target", "outcome", "job", POISON), POISON)
    )
    client.hset(keys.limits, POISON, msgspec.json.encode(LimitOverride(limit=1, by=POISON)))
    client.hset(keys.limits, "shop.add", msgspec.json.encode(LimitOverride(rate="3/m", by=POISON)))
    client.hset(keys.suspended, POISON, msgspec.json.encode(Suspension(why=POISON, by=POISON)))
    client.hset(keys.suspended, "shop.add", msgspec.json.encode(Suspension(why=POISON, by=POISON)))
    for kind in ("scheduler", "router", "controller"):
        client.zadd(keys.live_processes(kind), {POISON: soon})
    client.hset(keys.leader, mapping={"epoch": "1", "beat": "1", "leader": POISON, "since": "1"})
    client.set(keys.recycling, POISON)
    client.hset(keys.unclaimed_events, POISON, 3)
    client.hset(keys.subscriptions, POISON, msgspec.json.encode({"v": 1, "name": POISON, "task": POISON}))
    client.set(
        keys.scaling, msgspec.json.encode(Scaling(by=POISON, unseen=(POISON,), preferred={POISON: 1.0}))
    )
    desk("schedule", "add", "nightly", "shop.add", "--cron", "0 3 * * *", "--args", "[1, 2]")
    ((name, record),) = client.hgetall(keys.schedules("default")).items()
    assert name == b"nightly"
    changed = json.loads(record)
    changed["name"] = POISON
    client.hset(keys.schedules("default"), POISON, json.dumps(changed, ensure_ascii=False).encode())
    client.hset(keys.schedules("default"), f"{POISON}2", b"\x1b[31m")
    client.hset(queue.documents, POISON, POISON)
    _poison_stream(app, client)
    Path("old.py").write_text(
        f"from celery import Celery\n\napp = Celery({POISON!r}, result_backend_x={POISON!r})  # {BAD}\n"
        f"@app.task(name={POISON!r}, acks_late=True)\ndef a(): pass\napp.send_task({POISON!r})\n"
    )
    forger = _Forger(app, client)
    forger.start()
    yield forger
    forger.stop()
    for key in client.scan_iter(f"celery5:{{{app.name}*"):
        client.delete(key)


def _poison_stream(app: App, client: "redis.Redis") -> None:
    keys, group = app.keys.for_stream("orders"), POISON.replace("\0", "")  # as the command line can name it
    client.sadd(app.keys.record_streams, POISON, "orders")
    client.hset(keys.map, mapping={"partitions": 1, "version": 1})
    client.hset(keys.groups, mapping={group: POISON, "bill": "0-0"})
    client.zadd(keys.members(group), {POISON: (time.time() + 60) * 1000})
    client.hset(keys.incarnations(group), POISON, POISON)
    fields: dict[Any, Any] = dict.fromkeys(
        ("owner", "cursor", "epoch", "deaths", "condition", "why", "since"), POISON
    )
    client.hset(keys.partition(group, 0), mapping=fields)
    client.xadd(keys.log(0), {POISON: POISON}, id="1-1")
    client.hset(keys.parked(group), f"key:{POISON}", f"release 1 {POISON} {POISON}")
    client.xadd(f"{keys.parked_log_prefix}{group}:{POISON}", {POISON: POISON})
    client.xadd(
        keys.dead(group), dict.fromkeys(("id", "partition", "attempts", "error", "fields", POISON), POISON)
    )


def test_no_command_writes_a_control_character_or_a_forged_line(
    poisoned: _Forger, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = list[str]()
    for command, variants in COMMANDS.items():
        for variant in [*variants, *[f"{line} --json" for line in variants if _takes_json(command)]]:
            words = [POISON.replace("\0", "") if word == "POISON" else word for word in variant.split()]
            arguments = ["-A", "shop", *command.split(), *words]
            try:
                run_reporting_errors(partial(cli.main, arguments, "celery5", standalone_mode=False))
            except Exception as error:
                raw.append(f"{command} {variant}: {error!r} {traceback.format_exc()[-400:]}")
            out, err = capfd.readouterr()
            shown = out + err
            if FORBIDDEN.search(shown) or re.search(r"(?m)^FORGED", shown):
                raw.append(f"{command} {variant}: {shown!r}"[:600])
            if "--json" in variant and out.strip():
                json.loads(out)
    assert raw == [], "\n\n".join(raw)
    assert poisoned.count > 10


def _takes_json(command: str) -> bool:
    found: click.Command = cli
    for name in command.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name) or found
    return any("--json" in param.opts for param in found.params)


@pytest.mark.parametrize(
    "code", [*range(32), *range(127, 160), 0x202E, 0x2066, 0x200F, 0x2028, 0xD800, 0xFEFF]
)
def test_a_control_character_is_shown_as_python_writes_it(code: int) -> None:
    character = chr(code)
    shown = escape_text(f"a{character}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("a\\")
    for text in (format_cell(f"a{character}b"), clean_lines(f"a{character}b")):
        assert character == "\n" or character not in text
    if code < 0xD800 or code == 0xFEFF:
        inside = json.dumps({"a": character}, ensure_ascii=False)
        assert json.loads(escape_json(inside)) == {"a": character}
        assert not FORBIDDEN.search(escape_json(inside).replace("\ufeff", "\x00"))


def test_text_of_people_stays_as_it_is() -> None:
    for text in ("Grüße, 日本語 🎉", "a b", "Ωμέγα", "עברית"):
        assert escape_text(text) == escape_json(text) == format_cell(text) == text
    assert escape_text("a\tb\n", keep="\t\n") == "a\tb\n"


def test_commands_write_by_the_one_function_that_escapes() -> None:
    found = {
        path.name: count
        for path in Path(celery5.cli.__file__).parent.rglob("*.py")
        if (count := path.read_text().count("click.echo("))
    }
    # A script for the shell, and the progress of three commands: numbers, and control characters of their own.
    assert found == {
        "output.py": 1,
        "bulk.py": 2,
        "completion.py": 1,
        "demo.py": 1,
        "dlq.py": 2,
        "stream.py": 2,
    }
