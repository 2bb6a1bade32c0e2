"""Decisions about periodic tasks."""
