"""Sternway: command of PyTorch's backward pass.

``import sternway`` is light: a room is imported when it is first used, as ``from sternway import split``.
"""

__version__ = "0.1.0"
