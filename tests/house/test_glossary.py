"""The glossary, the scope and the map of AMQP: what they name is there."""

import re
import tomllib
from importlib import import_module

import msgspec
import pytest

from celery5.events.event import Event
from celery5.protocol.events.messages import EventMessage
from celery5.protocol.job.messages import Command, Document
from tests.house.sources import HERE

DOCS = HERE / "docs"
GLOSSARY = (DOCS / "reference" / "glossary.md").read_text()
SCOPE = (DOCS / "reference" / "scope.md").read_text()
AMQP = (DOCS / "internals" / "amqp.md").read_text()
PROPOSALS_NAMES = [
    "Concurrency Token",
    "Maximal Concurrency Budget",
    "Resource Saturation",
    "Internal Tasks Queue",
    "Internal Results Queue",
    "`<check>_expired`",
    "Messages Backlog",
    "Inbox Queue",
    "Boxed Task",
]


def resolve(dotted: str) -> object:
    """Import the module that a dotted name begins with, and return what the rest of the name means in it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(celery5\.[\w.]+)`", GLOSSARY))))
def test_each_name_in_the_code_that_the_glossary_gives_is_there(name: str) -> None:
    assert resolve(name) is not None


@pytest.mark.parametrize("name", PROPOSALS_NAMES)
def test_the_glossary_says_what_the_proposals_names_are_here(name: str) -> None:
    assert f"\n| {name}" in GLOSSARY


@pytest.mark.parametrize(
    ("word", "in_code", "on_wire"),
    [("Command", Command, Command), ("Document", Document, Document), ("Event", Event, EventMessage)],
)
def test_the_three_messages_are_words_of_glossary_code_and_wire(
    word: str, in_code: type, on_wire: type[msgspec.Struct]
) -> None:
    """The protocol page has a section on each message, and its table the names of the fields that are sent."""
    section = (DOCS / "reference" / "protocol.md").read_text().partition(f"\n## The {word}\n")[2]
    rows = re.findall(r"(?m)^\| (`.*?`) \|", section.partition("\n## ")[0])
    assert f"\n| **{word}** |" in GLOSSARY
    assert in_code.__name__ == word
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(
        field.encode_name for field in msgspec.structs.fields(on_wire)
    )


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+[\w.]*)`", AMQP))))
def test_each_file_that_the_map_of_amqp_names_is_there(path: str) -> None:
    assert (HERE / "celery5" / path).exists()


@pytest.mark.parametrize(
    "term", ["node", "link, receiving", "session", "connection", "terminus", "link credit"]
)
def test_the_map_of_amqp_has_its_terms(term: str) -> None:
    assert f"\n| {term}" in AMQP


def test_the_scope_says_what_is_out_of_it() -> None:
    out_of_scope = SCOPE.partition("## Out of scope")[2].partition("\n## ")[0]
    assert "**Models of queues.**" in out_of_scope
    assert "(../guide/autoscaling.md)" in out_of_scope


def test_the_scope_names_each_dependency_on_pypy() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", dependency)[0] for dependency in project["dependencies"]]
    on_pypy = SCOPE.partition("## PyPy")[2]
    assert [name for name in names if name not in on_pypy] == []
