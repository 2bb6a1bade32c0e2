"""Runners: where user code runs. They know no Redis and no queue: a function goes in, an outcome comes out."""
