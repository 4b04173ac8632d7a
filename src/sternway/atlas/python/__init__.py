"""Read a Python file with ``ast``: definitions, imports, calls, patterns, training facts and options."""
