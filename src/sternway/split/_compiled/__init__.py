"""Compiled backwards: ``torch.compile(module, backend="sternway")`` makes three graphs of one, F, I and W."""
