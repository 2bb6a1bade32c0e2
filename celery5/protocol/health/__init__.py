"""Decisions about health: circuit breakers, readings of endpoints, diagnoses, metrics."""
