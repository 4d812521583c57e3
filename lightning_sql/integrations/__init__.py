"""lightning-sql inside other programs. Nothing here is imported unless it is asked for."""
