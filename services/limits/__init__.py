"""The limits of tasks as one worker knows them, and what sets them."""
