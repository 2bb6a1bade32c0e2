"""Commands that print or copy files of the package: pages of the documentation, and units for systemd."""

import json
from pathlib import Path

import pytest

from celery5.cli.standalone.docs import Found, search
from tests.house.docs_search import TASKS, find_missed, read_words
from tests.house.sources import HERE
from tests.story.cli.commands import celery5

RECORDS = ("docs/reference/parity", "docs/decisions/", "docs/internals", "docs/faults")
UNITS = {unit.name: unit.read_text() for unit in (HERE / "systemd").iterdir()}


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_page_is_printed_by_its_path_or_the_end_of_it(tmp_path: Path) -> None:
    page = (HERE / "docs" / "guide" / "types.md").read_text()
    for name in ("docs/guide/types.md", "guide/types", "types"):
        ended = celery5("docs", name, cwd=tmp_path)
        assert (ended.code, ended.out, ended.err) == (0, page + "\n", "")


def test_of_pages_with_one_name_that_of_the_guide_is_printed(tmp_path: Path) -> None:
    for name in ("streams", "guide/streams"):
        assert celery5("docs", name, cwd=tmp_path).out == (HERE / "docs/guide/streams.md").read_text() + "\n"
    assert (
        celery5("docs", "reference/streams", cwd=tmp_path).out
        == (HERE / "docs/reference/streams.md").read_text() + "\n"
    )


def test_all_pages_are_listed_with_their_titles(tmp_path: Path) -> None:
    lines = celery5("docs", cwd=tmp_path).out.splitlines()
    assert len(lines) == 1 + len(list((HERE / "docs").rglob("*.md")))
    assert "docs/guide/tasks.md" in [line.split()[0] for line in lines if line.endswith("  Tasks")]


def test_pages_for_users_are_listed_before_reference_and_records(tmp_path: Path) -> None:
    pages = [line.split()[0] for line in celery5("docs", cwd=tmp_path).out.splitlines()[1:]]
    assert pages[:3] == ["docs/index.md", "docs/tour.md", "docs/guide/index.md"]
    kinds = [
        3 if page.startswith(RECORDS) else 2 if page.startswith("docs/reference/") else 1 for page in pages
    ]
    assert kinds == sorted(kinds)


def test_an_unknown_page_is_answered_with_a_similar_one(tmp_path: Path) -> None:
    for name, similar in (("taks", "tasks"), ("dead-leters", "dead-letters")):
        ended = celery5("docs", name, cwd=tmp_path)
        assert (ended.code, ended.out) == (2, "")
        assert f"no page {name!r}; did you mean {similar!r}?" in ended.error


@pytest.mark.parametrize("words", [["acks_late"], ["visibility", "timeout"], ["Result-Backend"], ["flower"]])
def test_words_that_name_no_page_are_looked_for_in_all_pages(tmp_path: Path, words: list[str]) -> None:
    ended = celery5("docs", *words, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    _, first, *others = ended.out.splitlines()
    assert first.startswith("docs/guide/celery-words.md")
    assert "_".join(words).lower().replace("-", "_") in first.replace(" ", "_")
    assert 1 <= len(others) < 10


QUESTIONS = [
    ("limit per customer", "limits"),
    ("queue too old alert", "alerts"),
    ("always_eager", "celery-words testing"),
    ("retry with backoff", "retries"),
    ("run a task every night", "periodic"),
    ("rate limit", "limits"),
    ("cancel a running job", "cancellation"),
    ("replay dead letters", "dead-letters"),
    ("dashboard login token", "dashboard"),
    ("docker compose", "containers"),
    ("send after commit of the transaction", "django transactions"),
    ("worker concurrency", "concurrency workers"),
    ("task time limit", "cancellation tasks"),
    ("dashboard in gunicorn", "django dashboard flask"),
    ("redis password", "trust brokers"),
    ("test without redis", "testing"),
    ("show the progress of a job", "results tasks"),
    ("chain of tasks", "celery-words workflows"),
    ("deploy a new version", "upgrading evolving"),
    ("kubernetes autoscaling", "kubernetes autoscaling"),
    ("json logs", "logging"),
    ("prometheus metrics", "metrics"),
    ("where is my job", "finding-jobs"),
    ("job runs twice", "idempotency failures"),
    ("systemd units", "systemd"),
    ("result backend", "celery-words"),
    ("django model as argument", "django types"),
    ("redis memory is full", "failures"),
    ("worker killed out of memory", "workers failures gpus"),
    ("send to a certain queue", "sending tasks"),
    ("priority of jobs", "priorities"),
    ("scheduler high availability", "periodic"),
    ("webhook for alerts", "alerts"),
    ("signed commands keys", "control containers"),
    ("countdown eta", "sending celery-words"),
    ("per customer", "limits"),
    ("queue too old", "alerts"),
    ("jobs stuck", "finding-jobs"),
    ("worker killed", "workers"),
    ("redis full", "failures"),
    ("too many retries", "retries"),
    ("stop a queue", "control"),
    ("who is running", "top"),
    ("old jobs", "finding-jobs alerts"),
    ("lost job", "finding-jobs durability"),
    ("slow queue", "alerts"),
    ("memory leak", "workers boxed"),
]
"""What people type, and the pages of which one must be among the first three rows."""


OPERATORS = [
    ("limit per customer", "guide/limits"),
    ("queue too old alert", "guide/alerts"),
    ("visibility_timeout", "guide/celery-words guide/failures"),
    ("flower", "guide/celery-words guide/from-celery"),
    ("redis full", "guide/failures guide/on-call"),
    ("redis down", "guide/on-call guide/durability"),
    ("systemd django", "guide/systemd guide/django"),
    ("one worker for one queue", "guide/workers"),
    ("import error deploy", "guide/controller guide/upgrading"),
    ("change password", "guide/trust"),
    ("redis password", "guide/trust"),
    ("rotate password", "guide/trust"),
    ("upgrade", "guide/upgrading"),
    ("slow job", "guide/finding-jobs"),
    ("HELD", "reference/states"),
    ("EXECUTING", "reference/states"),
    ("REVOKED", "reference/states"),
    ("PENDING", "guide/from-celery"),
    ("eager mode", "guide/testing"),
    ("install", "guide/install"),
    ("dead letter", "guide/dead-letters"),
    ("retry backoff", "guide/retries"),
    ("canary", "guide/controller guide/upgrading"),
    ("pause a queue", "guide/control"),
    ("lost worker", "guide/workers"),
    ("memory limit", "guide/workers"),
    ("Sentinel", "guide/sentinel"),
    ("who sent a job", "guide/finding-jobs"),
    ("cron", "guide/periodic guide/celery-words"),
    ("timezone", "guide/periodic"),
    ("purge", "guide/dead-letters"),
    ("duplicates", "guide/idempotency"),
    ("on call", "guide/on-call"),
    ("upgrade with no loss", "guide/upgrading"),
    ("upgrade without losing jobs", "guide/upgrading"),
    ("redis unreachable in a task", "guide/django guide/durability"),
    ("redis full in a view", "guide/django guide/failures"),
    ("exactly once", "guide/streams"),
    ("rolling upgrade", "guide/upgrading"),
    ("rename a task", "guide/evolving"),
]
"""What operators type, and the pages of which one must be in the first two rows."""
FIRST = (
    "one worker for one queue",
    "import error deploy",
    "HELD",
    "redis password",
    "rotate password",
    "slow job",
    "on call",
    "PENDING",
    "upgrade with no loss",
)
"""Those whose page must be in the first row."""


@pytest.mark.parametrize(("words", "names"), OPERATORS)
def test_a_question_of_an_operator_finds_its_page_in_two_rows(words: str, names: str) -> None:
    wanted = {f"docs/{name}.md" for name in names.split()}
    rows = 1 if words in FIRST else 2
    pages = [found.section.page for found in search(PAGES, words)]
    assert wanted & {*pages[:rows]}
    assert pages == sorted(pages, key=lambda page: page.startswith(RECORDS)), "pages for users go first"


def test_a_record_with_all_words_goes_behind_a_guide_that_lacks_one() -> None:
    record, guide = "docs/reference/parity.md", "docs/guide/upgrading.md"
    pages = {record: "# Parity\n\nA mandated upgrade.\n", guide: "# Upgrading\n\nText.\n"}
    assert [found.section.page for found in search(pages, "mandated upgrade")] == [guide, record]
    assert [found.section.page for found in search(pages, "mandated")] == [record]


@pytest.mark.parametrize(("words", "names"), QUESTIONS)
def test_a_question_finds_its_page_among_the_first_three(words: str, names: str) -> None:
    wanted = {f"docs/guide/{name}.md" for name in names.split()}
    assert wanted & {found.section.page for found in search(PAGES, words)[:3]}


def test_questions_of_the_site_search_find_the_same_pages_in_docs() -> None:
    asked = [*read_words(), *TASKS]
    found = {words: [_get_place(section) for section in search(PAGES, words)] for words in asked}
    missed = [line.partition(":")[0] for line in find_missed(found)]
    assert sorted(missed) == ["Task", "group"], "words that stand in the titles and headings of other pages"


def _get_place(found: Found) -> str:
    return f"{found.section.page.removeprefix('docs/').removesuffix('.md')}/#"


PAGES = {path.relative_to(HERE).as_posix(): path.read_text() for path in (HERE / "docs").rglob("*.md")}


def find(query: str, **texts: str) -> list[Found]:
    return search({f"docs/guide/{name}.md": text for name, text in texts.items()}, query)


def test_words_are_found_in_titles_before_headings_before_texts() -> None:
    found = find(
        "retrying jobs",
        first="# First\n\nA job is retried.\n",
        second="# Second\n\n## Retries of a job\n\nText.\n",
        third="# Jobs and retry\n\nText.\n",
    )
    assert [section.section.titles for section in found] == [
        ("Jobs and retry",),
        ("Second", "Retries of a job"),
        ("First",),
        ("Second",),  # where another section has them
    ]


def test_words_of_the_first_paragraph_go_before_those_of_other_texts() -> None:
    found = find(
        "slow mail",
        other="# Other\n\nText.\n\n## Part\n\nA slow mail; mail is slow, and slow mail.\n",
        wanted="# Wanted\n\nFind what makes mail slow.\n\n## Part\n\nText.\n",
    )
    assert found[0].section.titles == ("Wanted",)


def test_a_part_of_a_name_is_found_and_small_words_do_not_count() -> None:
    page = "# Words\n\n## task_always_eager\n\nNone.\n\n## Others\n\nWhere there is how.\n"
    found = find("what is always_eager", words=page)
    assert [section.section.titles[-1] for section in found][:1] == ["task_always_eager"]
    assert found[0].missing == ()


def test_where_nothing_has_all_words_the_sections_with_most_are_shown(tmp_path: Path) -> None:
    ended = celery5("docs", "zqwxj", "per", "customer", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "no section has all of these words; without zqwxj:\n")
    assert "customer" in ended.out


def test_pages_rows_and_a_page_are_json_for_programs(tmp_path: Path) -> None:
    pages = json.loads(celery5("docs", "--json", cwd=tmp_path).out)
    assert {"page": "docs/guide/tasks.md", "title": "Tasks"} in pages
    rows = json.loads(celery5("docs", "limit", "per", "customer", "--json", cwd=tmp_path).out)
    assert list(rows[0]) == ["page", "section", "line"]
    page = json.loads(celery5("docs", "types", "--json", cwd=tmp_path).out)
    assert page == {"page": "docs/guide/types.md", "text": (HERE / "docs/guide/types.md").read_text()}


@pytest.mark.parametrize(
    ("words", "meant"), [("visbility", "visibility"), ("visbility timeout", "visibility timeout")]
)
def test_a_misspelt_word_finds_what_the_right_one_finds(words: str, meant: str, tmp_path: Path) -> None:
    found, wanted = (
        celery5("docs", *words.split(), cwd=tmp_path),
        celery5("docs", *meant.split(), cwd=tmp_path),
    )
    assert (found.code, found.out) == (0, wanted.out)
    assert found.err.startswith("no page has visbility; searched for visibility\n")


def test_the_heading_of_a_section_is_shown_with_those_above_it(tmp_path: Path) -> None:
    first = celery5("docs", "schedules in memory", cwd=tmp_path).out.splitlines()[1]
    assert first.startswith("docs/guide/testing.md")
    assert "In memory > Schedules" in first


def test_units_are_copied_to_the_folder_of_the_user(tmp_path: Path) -> None:
    ended = celery5("systemd", "install", cwd=tmp_path, env={"XDG_CONFIG_HOME": str(tmp_path)})
    folder = tmp_path / "systemd" / "user"
    assert (ended.code, read(folder)) == (0, UNITS)
    assert ended.out.splitlines() == [str(folder / name) for name in sorted(UNITS)]
    assert "systemctl --user daemon-reload" in ended.err


def test_a_dry_run_prints_the_units_and_their_places_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    printed = celery5("systemd", "install", "units", "--dry-run", cwd=tmp_path)
    expected = "".join(f"# units/{name} is new\n{UNITS[name]}\n" for name in sorted(UNITS))
    assert (printed.code, printed.out, printed.err, folder.exists()) == (0, expected, "", False)
    folder.mkdir()
    first, second, *_ = sorted(UNITS)
    (folder / first).write_text(UNITS[first])
    (folder / second).write_text("[Unit]\n")
    printed = celery5("systemd", "install", "units", "--dry-run", cwd=tmp_path)
    assert f"# units/{first} is there already\n" in printed.out
    assert f"# units/{second} would be replaced\n" in printed.out
    assert read(folder) == {first: UNITS[first], second: "[Unit]\n"}


def test_units_that_differ_are_replaced_only_with_yes(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    assert celery5("systemd", "install", "units", cwd=tmp_path).code == 0
    assert celery5("systemd", "install", "units", cwd=tmp_path).code == 0, (
        "nothing differs, so nothing is asked"
    )
    (folder / "celery5.target").write_text("mine\n")
    (folder / "other.service").write_text("kept\n")
    asked = celery5("systemd", "install", "units", cwd=tmp_path)
    assert asked.code != 0
    assert "Replace celery5.target in units?" in asked.err
    assert (folder / "celery5.target").read_text() == "mine\n"
    assert celery5("systemd", "install", "units", "--yes", cwd=tmp_path).code == 0
    assert read(folder) == UNITS | {"other.service": "kept\n"}


def test_a_folder_for_units_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = celery5("systemd", "install", "file/units", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "Error: file/units: the units cannot be written there: Not a directory\n"
