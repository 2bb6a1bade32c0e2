"""Guides for those who come from elsewhere: every name of ours on them is there, and every command takes its words.

And every name of theirs is there, too: in the first column of a table of its section.
"""

import inspect
import re
import shlex
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

import celery5
from celery5 import App, errors, testing
from celery5.cli.main import cli
from celery5.config.settings import Settings
from celery5.hints import CELERY, NameKind, find_hint
from celery5.protocol.job.job import Options
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.streams import Keep, Record, Stream, StreamEntry, StreamEvents
from celery5.streams.processor import ProcessorOptions
from celery5.tasks import CurrentJob
from celery5.tasks.declaration import TaskOptions
from tests.house import celery_names, fennel_names
from tests.house.sources import HERE

PAGES = ["from-celery", "from-fennel", "from-runnel"]
app = App("guides")


@app.task
def add(a: int, b: int) -> int:
    return a + b


class Order(Record):
    order_id: int


orders: Stream[Order] = app.stream("orders", Order, by="order_id")
ENTRY = StreamEntry(0, "group", (b"1-1", [b"=json", b'{"order_id":1}']), orders.codec)
OBJECTS: dict[str, Any] = {
    "orders": orders,
    "entry": ENTRY,
    "events": StreamEvents(cast("Any", SimpleNamespace()), orders.codec),
    "app": app,
    "result": app.result("x"),
    "task": add,
    "add": add,
    "self": CurrentJob,
    "sent": app.result("x"),
    "RetryPolicy": RetryPolicy,
}
KNOWN = {
    *celery5.__all__,
    *vars(errors),
    *Options.__struct_fields__,
    *Settings.__struct_fields__,
    *inspect.signature(App).parameters,
    *inspect.signature(app.stream).parameters,
    *ProcessorOptions.__annotations__,
    *(field.name for field in fields(Keep)),
}


def section(page: str, title: str) -> str:
    """What stands under a heading of a page, up to the next."""
    text = re.sub(r"(?ms)^```.*?^```$", "", (HERE / "docs" / "guide" / f"{page}.md").read_text())
    found = re.search(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text)
    assert found, title
    return found[1]


def theirs(page: str, title: str) -> str:
    """The first cells of a section's tables, one a line."""
    return "\n".join(re.findall(r"(?m)^\| (.*?) \|", section(page, title)))


def missing(names: list[str], text: str) -> list[str]:
    """Names that `text` has neither as they are nor among all that begin so (`beat_*`)."""
    metric_families = tuple(re.findall(r"`(\w+_)\*`", text))
    return [
        name
        for name in names
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        and not (metric_families and name.startswith(metric_families))
    ]


@pytest.mark.parametrize("title", celery_names.BY_SECTION)
def test_every_name_of_celery_is_on_its_page(title: str) -> None:
    assert missing(celery_names.BY_SECTION[title], theirs("from-celery", title)) == []


@pytest.mark.parametrize("title", fennel_names.BY_SECTION)
def test_every_name_of_fennel_is_on_its_page(title: str) -> None:
    cells = theirs("from-fennel", title)
    assert [name for name in fennel_names.BY_SECTION[title] if name not in cells] == []


def test_every_state_and_every_field_of_fennels_log_is_on_its_page() -> None:
    assert missing([f"`{state}`" for state in fennel_names.STATES], section("from-fennel", "States")) == []
    assert missing([f"`{name}`" for name in fennel_names.LOG], section("from-fennel", "Log")) == []


def ours(page: str) -> list[str]:
    """What stands in backticks in the second column of the tables."""
    text = (HERE / "docs" / "guide" / f"{page}.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [said for row in rows for said in re.findall(r"`([^`]+)`", row[1])]


def words_of_commands(group: click.Group) -> set[str]:
    """Return the names of all commands of a group, and of those in them, with `_` for `-` as Celery writes them."""
    context, found = click.Context(group), set[str]()
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found.add(name.replace("-", "_"))
        if isinstance(command, click.Group):
            found |= words_of_commands(command)
    return found


OFFERED = {
    *celery5.__all__,
    *testing.__all__,
    *TaskOptions.__annotations__,
    *Options.__struct_fields__,
    *Settings.__struct_fields__,
    *inspect.signature(App).parameters,
    *(name for name in dir(app) if not name.startswith("_")),
    *(name for name in dir(app.control) if not name.startswith("_")),
    *words_of_commands(cli),
}
"""All that celery5 has under a name that a user writes."""
ANOTHER_THING = {
    *("app.events", "app.pool", "app.log", "app.backend"),  # parts of Celery's inside
    *("connection", "publisher"),  # what is handed over to send with; a setting of ours
    *("signature", "task", "worker", "brokers"),  # words of a sentence
}
"""Names on the page of which celery5 has one that means something else."""
ELSEWHERE = ("`self.request.args`",)
"""How rows begin that say of what one has: of a running job. celery5 has it of other things."""
SAID_TO_BE_NONE = re.compile(r"(none|nothing)\b")


def rows_of_nothing() -> list[tuple[str, set[str]]]:
    """Return the rows that say that celery5 has no such thing: the first cell, and the names in it."""
    text = re.sub(r"(?ms)^```.*?^```$", "", (HERE / "docs" / "guide" / "from-celery.md").read_text())
    found = []
    for line in text.splitlines():
        cells = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("| ") and len(cells) > 1 and SAID_TO_BE_NONE.match(cells[1]):
            found.append((cells[0], names_in(cells[0])))
    lines = section("from-celery", "What is not there yet").splitlines()
    return [*found, *((row, names_in(row.split("|")[1])) for row in lines if row.startswith("| "))]


def names_in(cell: str) -> set[str]:
    """Return the names of a cell: those in backticks, without what Celery puts around them, and the words besides."""
    said = set(re.findall(r"`([^`]+)`", cell))
    plain = set(re.findall(r"[A-Za-z_]+", re.sub(r"`[^`]+`", "", cell)))
    commands = {words.split()[-1] for words in said if words.startswith("celery ")}
    names = {re.sub(r"[(=].*", "", words).lstrip("@") for words in said if not words.startswith("celery ")}
    return {name for name in names | commands | plain if name not in ANOTHER_THING}


def test_nothing_that_celery5_has_is_said_to_be_missing() -> None:
    rows = rows_of_nothing()
    assert len(rows) > 60
    found = {cell: names & OFFERED for cell, names in rows if not cell.startswith(ELSEWHERE)}
    assert {cell: names for cell, names in found.items() if names} == {}


@pytest.mark.parametrize("thing", CELERY)
def test_no_hint_says_nothing_of_what_celery5_has(thing: NameKind) -> None:
    silent = {name for name, ours in CELERY[thing].items() if ours.startswith("nothing")}
    words = {word for name in silent for word in name.split()}
    assert words & OFFERED - ANOTHER_THING == set()


@pytest.mark.parametrize(
    ("thing", "name", "answer"),
    [
        ("command", "purge", "celery5 queue purge QUEUE"),
        ("command", "call", "celery5 task send TASK"),
        ("control", "purge", 'app.empty("mail")'),
        ("setting", "task_always_eager", "celery5.testing: in_memory(app)"),
    ],
)
def test_a_hint_names_what_celery5_has_by_another_name(thing: NameKind, name: str, answer: str) -> None:
    assert answer in find_hint(thing, name)


ANSWERS = {
    "rate_limit": "rate_limit",
    "priority": "priority",
    "task_routes": "queue_routes",
    "task_default_rate_limit": "celery5 -A shop task limit shop.add 10/s",
    "@control_command": "app.command",
    "beat_schedule": "@app.task(schedule=...)",
    "worker_max_tasks_per_child": "max_jobs",
    "worker_enable_remote_control": "inbox",
    "celery -A shop control rate_limit": "celery5 -A shop task limit shop.add 10/s",
    "celery -A shop inspect conf": "celery5 -A shop config show --origin",
    "celery -A shop inspect registered": "celery5 -A shop task list",
    "a.s(1) \\| b.si(2)": "a.s(1) >> b.s(2)",
    "apply_async(link=, link_error=)": "add.s(2, 2) \\| next.s()`; `add.options(on_failure=task)",
    "task_always_eager": "in_memory(app)",
    "worker --purge": "celery5 -A shop queue purge QUEUE",
    "celery -A shop purge": "celery5 -A shop queue purge QUEUE",
    "app.control.purge()": "app.empty(",
    "celery -A shop call shop.add --args='[2, 2]'": "celery5 -A shop task send shop.add",
}
"""What celery5 has by another name: what the page must say to it."""


@pytest.mark.parametrize("name", ANSWERS)
def test_what_celery5_has_by_another_name_is_answered_with_it(name: str) -> None:
    answers = [answer for theirs_, answer in rows_from_celery() if f"`{name}`" in theirs_]
    assert answers
    assert all(f"`{ANSWERS[name]}" in answer for answer in answers)


RENAMED = sorted(
    (thing, name, ours)
    for thing in ("option", "setting", "result", "result option", "request", "app")
    for name, ours in CELERY[cast("NameKind", thing)].items()
    if ours.isidentifier()
)
"""The names that `celery5 migrate` changes to one of ours."""


def rows_from_celery() -> list[tuple[str, str]]:
    """Return the first two cells of all rows of the page."""
    text = (HERE / "docs" / "guide" / "from-celery.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [(row[0], row[1]) for row in rows]


def has_word(word: str, cell: str) -> bool:
    """Return whether a cell has a word, or `the same` for one that both have."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", cell) is not None


@pytest.mark.parametrize(("thing", "name", "own"), RENAMED)
def test_a_row_says_the_name_that_migrate_writes(thing: str, name: str, own: str) -> None:
    answers = [answer for theirs_, answer in rows_from_celery() if has_word(name, theirs_)]
    assert any(has_word(own, answer) for answer in answers), (thing, name, own, answers)


@pytest.mark.parametrize("name", [name for name, ours in CELERY["command"].items() if "celery5 " in ours])
def test_a_row_says_the_command_that_an_old_one_is_refused_with(name: str) -> None:
    commands = re.findall(r"celery5 ([a-z]+(?: [a-z-]+)?)", CELERY["command"][name])
    words = name.split()
    answers = [
        re.sub(r"celery5 -A shop ", "celery5 ", answer)
        for theirs_, answer in rows_from_celery()
        if all(has_word(word, theirs_) for word in words)
    ]
    assert any(f"celery5 {command}" in answer for command in commands for answer in answers), (
        commands,
        answers,
    )


def test_the_page_begins_with_the_ten_changes_that_matter() -> None:
    text = (HERE / "docs" / "guide" / "from-celery.md").read_text()
    titles = re.findall(r"(?m)^## (.*)$", text)
    assert titles[0] == "Ten changes that matter"
    assert re.findall(r"(?m)^(\d+)\. ", section("from-celery", titles[0])) == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize("page", PAGES)
def test_every_attribute_of_ours_is_there(page: str) -> None:
    named = [
        (thing, path)
        for said in ours(page)
        for thing, path in re.findall(rf"\b({'|'.join(OBJECTS)})\.([\w.]+)", said)
        if not said.startswith(("celery5 ", "python "))
    ]
    assert len(named) > 10
    lost = []
    for thing, path in named:
        found = OBJECTS[thing]
        for name in path.rstrip(".").split("."):
            if not hasattr(found, name):
                lost.append(f"{thing}.{path}")
                break
            found = getattr(found, name)
    assert lost == []


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_setting_of_ours_is_there(page: str) -> None:
    said = " ".join(
        text for text in ours(page) if "(" in text and not text.startswith(("celery5 ", "python "))
    )
    keywords = set(re.findall(r"(?<=[(\s])(\w+)=(?!=)", said))
    more = {
        "task",
        "timeout",
        "return_when",
        "return_exceptions",
        "name",
        "schedule",
        "bind",
        "where",
        "loop",
        "error_args",
        "within",
        "interval",
        "on_leader",
    }
    assert len(keywords) > 6
    assert sorted(keywords - KNOWN - more) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_takes_its_words(page: str) -> None:
    commands = [text for text in ours(page) if re.match(r"celery5 (-A|\w+ )", text)]
    assert len(commands) > 5
    for command in commands:
        try:
            cli.main([*shlex.split(command)[1:], "--help"], standalone_mode=False)
        except click.ClickException as error:
            pytest.fail(f"{command}: {error.format_message()}")
