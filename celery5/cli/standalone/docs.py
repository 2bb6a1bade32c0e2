"""Print the pages of the documentation that came with this version, or the sections with some words (`docs`)."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click

from celery5.cli.terminal.output import echo, format_table, to_json
from celery5.similar_names import did_you_mean, find_similar, join_names

MAX_SECTIONS = 8
"""The most sections that a search prints."""
MAX_OF_A_PAGE = 2
"""The most sections of one page among them."""
MIN_PAGES = 3
"""The fewest pages that a search names, if so many have any of the words."""
LINE_LENGTH = 110
"""Characters of a line that a search prints."""


_SMALL_WORDS = re.compile(
    "(an?|and|any|are|as|at|be|but|by|can|certain|could|do|does|each|for|from|get|has|have|how|i|if|in|into|is|it|its|"
    "make|me|my|no|not|of|off|on|one|or|our|out|per|should|so|some|such|than|that|the|their|them|then|there|these|they|"
    "this|to|too|use|using|was|we|what|when|where|which|while|who|why|will|with|without|you|your)"
)
"""Words that a search leaves out if it has others."""
_ENDINGS = (
    {
        "ations": 4,
        "ation": 4,
        "ings": 4,
        "ing": 4,
        "ies": 4,
        "ied": 4,
        "ers": 4,
        "ed": 4,
        "er": 4,
        "es": 4,
        "s": 3,
    },
    {"y": 4, "e": 4},
)
"""Endings that are removed before words are compared, with the fewest letters that must be left. A word loses one
ending of the first group, then one of the second."""
_IRREGULAR = {"lost": "lose", "loss": "lose", "losses": "lose", "losing": "lose"}
"""Forms of a word that its endings do not show."""
_MISSPELT = 0.8
"""The least similarity of a word that is taken for another one."""
_SHORTEST_PREFIX = 3
_IN_PAGE, _IN_HEADING, _IN_LEAD, _IN_TEXT, _ELSEWHERE = 5.0, 4.0, 2.5, 1.0, 0.3
"""The weight of a word in the name or title of a page, in a heading, in the first paragraph of a page (which says what
the page is for), in the text of the section, and in other sections of the page."""
_OFTEN = 3.0
"""The most weight of a word that a text has often."""
_PHRASE = 1.5
"""The factor for a section in which the words stand side by side."""
_PAIR = 1.2
"""The factor for a section in which two of them do."""
_DEFINED = 8.0
"""The factor for a section with a table whose first column has the query, if that is in capitals, as states are."""
_KINDS = {"docs/guide/": 1.0, "docs/tour": 0.9, "docs/reference/": 0.7}
"""The weight of pages by their paths: pages for users before those on the internals."""
_OTHER_KIND = 0.5
_RECORDS = ("docs/reference/parity", "docs/decisions/", "docs/internals", "docs/faults")
"""Pages on how celery5 was made. They go behind those for users, and behind users' pages that lack one word more."""
_LISTED = ("docs/index", "docs/tour", "docs/guide/index", "docs/guide/", "docs/reference/", "docs/")
"""The order of the list of all pages, in which those of `_RECORDS` are the last."""


class Section(NamedTuple):
    """A part of a page, under one heading."""

    page: str
    # The title of the page, and the headings above it and its own, from the outside.
    titles: tuple[str, ...]
    text: str


class Found(NamedTuple):
    """A section that has words of a search."""

    section: Section
    missing: tuple[str, ...]
    score: float


@click.command()
@click.argument("page", required=False, nargs=-1)
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
def docs(page: tuple[str, ...], *, wants_json: bool) -> None:
    """Print PAGE of the documentation of this version, such as tasks; without PAGE list all.

    The end of a path is enough, `tasks` for example; pages of the guide go first. Errors name pages by this command.
    Where no page has that name, the sections with these words, in any order and form, are listed, the best first:
    `celery5 docs limit per customer`, `celery5 docs acks_late`.
    """
    pages = _list_pages()
    if not page:
        _echo_rows([{"page": path, "title": _read_title(text)} for path, text in pages.items()], wants_json)
        return
    words = " ".join(page)
    wanted = words.removesuffix(".md")
    found = [path for path in pages if f"/{path.removesuffix('.md')}".endswith(f"/{wanted}")]
    if found:
        path = min(found, key=lambda path: not path.startswith("docs/guide/"))
        echo(to_json({"page": path, "text": pages[path]}) if wants_json else pages[path])
        return
    names = [path.removesuffix(".md").rpartition("/")[2] for path in pages]
    if not (len(page) == 1 and find_similar(wanted, names, cutoff=_MISSPELT)):  # such as dead-leters
        words = _correct(pages, words)
    sections = search(pages, words)
    missing = sections[0].missing if sections else ()
    if sections and not (missing and len(page) == 1):  # one word may be a misspelt page, such as dead-leters
        if all(section.missing for section in sections):
            echo(f"no section has all of these words; without {join_names(missing)}:", err=True)
        _echo_rows([_make_row(section, words) for section in sections], wants_json)
    else:
        similar = did_you_mean(wanted.rpartition("/")[2], names, otherwise="celery5 docs alone lists all")
        raise click.UsageError(f"no page {words!r}; {similar}")


def _echo_rows(rows: Sequence[Mapping[str, object]], wants_json: bool) -> None:
    echo(to_json(rows) if wants_json else format_table(rows, empty=""))


def _correct(pages: Mapping[str, str], words: str) -> str:
    """Return a query with the most similar word in place of one that no page has, and say so."""
    known = _count_words("\n".join(pages.values()))
    corrected = words
    for word in _split_query(words):
        if not _count(known, word) and (similar := find_similar(word, known, cutoff=_MISSPELT)):
            echo(f"no page has {word}; searched for {similar}", err=True)
            corrected = re.sub(rf"(?i)(?<![a-z0-9]){word}(?![a-z0-9])", similar, corrected)
    return corrected


def _list_pages() -> dict[str, str]:
    """Return the text of each page, by its path, in the order in which they are listed."""
    folder = Path(str(files("celery5"))) / "docs"
    return {
        name: (folder / name.removeprefix("docs/")).read_text(encoding="utf-8")
        for name in sorted(
            (f"docs/{path.relative_to(folder).as_posix()}" for path in folder.glob("**/*.md")),
            key=_place_in_list,
        )
    }


def _place_in_list(path: str) -> tuple[bool, int, str]:
    """Return what pages are listed by: those for users first, each folder by name."""
    folder = next(number for number, start in enumerate(_LISTED) if path.startswith(start))
    return path.startswith(_RECORDS), folder, path


def search(pages: Mapping[str, str], words: str) -> list[Found]:
    """Return the best sections for a query: those with all of its words, else those with most of them."""
    wanted = _split_query(words)
    if not wanted:
        return []
    sections = list(_list_sections(pages))
    of_pages = {page: _count_words(text) for page, text in pages.items()}
    places = [_Place(section, of_pages[section.page]) for section in sections]
    counts = {word: sum(place.weigh(word) > 0 for place in places) for word in wanted}
    rarity = {word: math.log(1 + len(places) / count) for word, count in counts.items() if count}
    in_query = re.split(r"[\s_-]+", words.lower())
    phrase = _compile_phrases([in_query])
    pair = _compile_phrases([both for both in pairwise(in_query) if {*both} <= {*wanted}] or [in_query])
    found: list[Found] = []
    for place in places:
        weights = {word: place.weigh(word) for word in wanted}
        missing = tuple(word for word in wanted if not weights[word])
        score = sum(weight * rarity[word] for word, weight in weights.items() if weight)
        if score:
            score *= place.weigh_kind() * place.weigh_phrase(phrase, pair) * place.weigh_definition(words)
            found.append(Found(place.section, missing, score))
    found.sort(key=_rank)
    return _choose(found)


def _compile_phrases(phrases: Sequence[Sequence[str]]) -> re.Pattern[str]:
    """Return what finds words that stand side by side, in any form."""
    return re.compile(
        "|".join(r"[ _-]".join(rf"{re.escape(word)}\w*" for word in words) for words in phrases)
    )


def _rank(found: Found) -> tuple[int, bool, float]:
    """Return what sections are sorted by: how many words are missing, records behind pages for users, the score."""
    is_record = found.section.page.startswith(_RECORDS)
    return len(found.missing) + is_record, is_record, -found.score


def _choose(found: Sequence[Found]) -> list[Found]:
    """Return the first sections, a few of each page. Those with fewer words are left out if there are enough pages."""
    chosen: list[Found] = []
    for candidate in found:
        pages = [other.section.page for other in chosen]
        if chosen and len(candidate.missing) > len(chosen[-1].missing) and len({*pages}) >= MIN_PAGES:
            break
        if pages.count(candidate.section.page) < MAX_OF_A_PAGE:
            chosen.append(candidate)
    return chosen[:MAX_SECTIONS]


class _Place:
    """A section, and how often it has each word; `page` has those of the whole page."""

    def __init__(self, section: Section, page: Mapping[str, int]) -> None:
        self.section = section
        name = section.page.rpartition("/")[2].removesuffix(".md")
        self._title = _count_words(f"{name} {section.titles[0]}")
        self._heading = _count_words(" ".join(section.titles[1:]))
        lead = section.text.strip().partition("\n\n")[0] if len(section.titles) == 1 else ""
        self._lead = _count_words(lead)
        self._text = _count_words(section.text)
        self._page = page

    def weigh(self, word: str) -> float:
        """Return the weight of a word in this section, by `_IN_PAGE` and the others; 0 if the page does not have it."""
        often = _count(self._text, word)
        weight = _IN_PAGE * bool(_count(self._title, word)) + _IN_HEADING * bool(_count(self._heading, word))
        weight += _IN_LEAD * bool(_count(self._lead, word))
        if often:
            weight += min(_OFTEN, _IN_TEXT * (1 + math.log(often)))
        return weight or _ELSEWHERE * bool(_count(self._page, word))

    def weigh_kind(self) -> float:
        """Return the weight of its page."""
        return next((w for path, w in _KINDS.items() if self.section.page.startswith(path)), _OTHER_KIND)

    def weigh_definition(self, words: str) -> float:
        """Return the factor for a table that says what the query is: a state such as `HELD`."""
        cell = rf"(?m)^\| (?:`[^`|]+`, )*`{re.escape(words.strip())}`[ ,]"
        return _DEFINED if words.isupper() and re.search(cell, self.section.text) else 1.0

    def weigh_phrase(self, phrase: re.Pattern[str], pair: re.Pattern[str]) -> float:
        """Return the factor for words that stand side by side: all of the query, or two of them."""
        if phrase.search(" ".join(self.section.titles).lower()):
            return _PHRASE**2
        text = self.section.text.lower()
        return _PHRASE if phrase.search(text) else _PAIR if pair.search(text) else 1.0


def _count(words: Mapping[str, int], wanted: str) -> int:
    """Return how often a word occurs in a text: in any form, or as the beginning of a longer word."""
    stem, shortest = _stem(wanted), len(wanted) >= _SHORTEST_PREFIX
    return sum(
        count
        for word, count in words.items()
        if _stem(word) == stem or (shortest and word.startswith(wanted))
    )


def _split_query(words: str) -> list[str]:
    """Return the words of a search, without small words if there are others."""
    split = list(dict.fromkeys(re.findall(r"[a-z0-9]+", words.lower())))
    return [word for word in split if not _SMALL_WORDS.fullmatch(word)] or split


def _count_words(text: str) -> Mapping[str, int]:
    return Counter(re.findall(r"[a-z0-9]+", text.lower()))


@cache
def _stem(word: str) -> str:
    """Return a word without the endings that differ between its forms: `retries`, `retry`, `retrying` are one."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for endings in _ENDINGS:
        fitting = (
            end for end, left in endings.items() if word.endswith(end) and len(word) - len(end) >= left
        )
        ending = next(fitting, "")
        word = word.removesuffix(ending)
        if len(ending) > 1 and word[-1] == word[-2] and word[-1] in "bdgmnprt":  # running
            word = word[:-1]
    return word


def _list_sections(pages: Mapping[str, str]) -> Iterator[Section]:
    """Yield what stands under each heading of each page."""
    for page, text in pages.items():
        # A line of code may begin as a heading does: headings follow an empty line, code outside of fences.
        outside = re.sub(r"(?ms)^```.*?^```$", lambda block: re.sub(r"(?m)^#", " #", block[0]), text)
        above: list[str] = []
        for part in re.split(r"(?m)^(?=#{1,4} )", outside):
            line, _, body = part.partition("\n")
            title = line.lstrip("#")
            depth = len(line) - len(title)
            above = [*above[: depth - 1], title.strip()] if depth else []
            if above:
                yield Section(page, tuple(above), body)


def _make_row(found: Found, words: str) -> dict[str, object]:
    section = found.section
    return {
        "page": section.page,
        "section": " > ".join(section.titles[1:]) or section.titles[0],
        "line": _read_line(section.text, _split_query(words)),
    }


def _read_line(text: str, wanted: Sequence[str]) -> str:
    """Return the part of a line of a section that has most of the words."""
    lines = [line.strip("| ") for line in text.splitlines() if line.strip("`| -")]
    line = max(
        lines, key=lambda line: sum(_count(_count_words(line), word) > 0 for word in wanted), default=""
    )
    begins = [
        match.start()
        for match in re.finditer(r"[A-Za-z0-9]+", line)
        if any(_count({match[0].lower(): 1}, word) for word in wanted)
    ]
    begin = max(0, min(begins, default=0) - LINE_LENGTH // 4)
    return line[begin : begin + LINE_LENGTH].strip()


def _read_title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")
