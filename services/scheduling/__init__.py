"""Scheduling."""
