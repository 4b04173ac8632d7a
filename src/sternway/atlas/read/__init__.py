"""Read one file: its text, its language, and the facts that a parser finds in it."""
