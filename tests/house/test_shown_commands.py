"""Every command that a page shows is there: its name, its options and as many arguments as it takes.

A page shows commands in fenced blocks and in prose. There, capitals stand for a value, brackets for what may be left
out, `a|b` for either, and `...` for the rest.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import click
import pytest

from celery5.cli.main import cli
from tests.house.sources import HERE, PACKAGE, files, name, nodes

PAGES = [
    HERE / "README.md",
    HERE / "CONTRIBUTING.md",
    *sorted(path for path in (HERE / "docs").rglob("*.md") if "decisions" not in path.parts),
]
"""Every page but the decisions, which say what was so when they were made."""
FENCED = re.compile(r"(?ms)^ *```[^\n]*\n(.*?)^ *```$")
SHOWN_IN_BLOCK = re.compile(r"(?:^|[\s/\"(])(celery5 +(?:-|\w).*)")
NOT_A_COMMAND = re.compile(r"celery5 \d|celery5 CELERY5_|celery5 ~/|celery5 demo</?|celery5 doctor\"")
"""Where the word stands for the package, a tag of the journal or a folder."""
PLACEHOLDER = re.compile(r"\[?[A-Z][A-Z_:\[\]-]*|\.\.\.")
NO_COMMANDS = {"keys folder"}
"""What looks like a command of a group, and is the name of something else."""
OF_OTHERS = {"--keda", "--most", "--init", "--stop-timeout", "--env", "--appendonly", "--maxmemory-policy"}
"""Options of examples, of docker, and of a server."""
FOREIGN_COLUMNS = ("from-celery", "from-runnel", "from-fennel")
"""Pages with options of other programs, whose own commands `test_guides.py` looks at, too."""
FOREIGN = (
    *("journalctl", "nox", "pip ", "docker", "kubectl", "systemctl", "celery ", "git ", "gpg "),
    *("gunicorn ", "uvicorn "),
)
"""How commands of other programs begin."""
ENDS_OF_COMMAND = {"|", ">", "&&", "&", ";", ">>", "<"}


def shown_in_blocks(text: str) -> Iterator[str]:
    """The commands in the fenced blocks of a page."""
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            found = SHOWN_IN_BLOCK.search(line)
            if (
                found
                and not NOT_A_COMMAND.match(found[1])
                and not line.lstrip().startswith(("#", "from ", "import ", "+from ", "-from "))
            ):
                yield found[1]


def shown_in_prose(text: str) -> Iterator[str]:
    """The commands in backticks in the prose of a page."""
    for said in re.findall(r"`((?:\$ )?celery5 [^`]+)`", FENCED.sub("", text)):
        yield said.removeprefix("$ ").replace("\n", " ")


def split(command: str) -> list[str]:
    """The words of a command, up to a pipe, a redirection or a comment."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|><&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in ENDS_OF_COMMAND:
            break
        words.append(word)
    return words[1:]


def alternatives(words: list[str]) -> Iterator[list[str]]:
    """Each command that `a|b` stands for."""
    yield from map(list, product(*(word.split("|") for word in words)))


def fill(words: list[str]) -> list[str]:
    """The words with values for what stands for one; without dots that stand for the rest, and brackets."""
    filled: list[str] = []
    for word in [word.strip("[]") if word.startswith("[-") else word for word in words]:
        if word != "..." or (filled and filled[-1].startswith("-")):
            filled.append("1" if word in ("N", "...") else word)
    return filled


def find_fault(words: list[str], *, in_prose: bool) -> str:
    """What is wrong with a command; '' when it is one.

    Files need not be there. In prose a command may be named without its arguments, and values may stand for others.
    """
    is_named_only = False
    stands_for = in_prose and any(PLACEHOLDER.fullmatch(word) for word in words)
    try:
        context = cli.make_context("celery5", fill(words))
        while isinstance(context.command, click.Group):
            # Where click keeps what follows a group has no public name.
            rest = [*cast("Any", context)._protected_args, *context.args]
            if not rest:
                return ""
            called, command, rest = context.command.resolve_command(context, rest)
            assert command is not None
            is_named_only = in_prose and not any(not word.startswith("-") for word in rest)
            context = command.make_context(called, rest, parent=context)
    except click.MissingParameter as error:
        return "" if stands_for or is_named_only else error.format_message()
    except click.BadParameter as error:
        is_value = stands_for or "No such file" in error.format_message()
        return "" if is_value else error.format_message()
    except click.BadOptionUsage as error:
        named_only = in_prose and words[-1] == error.option_name
        return "" if named_only else error.format_message()
    except click.exceptions.Exit:
        return ""
    except click.ClickException as error:
        return error.format_message()
    return ""


def faults(commands: Iterator[str], *, in_prose: bool) -> dict[str, str]:
    """What is wrong with the commands, by command."""
    found: dict[str, str] = {}
    for command in commands:
        for words in alternatives(split(command)):
            if words != ["-A"] and (fault := find_fault(words, in_prose=in_prose)):
                found[command] = fault
    return found


def groups() -> dict[str, click.Group]:
    """The groups of commands, by name."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in commands.items() if isinstance(command, click.Group)}


def options(command: click.Command) -> Iterator[str]:
    """Every option of a command, and of those in it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from options(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(HERE).as_posix())
def test_every_command_that_a_page_shows_is_there_and_takes_its_words(page: Path) -> None:
    text = page.read_text()
    assert faults(shown_in_blocks(text), in_prose=False) == {}
    assert faults(shown_in_prose(text), in_prose=True) == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(HERE).as_posix())
def test_every_command_that_prose_names_by_its_group_is_there(page: Path) -> None:
    said = re.findall(r"`([a-z]+ [a-z][a-z-]* ?[^`]*)`", FENCED.sub("", page.read_text()))
    named = [words for words in said if words.split()[0] in groups() and words not in NO_COMMANDS]
    assert faults((f"celery5 {words}" for words in named), in_prose=True) == {}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.stem not in FOREIGN_COLUMNS],
    ids=lambda page: page.relative_to(HERE).as_posix(),
)
def test_every_option_that_prose_names_is_one_of_a_command(page: Path) -> None:
    ours = {*options(cli), "--help", *OF_OTHERS}
    prose = FENCED.sub("", page.read_text())
    named = {
        option
        for said in re.findall(r"`([^`]+)`", prose)
        if not said.startswith(FOREIGN)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", said)
    }
    assert sorted(named - ours) == []


def texts_of_code() -> Iterator[tuple[str, str]]:
    """Each text in the code that is no docstring, with its file."""
    for path in files(*PACKAGE):
        docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield name(path), node.value


def test_every_command_that_an_error_or_a_hint_names_is_there() -> None:
    lost: list[str] = []
    for where, text in texts_of_code():
        for group, command in re.findall(r"celery5 (?:(?:-A|--app-name) \S+ )?([a-z]+) ([a-z][a-z-]+)", text):
            known = groups().get(group)
            if known is not None and command not in known.list_commands(click.Context(known)):
                lost.append(f"{where}: celery5 {group} {command}")
    assert lost == []


def test_every_page_that_an_error_or_a_hint_names_is_named_by_the_command_that_prints_it() -> None:
    texts = list(texts_of_code())
    paths = [(where, page) for where, text in texts for page in re.findall(r"\bdocs/[\w/-]+\.md", text)]
    assert paths == []
    pages = {path.stem for path in PAGES}
    named = [
        (where, page)
        for where, text in texts
        for page in re.findall(r"celery5 docs (?!alone)([\w/-]+)", text)
    ]
    assert len(named) > 6
    assert [(where, page) for where, page in named if page not in pages] == []
    vague = re.compile(r"(?i)\bguide ?:|see the guide|\bguide's page|guide \(\"")
    assert [(where, text) for where, text in texts if vague.search(text)] == []
