"""Measures this store side by side with others: `python -m bench.compare`."""
