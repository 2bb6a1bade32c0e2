"""Move a Celery project to celery5 (`migrate`)."""

import shutil
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import click

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.output import clean_lines, echo, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.migration.files.findings import FileReport, FindingKind, ProjectReport
from celery5.migration.files.writing import write_changes
from celery5.migration.rewrite import migrate_project
from celery5.migration.rows.beat import export_beat_rows
from celery5.migration.rows.results import import_results, read_result_rows
from celery5.protocol.counts import format_count


@click.command()
@click.argument("source", required=False, metavar="SOURCE")
@click.option("--write", "wants_write", is_flag=True, help="Write the changes into the files.")
@click.option("--backup", is_flag=True, help="With --write: keep each file as FILE.orig; git is not needed.")
@click.option(
    "--beat",
    "beat",
    metavar="FILE",
    help="Print the rows of django-celery-beat (dumpdata) as a configuration.",
)
@click.option(
    "--results",
    "results",
    metavar="FILE",
    help="Count the rows of django-celery-results (dumpdata) that are still wanted, and name the others.",
)
@click.option("--store", "wants_store", is_flag=True, help="With --results: store them as results of -A.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_context
def migrate(  # noqa: C901
    context: click.Context,
    source: str | None,
    *,
    wants_write: bool,
    backup: bool,
    beat: str | None,
    results: str | None,
    wants_store: bool,
    wants_json: bool,
) -> None:
    """Read the Celery project SOURCE, a file or a folder, and show what becomes of it on celery5.

    Nothing is imported. The changes of each file as a diff; then what to change by hand, and what has no counterpart.
    """
    if beat is not None:
        if source or wants_write:
            raise click.UsageError("--beat stands alone: it prints a configuration")
        _print_beat_rows(Path(beat), wants_json=wants_json)
        return
    if wants_store and results is None:
        raise click.UsageError("--store is for --results")
    if results is not None:
        if source or wants_write:
            raise click.UsageError("--results stands alone: it reads a file of rows")
        _import_results(context.obj, Path(results), wants_store=wants_store, wants_json=wants_json)
        return
    if not source:
        raise click.UsageError("name a file or a folder: celery5 migrate SOURCE")
    if backup and not wants_write:
        raise click.UsageError("--backup is for --write")
    migration = migrate_project(Path(source))
    report = migration.report
    if not migration.files and not report.unreadable:
        raise Misconfigured(f"{source} has no file of Python, and none with command lines")
    written = (
        write_changes(migration.root, migration.files, report.files, backup=backup) if wants_write else []
    )
    if wants_json:
        echo(to_json(_describe(report, written)))
    else:
        _print_report(report, written)
    if report.unreadable:
        context.exit(EXIT_FAILED)


_KEYS: dict[str, FindingKind] = {
    "changes": "change",
    "by_hand": "by hand",
    "to_decide": "decide",
    "no_counterpart": "nothing",
}
"""The kinds of findings, by their names in JSON."""


def _describe(report: ProjectReport, written: list[str]) -> dict[str, object]:
    return {
        "files": [_describe_file(file, written) for file in report.files],
        "unreadable": dict(report.unreadable),
        "notes": report.list_notes(),
        **{key: report.count(kind) for key, kind in _KEYS.items()},
    }


def _describe_file(file: FileReport, written: list[str]) -> dict[str, object]:
    fields: dict[str, object] = {"path": file.path, "diff": file.diff, "written": file.path in written}
    for key, kind in _KEYS.items():
        fields[key] = [
            {
                "line": finding.line,
                "line_after": finding.line_after or finding.line,
                "name": finding.name,
                "advice": finding.advice,
            }
            for finding in file.of_kind(kind)
        ]
    return fields


_SHOWN: dict[FindingKind, str] = {
    "by hand": "to change by hand",
    "decide": "to decide",
    "nothing": "no counterpart",
}
_HOW_TO_DECIDE = (
    "the program cannot judge these: change the code, or end its line with the comment `# celery5: decided`; in a "
    "line of its own the comment settles all that is to decide in the file"
)
WIDTH_OF_PIPE = 120
"""The most columns of a line; also used if the output is no terminal."""
MIN_WIDTH = 40
"""The fewest columns of a line, even if the terminal has fewer."""


def _print_report(report: ProjectReport, written: list[str]) -> None:
    for file in report.files:
        path = to_one_line(file.path)
        if file.path in written:
            echo(f"{path}: {format_count(len(file.of_kind('change')), 'change is', 'changes are')} written")
        elif file.diff:
            echo(f"{path}\n{'-' * len(file.path)}\n{clean_lines(file.diff)}\n")
    if written:
        echo("")
    for kind in _SHOWN:
        _print_findings(report.files, kind, written)
    for name, why in report.unreadable.items():
        echo(f"{to_one_line(name)}: not read: {to_one_line(why)}")
    for note in report.list_notes():
        echo(_wrap(f"note: {note}", "", "  "))
    if not (report.count("change") or report.count("by hand") or report.unreadable):
        left = [f", {count} to decide" for count in [report.count("decide")] if count]
        left += [f", {count} without a counterpart" for count in [report.count("nothing")] if count]
        echo(f"nothing left to {'change' if left else 'do'}{''.join(left)}")
        return
    changes = (
        f"{format_count(report.count('change'), 'change is', 'changes are')} written"
        if written
        else f"{format_count(report.count('change'), 'change')} in the diffs above"
    )
    echo(
        f"{changes}, "
        f"{report.count('by hand')} to make by hand, {_count_decisions(report)}"
        f"{report.count('nothing')} without a counterpart"
        + ("" if written or not report.count("change") else "; --write makes the changes")
    )


def _count_decisions(report: ProjectReport) -> str:
    return f"{report.count('decide')} to decide, " if report.count("decide") else ""


def _print_findings(files: Iterable[FileReport], kind: FindingKind, written: list[str]) -> None:
    """Write each advice once, below its places: `tasks.py:3, 17  base`."""
    places: dict[str, dict[tuple[str, str], list[int]]] = {}
    for file in files:
        for finding in file.of_kind(kind):
            line = finding.line_after if file.path in written and finding.line_after else finding.line
            lines = places.setdefault(finding.advice, {}).setdefault((file.path, finding.name), [])
            lines += [] if line in lines else [line]
    if places:
        echo(f"{_SHOWN[kind]}\n{'-' * len(_SHOWN[kind])}")
        if kind == "decide":
            echo(_wrap(_HOW_TO_DECIDE, "  ", "  "))
    for advice, here in places.items():
        for (path, name), lines in here.items():
            echo(_wrap(f"{path}:{', '.join(map(str, lines))}  {name}", "  ", " " * 6))
        echo(_wrap(advice, " " * 6, " " * 6))
    if places:
        echo("")


def _wrap(text: str, first: str, others: str) -> str:
    """Return text in lines as long as those of the terminal, with their indentations."""
    width = max(MIN_WIDTH, min(shutil.get_terminal_size((WIDTH_OF_PIPE, 24)).columns, WIDTH_OF_PIPE))
    return textwrap.fill(
        to_one_line(text),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print_beat_rows(file: Path, *, wants_json: bool) -> None:
    text, left = export_beat_rows(file)
    if wants_json:
        echo(to_json({"configuration": text, "left_out": left}))
        return
    echo(text, nl=False)
    for line in left:
        echo(f"left out: {to_one_line(line)}", err=True)


def _import_results(target: Target, file: Path, *, wants_store: bool, wants_json: bool) -> None:
    """Count the rows of results, or store them. The application is asked for, where one is named."""
    app = target.load(needs_code=True) if wants_store or target.name else None

    def leave_out(line: str) -> None:
        if not wants_json:
            echo(f"left out: {to_one_line(line)}", err=True)

    counts = import_results(app, read_result_rows(file), time.time(), leave_out, store=wants_store)
    rows = format_count(counts.left_out, "row is", "rows are")
    if wants_json:
        fields = {"wanted": counts.wanted, "stored": 0, "known": counts.known, "left_out": counts.left_out}
        echo(to_json(fields | {"stored": counts.wanted - counts.known if wants_store else 0}))
    elif wants_store:
        known = f", {counts.known} had one already" if counts.known else ""
        stored = format_count(counts.wanted - counts.known, "result is", "results are")
        echo(f"{stored} stored{known}, {rows} left out")
    else:
        echo(f"{format_count(counts.wanted, 'result')} can be stored, {rows} left out; --store stores them")
