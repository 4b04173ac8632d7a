"""AOTAutograd and Inductor: how a compiled forward and its backward are made."""
