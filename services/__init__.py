"""Services: one noun a file, each lives until it is cancelled.

A service is a class with a keyword-only constructor that only assigns, and
`async def run(self, *, task_status=trio.TASK_STATUS_IGNORED)`, which calls `task_status.started()` after its first
success and never returns. Import a service by its full name, `celery5.services.<noun>`.
"""
