"""Send jobs and events from an application to its brokers."""
