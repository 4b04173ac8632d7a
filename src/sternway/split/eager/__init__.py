"""Eager graphs: torch's nodes and their rules, what I catches at the cuts, what W computes of it."""
