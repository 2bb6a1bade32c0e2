"""Runners: where user code runs. They know no Redis and no queue: they take a function and return an outcome."""
