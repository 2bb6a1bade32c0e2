"""Brokers away: what commands show, and how they end, while one of several brokers cannot be reached."""

import json
from collections.abc import Iterator

import pytest
import redis
import trustme  # noqa: F401  not loaded again by each test, which cryptography would not bear

from celery5 import every
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.main import cli
from celery5.cli.terminal.errors import run_reporting_errors
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.cli.commands import Ended, celery5
from tests.story.conftest import Desk


class Pair:
    """The application `shop` on two servers, of which the second one, `mails`, has the queue `slow`."""

    def __init__(self, desk: Desk, second: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = desk.folder
        self.app = desk.app
        self.second = second
        self._said = capsys
        self.environment = {
            "CELERY5_BROKERS": json.dumps({"mails": second.url}),
            "CELERY5_ROUTES": json.dumps({"slow": "mails"}),
        }
        self.app.configure(brokers={"mails": second.url}, routes={"slow": "mails"})

    def __call__(self, *words: str) -> Ended:
        """How a command ends that is run here, since there are so many of them."""
        self._said.readouterr()
        code = run_reporting_errors(
            lambda: cli.main(["-A", "shop", *words], prog_name="celery5", standalone_mode=False)
        )
        printed = self._said.readouterr()
        return Ended(code, printed.out, printed.err)


@pytest.fixture
def pair(
    desk: Desk, own_server: EmbeddedServer, redis_client: "redis.Redis", capsys: pytest.CaptureFixture[str]
) -> Iterator[Pair]:
    """Both servers, with a job, a dead one and a schedule on each; and then the second one is gone."""
    one = Pair(desk, own_server, capsys)
    for task in ("add", "multiply"):
        call = one.app.signature(f"shop.{task}", 2, 3)
        one.app.send_many([call])
        one.app.schedule.add(call, every(3600), name=task)
    add_dead_letters(one.app, redis_client, "dead-here")
    with redis.Redis.from_url(own_server.url) as client:
        add_dead_letters(one.app, client, "dead-there", queue="slow")
    own_server.kill()
    yield one
    one.app.close()


LOOKS = {
    "info": "default",
    "queue list": "default",
    "schedule list": "add",
    "task limits": "no task has a limit",
    "dlq read": "dead-here",
    "dlq count": "1",
    "health": "no worker",
    "worker list": "no worker",
}


def test_commands_show_what_the_others_have_and_say_in_a_line_who_is_away(pair: Pair) -> None:
    for words, shown in LOOKS.items():
        ended = pair(*words.split())
        assert ended.code == 1, (words, ended)
        warnings = [line for line in ended.err.splitlines() if line.startswith("Warning: what is there")]
        assert len(warnings) == 1, (words, ended)
        assert "broker mails cannot be reached (" in warnings[0]
        assert shown in ended.out, (words, ended)
        assert "slow" not in ended.out
        assert "Traceback" not in ended.err


def test_programs_are_told_in_the_same_words_by_all_commands(pair: Pair) -> None:
    for words in (*LOOKS, "worker ping"):
        ended = pair(*words.split(), "--json")
        assert ended.code == 1, (words, ended)
        found = json.loads(ended.out)
        (line,) = [text for text in ended.err.splitlines() if text.startswith("{")]
        told = json.loads(line)["unreachable"]
        assert [log_line["broker"] for log_line in told] == ["mails"]
        assert told[0]["error"]
        if words in ("info", "health"):
            assert found["unreachable"] == told


def test_command_succeeds_unless_its_own_broker_is_unreachable(pair: Pair) -> None:
    for words in (
        "info --queue default",
        "dlq read --queue default",
        "schedule show add",
        "schedule pause add",
        "queue pause default",
        "autoscale status",
        "event list",
    ):
        ended = pair(*words.split())
        assert (ended.code, "Error" in ended.err, "Warning" in ended.err) == (0, False, False), (words, ended)
    for words in (
        "info --queue slow",
        "dlq read --queue slow",
        "dlq purge --yes --queue slow",
        "schedule show multiply",
        "schedule trigger multiply",
        "task show nobody-knows",
        "task revoke nobody-knows",
        "queue pause slow",
    ):
        ended = pair(*words.split())
        assert ended.code == 1, (words, ended)
        assert ended.error.startswith("Error: "), (words, ended)


@pytest.mark.parametrize(("command", "done"), [("purge --yes", "purged"), ("replay", "replayed")])
def test_dead_letters_wait_for_all_brokers_unless_reachable_ones_suffice(
    pair: Pair, command: str, done: str
) -> None:
    for refused in (command, f"{command} --dry-run"):
        ended = pair("dlq", *refused.split())
        assert ended.code == 1
        assert f"nothing was {done}, since not all brokers can be reached: --reachable does" in ended.err
        assert ended.out == ""
    assert [dead_job.id for dead_job in pair.app.dlq.read(queue="default")] == ["dead-here"]
    ended = pair("dlq", *command.split(), "--reachable", "--json")
    assert ended.code == 1
    told = json.loads(ended.out)
    assert (told[done], [broker["broker"] for broker in told["unreachable"]]) == (1, ["mails"])
    assert list(pair.app.dlq.read(queue="default")) == []
    pair.second.revive()
    pair.app.close()  # or it is left alone for a second
    ended = pair("dlq", *command.split())
    assert (ended.code, ended.err) == (0, "")
    assert f"1 dead job {done}" in ended.out


def test_what_is_imposed_on_a_task_holds_on_the_others_and_is_told(pair: Pair) -> None:
    ended = pair("task", "suspend", "shop.add")
    assert (ended.code, ended.out.strip()) == (1, "shop.add: suspended")
    assert ended.error.startswith("Warning: what is there is left out: broker mails cannot be reached")
    with pair.app.brokers.reachable():
        assert pair.app.limits.list()["shop.add"].suspended
    pair.second.revive()
    pair.app.close()
    assert pair("task", "resume", "shop.add").code == 0


def test_when_all_of_them_are_away_there_is_one_line(pair: Pair) -> None:
    pair.app.configure(broker="redis://127.0.0.1:1/0")
    for words in ("info", "queue list", "schedule list", "worker ping"):
        ended = pair(*words.split())
        assert ended.code == 1
        assert ended.error.startswith("Error: "), (words, ended)


def test_a_command_in_a_process_of_its_own_ends_like_that(pair: Pair) -> None:
    ended = celery5("-A", "shop", "queue", "list", cwd=pair.folder, env=pair.environment)
    assert ended.code == 1
    assert ended.error.startswith("Warning: what is there is left out: broker mails cannot be reached (")
    assert "default" in ended.out
