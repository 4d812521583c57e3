"""The storage protocols and their backends."""
