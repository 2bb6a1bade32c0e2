"""Keep what was measured: samples by contestant and measure, and of which run they are."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self


@dataclass
class Entry:
    """One measure of one contestant in one run."""

    run: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    # Why there are no figures, or fewer than there are rounds.
    failure: str = ""


@dataclass
class Record:
    """All entries, and the facts about each run by its name."""

    runs: dict[str, dict[str, str]] = field(default_factory=dict)
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record from a file; an empty one where there is no file of this form."""
        try:
            return cls.of_raw(json.loads(path.read_text()))
        except (FileNotFoundError, KeyError):
            return cls()

    @classmethod
    def of_raw(cls, raw: dict[str, Any]) -> Self:
        """Return the record that `raw` was made of."""
        entries = {
            name: {measure: Entry(**entry) for measure, entry in measures.items()}
            for name, measures in raw["entries"].items()
        }
        return cls(raw["runs"], entries)

    def raw(self) -> dict[str, Any]:
        """Return what a file holds of it."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write it to a file, with a line for each figure."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.raw(), indent=1)
        path.write_text(f"{text}\n")

    def keep(self, run: str, name: str, measure: str, figures: dict[str, float]) -> None:
        """Add a sample of each figure."""
        entry = self.entries.setdefault(name, {}).setdefault(measure, Entry(run))
        for figure, value in figures.items():
            entry.figures.setdefault(figure, []).append(value)

    def fail(self, run: str, name: str, measure: str, reason: str) -> None:
        """Record why a measure failed."""
        entry = self.entries.setdefault(name, {}).setdefault(measure, Entry(run))
        entry.failure = " ".join(reason.split())

    def failed(self, name: str, measure: str) -> str:
        """Return why a measure failed, or ""."""
        entry = self.entries.get(name, {}).get(measure)
        return entry.failure if entry else ""

    def merge(self, newer: "Record") -> None:
        """Take over all entries of a newer run; runs of which nothing is left are forgotten."""
        for name, measures in newer.entries.items():
            self.entries.setdefault(name, {}).update(measures)
        left = {entry.run for measures in self.entries.values() for entry in measures.values()}
        self.runs = {run: facts for run, facts in (self.runs | newer.runs).items() if run in left}

    def samples(self) -> dict[str, dict[str, list[float]]]:
        """Return the samples of each figure of each contestant; where runs differ, those of the newest."""
        found: dict[str, dict[str, list[float]]] = {}
        for name, measures in self.entries.items():
            runs: dict[str, str] = {}
            for entry in sorted(measures.values(), key=lambda entry: entry.run):
                for figure, values in entry.figures.items():
                    same = runs.get(figure) == entry.run
                    runs[figure] = entry.run
                    earlier = found.setdefault(name, {}).get(figure, [])
                    found[name][figure] = [*earlier, *values] if same else list(values)
        return found

    def medians(self) -> dict[str, dict[str, float]]:
        """Return the median of each figure of each contestant."""
        return {
            name: {figure: median(values) for figure, values in figures.items()}
            for name, figures in self.samples().items()
        }
