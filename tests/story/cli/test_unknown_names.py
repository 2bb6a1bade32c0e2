"""Unknown names: one line each, and an exit code by one rule. What is there stays as it was."""

import sys

import pytest

from tests.story.cli.commands import celery5
from tests.story.conftest import Desk

NO_QUEUE = "Error: no queue 'nope' here; used so far: default"
NO_TASK = "Warning: no task here is named {}; "
ANY_TASK = NO_TASK.format("nope") + "celery5 task search shows jobs of all tasks"
SIMILAR = NO_TASK.format("shop.ad") + "did you mean 'shop.add'?"
NO_SINK = "Warning: no sink is named nope; no task has a sink"


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        # What only Redis knows.
        ("queue purge nope --yes", 1, "", NO_QUEUE),
        ("dlq read --queue nope", 1, "", NO_QUEUE),
        ("dlq purge --queue nope --yes", 1, "", NO_QUEUE),
        ("dlq purge --id nope --yes", 1, "no dead jobs", "Error: no dead job has the id nope "),
        ("task search --queue nope", 1, "", NO_QUEUE),
        ("task show nope", 1, "", "Error: nothing is known of job 'nope' on any queue"),
        ("bulk show nope", 1, "", "Error: no bulk action nope"),
        ("bulk stop nope", 1, "", "Error: no bulk action nope"),
        ("bulk resume nope", 1, "", "Error: no bulk action nope: "),
        ("metrics show nope", 1, "", NO_QUEUE),
        ("metrics history --queue nope", 1, "", NO_QUEUE),
        # What must be declared.
        ("task suspend nope", 2, "", "Error: no task 'nope' here; "),
        ("task resume nope", 2, "", "Error: no task 'nope' here; "),
        ("schedule show nope", 2, "", "Error: no schedule 'nope'; "),
        ("alert silence nope", 2, "", "Error: there is no alert 'nope'; "),
        ("dlq purge --reason nope --yes", 2, "", "Error: "),
        # Filters.
        ("dlq read --task nope", 0, "no dead jobs match; ", ANY_TASK),
        ("dlq count --task nope", 0, "no dead jobs match; ", ANY_TASK),
        ("dlq groups --task nope", 0, "no dead jobs match; ", ANY_TASK),
        ("dlq replay --task nope", 0, "no dead jobs match; ", ANY_TASK),
        ("dlq purge --task nope --yes", 0, "no dead jobs match; ", ANY_TASK),
        ("dlq purge --task shop.ad --yes", 0, "no dead jobs match; ", SIMILAR),
        ("dlq purge --task shop.a* --yes", 0, "no dead jobs match; ", ""),
        ("dlq purge --error Nope --yes", 0, "no dead jobs match; ", ""),
        ("dlq purge --sink nope --yes", 0, "no dead jobs", NO_SINK),
        ("dlq groups --sink nope", 0, "no dead jobs", NO_SINK),
        ("task search --task shop.ad", 0, "no jobs were found", SIMILAR),
    ],
)
def test_an_unknown_name_is_one_line_and_changes_nothing(
    desk: Desk, words: str, code: int, out: str, err: str
) -> None:
    job = sys.modules["shop"].add.delay(1, 2)
    ended = celery5("-A", "shop", *words.split(), cwd=desk.folder)
    assert ended.code == code, ended
    assert ended.out.startswith(out)
    assert len(ended.out.splitlines()) == bool(out)
    lines = [line for line in ended.err.splitlines() if not line.startswith("not looked at: ")]
    assert len(lines) == bool(err)
    assert "".join(lines).startswith(err)
    assert desk.app.find(job.id) is not None
