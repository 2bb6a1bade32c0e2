"""The services of a worker: reading, running and settling jobs, and the lease on them."""
