"""What is found in a project: changes that are made or to be made by hand, what to check, what has no counterpart."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

FindingKind = Literal["change", "by hand", "check", "nothing"]
_KEEP_CELERY = (
    "keep celery installed until python manage.py check is silent: modules that still import Celery cannot be imported "
    "without it"
)


class CeleryUse(msgspec.Struct, frozen=True, order=True):
    """One thing of Celery's in a file."""

    line: int
    kind: FindingKind
    name: str  # what is there: `link_error`
    advice: str  # what to write instead, or why there is nothing
    line_after: int = 0  # the line when the changes are written; 0 in a file without any


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
    is_django: bool = False

    def count(self, kind: FindingKind) -> int:
        """Return how many findings there are of one kind."""
        return sum(len(file.of_kind(kind)) for file in self.files)

    def list_notes(self) -> list[str]:
        """Return the notes; while a Django project has something to change, also that Celery stays installed."""
        is_changing = self.count("change") or self.count("by hand")
        return [*self.notes, *([_KEEP_CELERY] if self.is_django and is_changing else [])]
