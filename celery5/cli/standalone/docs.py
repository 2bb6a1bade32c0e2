"""Print the pages of the documentation that came with this version, or the sections with some words (`docs`)."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import click

from celery5.cli.terminal.output import echo, format_table
from celery5.similar_names import did_you_mean

MOST_SECTIONS = 10
"""Sections that a search prints."""
LINE_LENGTH = 110
"""Characters of a line that a search prints."""


class Section(NamedTuple):
    """A part of a page, under one heading."""

    page: str
    title: str
    text: str


@click.command()
@click.argument("page", required=False, nargs=-1)
def docs(page: tuple[str, ...]) -> None:
    """Print PAGE of the documentation of this version, such as tasks; without PAGE list all.

    The end of a path is enough, `tasks` for example; pages of the guide go first. Errors name pages by this command.
    Where no page has that name, the sections with these words are listed: `celery5 docs acks_late`.
    """
    pages = _list_pages()
    if not page:
        echo(
            format_table(
                [{"page": path, "title": _read_title(text)} for path, text in pages.items()], empty=""
            )
        )
        return
    words = " ".join(page)
    wanted = words.removesuffix(".md")
    found = [path for path in pages if f"/{path.removesuffix('.md')}".endswith(f"/{wanted}")]
    if found:
        echo(pages[min(found, key=lambda path: not path.startswith("docs/guide/"))])
    elif sections := _find_sections(pages, words):
        echo(format_table(sections, empty=""))
    else:
        names = [path.removesuffix(".md").rpartition("/")[2] for path in pages]
        similar = did_you_mean(wanted.rpartition("/")[2], names, otherwise="celery5 docs alone lists all")
        raise click.UsageError(f"no page {words!r}; {similar}")


def _list_pages() -> dict[str, str]:
    """Return the text of each page, by its path."""
    folder = Path(str(files("celery5"))) / "docs"
    return {
        f"docs/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("**/*.md"))
    }


def _find_sections(pages: dict[str, str], words: str) -> list[dict[str, str]]:
    """Return the sections with these words, and a line of each: those with the words in the heading first."""
    pattern = re.compile(rf"\b{'[ _-]'.join(map(re.escape, re.split('[ _-]+', words)))}", re.IGNORECASE)
    found: list[tuple[bool, bool, Section]] = []
    for section in _list_sections(pages):
        if pattern.search(section.title) or pattern.search(section.text):
            is_guide = section.page.startswith("docs/guide/")
            found.append((not pattern.search(section.title), not is_guide, section))
    found.sort(key=lambda row: row[:2])
    return [
        {
            "page": section.page,
            "section": section.title,
            "line": _read_line(section, pattern),
        }
        for _, _, section in found[:MOST_SECTIONS]
    ]


def _list_sections(pages: dict[str, str]) -> Iterator[Section]:
    """Yield what stands under each heading of each page."""
    for page, text in pages.items():
        # A line of code may begin as a heading does: headings follow an empty line, code outside of fences.
        outside = re.sub(r"(?ms)^```.*?^```$", lambda block: re.sub(r"(?m)^#", " #", block[0]), text)
        for part in re.split(r"(?m)^(?=#{1,4} )", outside):
            title, _, body = part.partition("\n")
            yield Section(page, title.lstrip("# "), body)


def _read_line(section: Section, pattern: re.Pattern[str]) -> str:
    """Return the line of a section that has what was looked for, else its first one."""
    lines = [line.strip("| ") for line in section.text.splitlines() if line.strip("`| -")]
    line = next((line for line in lines if pattern.search(line)), lines[0] if lines else "")
    match = pattern.search(line)
    begin = max(0, match.start() - LINE_LENGTH // 2) if match else 0
    return line[begin : begin + LINE_LENGTH]


def _read_title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")
