"""Events and documents as they travel."""
