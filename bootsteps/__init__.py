"""Boot steps: what must be true before services may start, and the graph that puts them in order.

Import a step by its full name, `celery5.bootsteps.<step>`.
"""
