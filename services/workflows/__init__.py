"""Move runs of workflows on."""
