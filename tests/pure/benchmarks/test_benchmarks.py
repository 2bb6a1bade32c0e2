"""The benchmarks compute goals from figures alone, keep what later runs did not measure, and run what is chosen."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULES = (
    "children",
    "contestants",
    "environments",
    "goals",
    "measures",
    "record",
    "report",
    "run",
    "server",
)
FIGURES = {
    "celery5, Trio": {
        "drain1": 60_000.0,
        "drain2": 102_000.0,
        "cpu_us1": 20.0,
        "enqueue": 9_000.0,
        "naps": 2.6,
    },
    "celery5, asyncio": {"drain1": 25_000.0, "drain2": 40_000.0, "cpu_us1": 35.0, "naps": 2.65},
    "celery5, def": {"drain1": 30_000.0, "cpu_us1": 41.0, "naps": 2.71},
    "celery5, no log, no history": {"cpu_us1": 16.0},
    "celery5, boxed": {"drain1": 12_500.0},
    "BlitzQ, asyncio": {"drain1": 25_000.0, "drain2": 60_000.0},
    "mayu, def": {"drain1": 20_000.0},
    "tarsk, asyncio": {"enqueue": 10_000.0},
    "huey": {"enqueue": 8_000.0},
}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the benchmarks, which are programs and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        yield {name: import_module(name) for name in MODULES}
    finally:
        for name in list(sys.modules):
            if name in MODULES or name.partition(".")[0] == "peers":
                del sys.modules[name]


def reached(
    benchmarks: dict[str, Any], figures: dict[str, dict[str, float]]
) -> dict[str, tuple[float | None, str]]:
    """Return the value and the verdict of each goal."""
    return {goal.label: (goal.value, goal.verdict) for goal in benchmarks["goals"].goals(figures)}


def test_goals_are_met_or_missed_as_the_figures_say(benchmarks: dict[str, Any]) -> None:
    goals = reached(benchmarks, FIGURES)
    assert goals["`def`: drain, 1 process, times mayu"] == (1.5, "met")
    assert goals["asyncio: drain, 1 process, times BlitzQ"] == (1.0, "**missed**")
    assert goals["Trio: drain, 1 process, times BlitzQ"] == (2.4, "met")
    assert goals["Trio: drain, 2 processes, times BlitzQ"] == (1.7, "**missed**")
    assert goals["Trio: 2 processes, times 1 process"] == (1.7, "met")
    assert goals["Trio: worker + Redis CPU, µs a job"] == (20.0, "met")
    assert goals["asyncio: worker + Redis CPU, µs a job"] == (35.0, "met")
    assert goals["`def`: worker + Redis CPU, µs a job"] == (41.0, "**missed**")
    assert goals["boxed no-op jobs one after another, µs a job"] == (80.0, "met")
    assert goals["log and history, % of the CPU of a job"] == (25.0, "**missed**")


def test_goals_take_the_best_peer_of_both_generations_and_our_slowest_kind(
    benchmarks: dict[str, Any],
) -> None:
    goals = reached(benchmarks, FIGURES)
    assert goals["send one by one, times the best peer"] == (0.9, "**missed**")
    assert goals["5,000 x 50 ms at 100, s, slowest of the three"] == (2.71, "**missed**")
    without_one = FIGURES | {"celery5, def": {"drain1": 30_000.0}}
    assert reached(benchmarks, without_one)["5,000 x 50 ms at 100, s, slowest of the three"] == (
        None,
        "not measured",
    )


def test_goals_without_figures_are_not_measured(benchmarks: dict[str, Any]) -> None:
    assert {verdict for _, verdict in reached(benchmarks, {}).values()} == {"not measured"}


def test_a_record_merges_what_a_later_run_measured_again_and_keeps_the_rest(
    benchmarks: dict[str, Any],
) -> None:
    old, new = benchmarks["record"].Record(), benchmarks["record"].Record()
    old.runs["1"], new.runs["2"] = {"date": "first"}, {"date": "second"}
    for rate in (1.0, 3.0, 2.0):
        old.keep("1", "mayu, def", "drain1", {"drain1": rate, "bulk": 7.0})
    old.keep("1", "mayu, def", "latency", {"p50": 22.0})
    new.keep("2", "mayu, def", "drain1", {"drain1": 9.0})
    new.fail("2", "tarsk, asyncio", "kill", "80 of 1,000 jobs\nnot done")
    assert old.medians() == {"mayu, def": {"drain1": 2.0, "bulk": 7.0, "p50": 22.0}}
    old.merge(new)
    assert old.medians() == {"mayu, def": {"drain1": 9.0, "p50": 22.0}}
    assert set(old.runs) == {"1", "2"}
    assert old.failed("tarsk, asyncio", "kill") == "80 of 1,000 jobs not done"


def test_an_empty_cell_of_the_table_says_why(benchmarks: dict[str, Any]) -> None:
    record, report = benchmarks["record"].Record(), benchmarks["report"]
    record.keep("1", "celery5, Trio", "kill", {"recovery": 0.5})
    record.fail("1", "tarsk, asyncio", "kill", "80 of 1,000 jobs not done")
    text = report.table(record, report.of_groups("ours", "new"), {"recovery": ("kill", "recovery, s")})
    assert "| recovery, s | **0.50** | - (1) |" in text
    assert "(1) tarsk, asyncio: failed: 80 of 1,000 jobs not done" in text


def test_the_readme_compares_with_peers_and_links_to_the_goals(benchmarks: dict[str, Any]) -> None:
    record = benchmarks["record"].Record()
    record.runs["1"] = dict.fromkeys(("CPU", "Python", "server", "date", "rounds"), "x")
    record.keep("1", "mayu, def", "drain1", {"drain1": 9.0})
    text = benchmarks["report"].excerpt(record)
    assert "| drain, 1 process, jobs/s | **9.00** | - |" in text
    assert "0 of 23 are met: [benchmarks/results.md](benchmarks/results.md)" in text
    assert "missed" not in text
    assert "not measured" not in text


def test_contestants_are_chosen_by_group_module_or_name_with_a_comma(benchmarks: dict[str, Any]) -> None:
    run = benchmarks["run"]
    assert [contestant.name for contestant in run.chosen("celery5, def, mayu")] == [
        "celery5, def",
        "mayu, def",
    ]
    assert {contestant.group for contestant in run.chosen("ours;new")} == {"ours", "new"}
    with pytest.raises(SystemExit, match="unknown contestant maju; known: ArdiQ"):
        run.chosen("maju")


def test_older_peers_have_one_round_beside_others_and_all_rounds_alone(benchmarks: dict[str, Any]) -> None:
    run = benchmarks["run"]

    def rounds_of(only: str, name: str) -> int:
        asked = run.parse(["--only", only, "--measures", "drain1,idle"])
        steps = run.planned(run.chosen(only), asked)
        return sum(step[1:] == ("drain1", name) for step in steps)

    assert rounds_of("huey,mayu", "huey") == 1
    assert rounds_of("huey,mayu", "mayu, def") == 3
    assert rounds_of("huey", "huey") == 3


def test_a_stopped_run_is_read_again_with_what_it_has_done(
    benchmarks: dict[str, Any], tmp_path: Path
) -> None:
    stopped = benchmarks["run"].Run("1", ["--only", "mayu"])
    stopped.record.keep("1", "mayu, def", "drain1", {"drain1": 5.0})
    stopped.done.add((0, "drain1", "mayu, def"))
    stopped.save(tmp_path / "unfinished.json")
    resumed = benchmarks["run"].Run.load(tmp_path / "unfinished.json")
    assert resumed == stopped
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished.json"]
