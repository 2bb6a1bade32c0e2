"""Unknown names: one line each, and one exit code. What is there stays as it was."""

import sys

import pytest

from celery5.cli.main import cli
from tests.house.commands_table import list_commands
from tests.story.cli.commands import celery5
from tests.story.conftest import Desk

NO_QUEUE = "Error: no queue 'nope' here; used so far: default"
NO_TASK = "Error: no task 'nope' here; declared: shop."
SIMILAR = "Error: no task 'shop.ad' here; did you mean 'shop.add'?"
NO_SINK = "Error: no sink 'nope' here; known: none"
NO_STREAM = "Error: no stream 'nope'"
NO_WORKER = "Error: no worker 'nope' lives"
NO_SCHEDULE = "Error: no schedule 'nope'; "
NO_EVENT = "Error: no event 'nope' is known"
NO_RUN = "Error: nothing is known of run 'nope'"
NO_CONTROLLER = "Error: no Controller of application "
NO_ACTION = "Error: no bulk action nope"
NONE_MATCH = "no dead jobs match; "
CASES = [
    # One that a command acts on or shows.
    ("queue show nope", "", NO_QUEUE),
    ("queue purge nope --yes", "", NO_QUEUE),
    ("queue pause nope", "", NO_QUEUE),
    ("queue resume nope", "", NO_QUEUE),
    ("info --queue nope", "", NO_QUEUE),
    ("metrics show nope", "", NO_QUEUE),
    ("metrics history --queue nope", "", NO_QUEUE),
    ("dlq read --queue nope", "", NO_QUEUE),
    ("dlq count --queue nope", "", NO_QUEUE),
    ("dlq groups --queue nope", "", NO_QUEUE),
    ("dlq replay --queue nope", "", NO_QUEUE),
    ("dlq purge --queue nope --yes", "", NO_QUEUE),
    ("dlq purge --id nope --yes", "no dead jobs", "Error: no dead job has the id nope "),
    ("dlq read --id nope", "no dead jobs", "Error: no dead job has the id nope "),
    ("dlq replay --id nope", "no dead jobs", "Error: no dead job has the id nope "),
    ("dlq count --id nope", "no dead jobs", "Error: no dead job has the id nope "),
    ("dlq read --stream nope --group nope", "", NO_STREAM),
    ("dlq replay --stream nope --group nope", "", NO_STREAM),
    ("dlq purge --stream nope --group nope --yes", "", NO_STREAM),
    ("bulk show nope", "", NO_ACTION),
    ("bulk stop nope", "", NO_ACTION),
    ("bulk resume nope", "", NO_ACTION),
    ("bulk revoke nope --yes", "", NO_QUEUE),
    ("task show nope", "", "Error: nothing is known of job 'nope' on any queue"),
    ("task show nope --queue nope", "", NO_QUEUE),
    ("task revoke nope --queue nope", "", NO_QUEUE),
    ("task send nope", "", NO_TASK),
    ("task suspend nope", "", NO_TASK),
    ("task resume nope", "", NO_TASK),
    ("task limit nope 3", "", NO_TASK),
    ("schedule add new nope --every 5", "", NO_TASK),
    ("schedule change nope --every 5", "", NO_SCHEDULE),
    ("schedule pause nope", "", NO_SCHEDULE),
    ("schedule remove nope --yes", "", NO_SCHEDULE),
    ("schedule resume nope", "", NO_SCHEDULE),
    ("schedule show nope", "", NO_SCHEDULE),
    ("schedule trigger nope", "", NO_SCHEDULE),
    ("event resubscribe nope nope", "", "Error: no subscription of nope to nope was withdrawn"),
    ("event send nope", "", NO_EVENT),
    ("event show nope", "", NO_EVENT),
    ("event unsubscribe nope nope --yes", "", NO_EVENT),
    ("alert silence nope", "", "Error: there is no alert 'nope'; "),
    ("alert unsilence nope", "", "Error: nope was not silenced"),
    ("stream parked nope nope", "", NO_STREAM),
    ("stream quarantine nope nope", "", NO_STREAM),
    ("stream release nope nope --all", "", NO_STREAM),
    ("stream reset nope nope --yes", "", NO_STREAM),
    ("stream reshard nope 3", "", NO_STREAM),
    ("stream seek nope nope --to earliest", "", NO_STREAM),
    ("stream send nope {}", "", NO_STREAM),
    ("stream show nope", "", NO_STREAM),
    ("stream tail nope", "", NO_STREAM),
    ("workflow cancel nope", "", NO_RUN),
    ("workflow graph nope", "", NO_RUN),
    ("workflow retry nope", "", NO_RUN),
    ("workflow show nope", "", NO_RUN),
    ("workflow signal nope nope", "", NO_RUN),
    ("worker run nope --to nope", "", NO_WORKER),
    *(
        (f"worker {words} --to nope", "", NO_WORKER)
        for words in (
            *("active", "budget", "concurrency", "health", "ping", "prefetch", "reload", "shutdown"),
            *("retry-boot-step nope", "revoke nope", "set-log-level info", "stack", "stats", "tell ping"),
        )
    ),
    ("controller reload --to nope", "", NO_CONTROLLER),
    ("controller restart nope", "", NO_CONTROLLER),
    ("controller scale --workers 2 --to nope --yes", "", NO_CONTROLLER),
    ("controller status --to nope", "", NO_CONTROLLER),
    ("controller stop --to nope", "", NO_CONTROLLER),
    # A filter by which nothing is found.
    ("dlq read --task nope", NONE_MATCH, NO_TASK),
    ("dlq count --task nope", NONE_MATCH, NO_TASK),
    ("dlq groups --task nope", NONE_MATCH, NO_TASK),
    ("dlq replay --task nope", NONE_MATCH, NO_TASK),
    ("dlq purge --task nope --yes", NONE_MATCH, NO_TASK),
    ("dlq purge --task shop.ad --yes", NONE_MATCH, SIMILAR),
    ("dlq purge --sink nope --yes", "no dead jobs", NO_SINK),
    ("dlq groups --sink nope", "no dead jobs", NO_SINK),
    ("task search --queue nope", "", NO_QUEUE),
    ("task search --task shop.ad", "no jobs were found", SIMILAR),
]
"""Commands with a name that nothing has, and how what they write begins."""
NOTHING_FOUND = [
    ("dlq purge --task shop.a* --yes", NONE_MATCH),
    ("dlq purge --task shop.add --yes", NONE_MATCH),
    ("dlq purge --error Nope --yes", NONE_MATCH),
    ("task search --worker nope", "no jobs were found"),
    ("task list --prefix nope", "no such task is declared"),
    ("audit list --who nope", "no actions are recorded"),
]
"""Filters by patterns, and by what has no list of names."""
NOT_IN_LIST = [
    ("dlq purge --reason nope --yes", "Error: reason 'nope' is not known: "),
    ("worker budget nope", "Error: Invalid value for 'KIND': 'nope' is no kind of task"),
    ("audit list --action nope", "Error: no action 'nope'; "),
    ("worker set-log-level nope", "Error: Invalid value for 'LEVEL': 'nope' is not one of "),
]
"""Values of celery5's own lists: another one is wrong usage."""
NAMES = {
    *("queue", "task", "to", "name", "event", "stream", "stream_group", "group", "workflow"),
    *("id", "ids", "job", "sink", "members"),
}
"""Parameters that are a name or an id."""
ANY_NAME = {
    "bulk retry",  # its workflow is a filter: of runs that failed
    "dashboard token",
    "controller start",
    "publisher start",
    "router start",
    "scheduler start",
    "worker start",
}
"""Commands that take a new name, or one of something that need not be."""


@pytest.mark.parametrize(("words", "out", "err"), CASES, ids=[case[0] for case in CASES])
def test_an_unknown_name_is_one_line_exit_code_1_and_changes_nothing(
    desk: Desk, words: str, out: str, err: str
) -> None:
    job = sys.modules["shop"].add.delay(1, 2)
    ended = celery5("-A", "shop", *words.split(), cwd=desk.folder)
    assert ended.code == 1, ended
    assert ended.out.startswith(out)
    assert len(ended.out.splitlines()) == bool(out)
    (line,) = [line for line in ended.err.splitlines() if not line.startswith("not looked at: ")]
    assert line.startswith(err)
    assert desk.app.find(job.id) is not None


@pytest.mark.parametrize(("words", "out"), NOTHING_FOUND)
def test_a_filter_that_matches_nothing_is_exit_code_0(desk: Desk, words: str, out: str) -> None:
    ended = celery5("-A", "shop", *words.split(), cwd=desk.folder)
    assert (ended.code, ended.out.startswith(out)) == (0, True), ended
    assert not [line for line in ended.err.splitlines() if not line.startswith("not looked at: ")]


@pytest.mark.parametrize(("words", "err"), NOT_IN_LIST)
def test_a_value_that_is_not_in_a_list_of_celery5_is_exit_code_2(desk: Desk, words: str, err: str) -> None:
    ended = celery5("-A", "shop", *words.split(), cwd=desk.folder)
    assert (ended.code, ended.error.startswith(err)) == (2, True), ended


def test_each_command_that_takes_a_name_is_tried() -> None:
    taking = {
        path
        for path, command in list_commands(cli)
        if NAMES & {parameter.name for parameter in command.params}
    }
    tried = {path for path in taking if any(f"{words} ".startswith(f"{path} ") for words, *_ in CASES)}
    assert taking - tried == ANY_NAME
