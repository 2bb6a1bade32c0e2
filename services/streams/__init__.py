"""Services of a worker that run processors of streams."""
