"""Scaling."""
