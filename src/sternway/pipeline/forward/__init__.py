"""Stages of an unmodified model: its own forward, cut at module calls while it runs."""
