"""The pages of the dashboard, in the order of the navigation."""

from celery5.dashboard.page import Page
from celery5.dashboard.pages.overview import OVERVIEW_PAGES
from celery5.dashboard.pages.queues import QUEUE_PAGES

PAGES: tuple[Page, ...] = (*OVERVIEW_PAGES, *QUEUE_PAGES)
"""Every page of one application."""
