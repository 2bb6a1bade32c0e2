"""Waiting."""
