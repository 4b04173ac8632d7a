"""Relate files to each other: what imports, calls and subclasses what, and in which order to read them."""
