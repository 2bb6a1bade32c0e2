"""Guides for those who come from elsewhere: every name of ours on them is there, and every command takes its words.

Floor: tests. Reads: docs/guide/from-celery.md and from-fennel.md. Writes: nothing.

And every name of theirs is there, too: in the first column of a table of its section.
"""

import inspect
import re
import shlex
from typing import Any

import click
import pytest

import celery5
from celery5 import App, errors
from celery5.cli.main import cli
from celery5.protocol.job import Options
from celery5.protocol.retry import RetryPolicy
from celery5.settings import Settings
from tests.house import celery_names, fennel_names
from tests.house.sources import HERE

PAGES = ["from-celery", "from-fennel"]
app = App("guides")


@app.task
def add(a: int, b: int) -> int:
    return a + b


OBJECTS: dict[str, Any] = {
    "app": app,
    "result": app.result("x"),
    "task": add,
    "add": add,
    "self": celery5.CurrentJob,
    "sent": app.result("x"),
    "RetryPolicy": RetryPolicy,
}
KNOWN = {
    *celery5.__all__,
    *vars(errors),
    *Options.__struct_fields__,
    *Settings.__struct_fields__,
    *inspect.signature(App).parameters,
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
    families = tuple(re.findall(r"`(\w+_)\*`", text))
    return [
        each
        for each in names
        if not re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text)
        and not (families and each.startswith(families))
    ]


@pytest.mark.parametrize("title", celery_names.BY_SECTION)
def test_every_name_of_celery_is_on_its_page(title: str) -> None:
    assert missing(celery_names.BY_SECTION[title], theirs("from-celery", title)) == []


@pytest.mark.parametrize("title", fennel_names.BY_SECTION)
def test_every_name_of_fennel_is_on_its_page(title: str) -> None:
    cells = theirs("from-fennel", title)
    assert [each for each in fennel_names.BY_SECTION[title] if each not in cells] == []


def test_every_state_and_every_field_of_fennels_log_is_on_its_page() -> None:
    assert missing([f"`{each}`" for each in fennel_names.STATES], section("from-fennel", "States")) == []
    assert missing([f"`{each}`" for each in fennel_names.LOG], section("from-fennel", "Log")) == []


def ours(page: str) -> list[str]:
    """What stands in backticks in the second column of the tables."""
    text = (HERE / "docs" / "guide" / f"{page}.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [said for row in rows for said in re.findall(r"`([^`]+)`", row[1])]


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
        each for each in ours(page) if "(" in each and not each.startswith(("celery5 ", "python "))
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
    }
    assert len(keywords) > 8
    assert sorted(keywords - KNOWN - more) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_takes_its_words(page: str) -> None:
    commands = [each for each in ours(page) if re.match(r"celery5 (-A|\w+ )", each)]
    assert len(commands) > 5
    for command in commands:
        try:
            cli.main([*shlex.split(command)[1:], "--help"], standalone_mode=False)
        except click.ClickException as error:
            pytest.fail(f"{command}: {error.format_message()}")
