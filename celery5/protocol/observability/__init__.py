"""Metrics: what is counted, how it is written for others, and how it is kept as history."""
