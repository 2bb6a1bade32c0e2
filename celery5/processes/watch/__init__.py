"""Watch the event loop of a process, and the process itself from its sidecar."""
