"""Findings in a project: changes, changes by hand, what to decide, and what has no counterpart."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

FindingKind = Literal["change", "by hand", "decide", "nothing"]
_DECIDED = re.compile(r"(?:[#;]|//|<!--)\s*celery5: decided\b")
"""The comment that settles the findings of its line; in a line of its own, all that is to decide in the file."""
_KEEP_CELERY = "keep celery installed while these modules import it: {}"
MAX_NAMED = 5
"""The most modules that a note names."""


class CeleryUse(msgspec.Struct, frozen=True, order=True):
    """One thing of Celery's in a file."""

    line: int
    kind: FindingKind
    name: str  # what is there: `link_error`
    advice: str  # what to write instead, or why there is nothing
    line_after: int = 0  # the line when the changes are written; 0 in a file without any


class Decisions:
    """The comments `# celery5: decided` of a file, by which people settle findings."""

    def __init__(self, text: str) -> None:
        self._lines: set[int] = set()
        self._is_whole = False
        for number, line in enumerate(text.split("\n"), 1) if "celery5: decided" in text else ():
            found = _DECIDED.search(line)
            if found and line[: found.start()].strip():
                self._lines.add(number)
            elif found:
                self._is_whole = True

    def settle(self, finding: CeleryUse) -> bool:
        """Return whether a finding is settled. A change that the program makes is never settled."""
        return finding.kind != "change" and (
            finding.line in self._lines or (self._is_whole and finding.kind == "decide")
        )


class FileReport(msgspec.Struct, frozen=True):
    """What was found in a file."""

    path: str
    findings: tuple[CeleryUse, ...]
    diff: str = ""  # a unified diff; '' when nothing is changed
    text: str = ""  # the file after the changes; '' when nothing is changed

    def of_kind(self, kind: FindingKind) -> list[CeleryUse]:
        """Return the findings of one kind, by line."""
        return sorted({finding for finding in self.findings if finding.kind == kind})


class ProjectReport(msgspec.Struct, frozen=True):
    """What was found in a project."""

    files: tuple[FileReport, ...]
    unreadable: Mapping[str, str]
    notes: Sequence[str] = ()
    importing: Sequence[str] = ()  # the files that import Celery, also when the changes are written

    def count(self, kind: FindingKind) -> int:
        """Return how many findings there are of one kind."""
        return sum(len(file.of_kind(kind)) for file in self.files)

    def list_notes(self) -> list[str]:
        """Return the notes, with one that names the files that import Celery, if there are any."""
        if not self.importing:
            return [*self.notes]
        more = len(self.importing) - MAX_NAMED
        names = ", ".join(self.importing[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        return [*self.notes, _KEEP_CELERY.format(names)]
