"""Publisher."""
