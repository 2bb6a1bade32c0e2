"""Pages of the guide: each begins with the task of its reader and shows code at once, in plain words."""

import re
from pathlib import Path

import pytest

from celery5.protocol.cluster.description import parse_cluster
from tests.house.docs_search import TASKS, read_words
from tests.house.sources import HERE

GUIDE = HERE / "docs" / "guide"
PAGES = sorted(path for path in GUIDE.glob("*.md") if path.name != "index.md")
FIRST_LINES = 15
"""Lines of the source in which the first code begins."""
FIRST_WORDS = 100
"""Words before it, at most."""
MOST_PAGES = 6
"""Pages of the path of one kind of reader; where it has a choice of two pages, both count."""
PARTS = "worker|Controller|Router|Scheduler|Publisher|broker|queue|job|task|stream|event|workflow|lease|page"
"""A page that begins with one of these as its subject says what it is, not what a reader does with it."""
WORDS = (
    *(
        "whoever",
        "whom",
        "whence",
        "anew",
        "patience",
        "turnstile",
        "whereabouts",
        "graves?",
        "graveyard",
        "bury",
    ),
    *("understudy", "ledger", "junction", "detours?", r"(?:is|are|was|were|being) told", "tells of"),
)
"""Words that say nothing to a reader who learnt English at school, and the ones that this project once had."""


def read_start(page: Path) -> list[str]:
    """Return the lines of a page up to its first code. A diagram is none."""
    lines = page.read_text().splitlines()
    fences = [number for number, line in enumerate(lines) if re.match(r"```(?!mermaid)\w", line)]
    return lines[: fences[0]] if fences else lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_guide_shows_code_on_its_first_screen(page: Path) -> None:
    start = read_start(page)
    assert len(start) < FIRST_LINES
    assert len(" ".join(start).split()) <= FIRST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_guide_begins_with_the_task_of_its_reader(page: Path) -> None:
    title, _, first = page.read_text().split("\n", 2)
    assert title.startswith("# ")
    sentence = re.split(r"(?<=[.:])\s", " ".join(first.split("\n\n")[0].splitlines()))[0]
    assert len(sentence.split()) <= 40
    assert not re.match(rf"(?:This|It|celery5)\b|(?:An?|The) (?:{PARTS})s?\b", sentence), sentence


def test_the_tour_shows_code_on_its_first_screen() -> None:
    start = read_start(HERE / "docs" / "tour.md")
    assert len(start) < FIRST_LINES
    assert len(" ".join(start).split()) <= FIRST_WORDS


OTHER_PAGES = [
    *(HERE / "docs" / name for name in ("tour.md", "faults.md", "internals.md")),
    *sorted((HERE / "docs").glob("reference/*.md")),
    *sorted((HERE / "docs").glob("internals/*.md")),
]


@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.relative_to(HERE / "docs").as_posix())
def test_a_page_beside_the_guide_says_in_its_first_sentence_what_it_lists_or_explains(page: Path) -> None:
    title, _, first, *_ = page.read_text().split("\n", 3)
    assert title.startswith("# ")
    assert re.match(r"[A-Z`]", first), f"a sentence is to stand below {title!r}, not {first!r}"
    sentence = re.split(r"(?<=[.:])\s", first)[0]
    assert len(sentence.split()) <= 40


def test_the_pages_of_the_documentation_use_plain_words() -> None:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(HERE)}: {word}"
        for path in sorted((HERE / "docs").rglob("*.md"))
        if not {"decisions"} & set(path.parts) and path.name != "parity.md"
        for word in pattern.findall(re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", path.read_text()))
    ]
    assert found == []


NEEDED = (
    *("acks_late", "visibility_timeout", "beat", "chord", "shared_task", "apply_async", "eta", "flower"),
    *("prefetch multiplier", "worker_prefetch_multiplier", "worker_max_tasks_per_child", "link_error"),
    *("retry_backoff", "task_always_eager", "result backend", "soft_time_limit", "crontab", "task_routes"),
)


@pytest.mark.parametrize("word", NEEDED)
def test_a_word_of_celery_has_a_section_that_leads_to_a_page(word: str) -> None:
    assert read_words()[word]


def test_the_pages_that_a_search_must_find_exist() -> None:
    assert [page for page in TASKS.values() if not (HERE / "docs" / f"{page.rstrip('/')}.md").exists()] == []


def test_the_path_of_each_kind_of_reader_has_at_most_six_pages() -> None:
    text = (GUIDE / "index.md").read_text().partition("\n## Four paths\n")[2].partition("\n## ")[0]
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 4
    rows += [row for row in (HERE / "docs" / "index.md").read_text().splitlines() if "in this order" in row]
    assert [row for row in rows if len(set(re.findall(r"\]\(([^)#]+\.md)\)", row))) > MOST_PAGES] == []


def test_every_cluster_description_on_a_page_can_be_used() -> None:
    pattern = re.compile(r'(?ms)^```toml title="cluster\.toml"\n(.*?)^```$')
    found = [(page.stem, block) for page in PAGES for block in pattern.findall(page.read_text())]
    assert {"controller", "upgrading", "hosts"} <= {page for page, _ in found}
    for _, block in found:
        assert parse_cluster(block.encode()).groups
