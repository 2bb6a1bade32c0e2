"""The pages of the dashboard, in the order of the navigation."""

from celery5.dashboard.page import Page
from celery5.dashboard.pages.alerts import ALERT_PAGES
from celery5.dashboard.pages.bulk import BULK_PAGES
from celery5.dashboard.pages.dead_letters import DEAD_LETTER_PAGES
from celery5.dashboard.pages.events import EVENT_PAGES
from celery5.dashboard.pages.jobs import JOB_PAGES
from celery5.dashboard.pages.operations import OPERATION_PAGES
from celery5.dashboard.pages.overview import OVERVIEW_PAGES
from celery5.dashboard.pages.processes import PROCESS_PAGES
from celery5.dashboard.pages.queues import QUEUE_PAGES
from celery5.dashboard.pages.schedules import SCHEDULE_PAGES
from celery5.dashboard.pages.streams import STREAM_PAGES
from celery5.dashboard.pages.tasks import TASK_PAGES
from celery5.dashboard.pages.workflows import WORKFLOW_PAGES

PAGES: tuple[Page, ...] = (
    *OVERVIEW_PAGES,
    *ALERT_PAGES,
    *TASK_PAGES,
    *QUEUE_PAGES,
    *JOB_PAGES,
    *DEAD_LETTER_PAGES,
    *BULK_PAGES,
    *PROCESS_PAGES,
    *SCHEDULE_PAGES,
    *EVENT_PAGES,
    *STREAM_PAGES,
    *WORKFLOW_PAGES,
    *OPERATION_PAGES,
)
"""Every page of one application."""
