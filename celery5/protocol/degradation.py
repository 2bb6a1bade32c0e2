"""The features that may fail without stopping any job, and the log event that warns of each."""

from typing import Literal

import msgspec

WarningLevel = Literal["warning", "error"]


class OptionalFeature(msgspec.Struct, frozen=True, kw_only=True):
    """A feature whose failure is logged once and stops no work."""

    # In words.
    name: str
    # The log event that warns of its failure.
    event: str
    # What there is no more while it fails.
    lost: str
    # What happens when it works again.
    afterwards: str
    # The level of the event.
    level: WarningLevel = "warning"


OPTIONAL_FEATURES: tuple[OptionalFeature, ...] = (
    OptionalFeature(
        name="metrics reports",
        event="metrics:report-failed",
        lost="no new reports in Redis; an outlet that fails gets none",
        afterwards="the first report to Redis has all that was counted; an outlet has lost its reports",
    ),
    OptionalFeature(
        name="metrics history",
        event="metrics:rollup-interrupted",
        lost="reports are not added up",
        afterwards="reports of the last hour are added up",
    ),
    OptionalFeature(
        name="history of ended jobs",
        event="history:write-failed",
        lost="jobs that end are not found by `task search`",
        afterwards="of each process the last 10,000 failures and 1,000 others are stored",
    ),
    OptionalFeature(
        name="alerts",
        event="alerts:interrupted",
        lost="no alert fires or resolves",
        afterwards="evaluated again; an alert keeps its status meanwhile",
    ),
    OptionalFeature(
        name="webhook of alerts",
        event="alerts:webhook-failed",
        lost="notifications wait in Redis; the log has them",
        afterwards="sent in their order; after nine tries one is dropped",
    ),
    OptionalFeature(
        name="middleware and traces",
        event="middleware:failed",
        lost="what this middleware does around jobs: spans, Sentry's reports",
        afterwards="used for each next job; what it missed is lost",
    ),
    OptionalFeature(
        name="job progress",
        event="progress:write-failed",
        lost="`progress()` of running jobs is not seen elsewhere",
        afterwards="the last report of each running job is stored",
    ),
    OptionalFeature(
        name="audit trail",
        event="audit:write-failed",
        lost="the entry of this action; the action stands",
        afterwards="later actions are recorded",
    ),
    OptionalFeature(
        name="log writing",
        event="log:dropped",
        lost="log lines; the first time one line on stderr says so",
        afterwards="the number of lost lines is logged",
    ),
    OptionalFeature(
        name="inbox",
        event="inbox:read-failed",
        lost="control commands to this process",
        afterwards="commands that have not expired are run when the next one comes",
    ),
    OptionalFeature(
        name="shared health state",
        event="health:share-failed",
        lost="each worker runs shared checks by itself",
        afterwards="the newest state of each check is stored",
    ),
    OptionalFeature(
        name="periodic tasks and their catch-up",
        event="timetable:interrupted",
        lost="no schedule fires; jobs that were sent run",
        afterwards="missed times are caught up as the misfire policy of each schedule says",
    ),
    OptionalFeature(
        name="rates of queues",
        event="flow:count-failed",
        lost="what has ended since, on this worker",
        afterwards="counted",
    ),
    OptionalFeature(
        name="queue depths",
        event="depths:read-failed",
        lost="the gauges of queues on `/metrics`",
        afterwards="measured again",
    ),
    OptionalFeature(
        name="scaling reports",
        event="autoscale:report-failed",
        lost="autoscaling does not count this worker",
        afterwards="reported again",
    ),
    OptionalFeature(
        name="status port",
        event="status:open-failed",
        lost="`/livez`, `/readyz` and `/metrics` of this process",
        afterwards="opened as soon as the port is free",
        level="error",
    ),
)
"""Every feature that degrades so. `docs/guide/degradation.md` has the same table."""
