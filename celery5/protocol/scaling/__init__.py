"""Decisions about slots, prefetch, priorities and the number of workers."""
