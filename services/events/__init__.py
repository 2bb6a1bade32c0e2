"""The services that turn events and documents into jobs, and deliver results to sinks."""
