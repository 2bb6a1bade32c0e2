"""The table of what may fail without stopping work is the same in the guide and in the code."""

from celery5.protocol.degradation import OPTIONAL_FEATURES
from tests.house.log_events import collect_events
from tests.house.test_logs_and_metrics import ROOT
from tests.house.test_logs_and_metrics import rows as read_rows

PAGE = ROOT / "docs/guide/degradation.md"


def test_the_guide_has_the_table_of_the_code() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    assert lines == [
        f"| {feature.name} | `{feature.event}` | {feature.level} | {feature.lost} | {feature.afterwards} |"
        for feature in OPTIONAL_FEATURES
    ]


def test_each_event_that_warns_is_logged_at_its_level_and_listed_in_the_docs() -> None:
    events = collect_events(ROOT)
    listed = {row[0].strip("`") for row in read_rows("Log events")}
    for feature in OPTIONAL_FEATURES:
        assert feature.level in events[feature.event].levels, feature.event
        assert feature.event in listed


def test_no_feature_and_no_event_stands_in_the_table_twice() -> None:
    assert len({feature.name for feature in OPTIONAL_FEATURES}) == len(OPTIONAL_FEATURES)
    assert len({feature.event for feature in OPTIONAL_FEATURES}) == len(OPTIONAL_FEATURES)
