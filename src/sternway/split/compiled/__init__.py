"""Compiled graphs: ``torch.compile(module, backend="sternway")`` makes three of one region, F, I and W."""
