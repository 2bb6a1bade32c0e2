"""Connections: the ways from an application to its brokers."""
