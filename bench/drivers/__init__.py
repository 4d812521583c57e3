"""Processes of their own that make the calls that are measured, and say how long they took."""
