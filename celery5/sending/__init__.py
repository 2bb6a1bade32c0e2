"""Sending: how jobs and events get from an application to its brokers."""
