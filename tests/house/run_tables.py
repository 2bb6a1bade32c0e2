"""Run tables: what can happen to runs and their nodes, in the documentation, made from the table in the code."""

import re
from collections.abc import Iterator, Mapping

from celery5.protocol.workflows.transitions import (
    LIVE_STEPS,
    RUN_STEPS,
    STOPPED_STEPS,
    Kind,
    NodeStep,
    Rows,
    list_policies,
)
from tests.house.sources import HERE

PAGE = HERE / "docs" / "reference" / "states.md"
TITLES: Mapping[Kind, str] = {
    "job": "A step with a job",
    "child": "A step whose job has returned a workflow",
    "later": "A map whose items a job reads, until they are known",
    "member": "A member of a map",
    "sleep": "A sleep",
    "wait": "A wait for a signal or an event",
    "undo": "The undo task of a step that has succeeded",
}


def tables() -> str:
    """All tables, with a title each."""
    parts = ["### The run", run_table()]
    for kind, title in TITLES.items():
        parts += [f"### {title}", node_table(kind)]
    return "\n\n".join(parts)


def run_table() -> str:
    """What can happen to a run."""
    rows = ["| state | what happens | when | state after it |", "|---|---|---|---|"]
    for (state, move), steps in RUN_STEPS.items():
        by_state: dict[str, list[str]] = {}
        for condition, after in steps.items():
            by_state.setdefault(after, []).append(condition)
        rows += [
            f"| `{state}` | {move} | {'; '.join(whens)} | `{after}` |" for after, whens in by_state.items()
        ]
    return "\n".join(rows)


def node_table(kind: Kind) -> str:
    """What can happen to a node of a kind."""
    head = "| the run | state | what happens | `on_error` | state after it | counts |"
    lines = [head, "|---|---|---|---|---|---|"]
    for run, steps in (("live", LIVE_STEPS[kind]), ("stopped", STOPPED_STEPS[kind])):
        grouped: dict[tuple[str, str, str, str], list[str]] = {}
        for state, move, policies, step in _flatten(steps):
            grouped.setdefault((state, policies, step.after, _describe(step)), []).append(move)
        for (state, policies, after, counts), moves in grouped.items():
            lines.append(f"| {run} | `{state}` | {_join(moves)} | {policies} | `{after}` | {counts} |")
    return "\n".join(lines)


def _join(moves: list[str]) -> str:
    """Return what may happen as a list: `its job ends DEAD, EXPIRED or is lost`."""
    others, ends, states = ", ".join(moves).partition("its job ends ")
    states = states.replace(", its job ends ", ", ").replace(", its job is lost", " or is lost")
    return (others + ends + states).replace(", its dead letter", ", or its dead letter")


def _flatten(steps: Rows) -> Iterator[tuple[str, str, str, NodeStep]]:
    for (state, move), row in steps.items():
        for policies, step in list_policies(row):
            yield state, move, policies, step


def _describe(step: NodeStep) -> str:
    """Return what becomes of the counts, and of the run."""
    counts = [f"{name} {by:+d}" for name, by in step.counts.items()]
    return ", ".join([*counts, *(["the run fails"] if step.fails_run else [])])


def page(text: str) -> str:
    """The page `text` with today's tables in their place."""
    start, end = "<!-- runs:start -->\n", "\n<!-- runs:end -->"
    return re.sub(f"(?s){start}.*?{end}", lambda _: f"{start}{tables()}{end}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
