"""The store: its interface, and the implementations of it."""
