"""Control commands: their definitions and signatures."""
