"""Whether the extension in C++ is used (``eager/_native.py``): it is asked for, built, and tried before it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from sternway._torch import require
from sternway._torch.native import load_extension
from sternway.errors import UnsupportedTorch
from sternway.split._backward import backward_input
from sternway.split.eager._native import EXTENSION


def accelerate(on: bool = True) -> None:
    """Let an extension in C++ do what the split otherwise does in Python, from now on in this process.

    Splitting costs Python some microseconds for each node of a graph. Where operations are small, that is up to a
    quarter of a backward; the extension takes more than half of it away. The first call for a release of torch builds
    it, which takes a C++ compiler and half a minute; later ones find it in torch's folder for extensions. Gradients,
    hooks and errors stay as they are. Graphs of GPUs are left to Python.

    Example:
        >>> from sternway import split
        >>> split.accelerate()                                                          # doctest: +SKIP

    Args:
        on: False goes back to Python.

    Raises:
        UnsupportedTorch: it cannot be built, or does not fit this torch; the message says why.
    """
    if on and EXTENSION.module is None:
        require("split.native")
        EXTENSION.module = load_extension()
    if on and not EXTENSION.was_tried:
        with ThreadPoolExecutor(1) as apart:  # where no mode of the caller's, such as no_grad, is on
            EXTENSION.was_tried = apart.submit(_equals_autograd).result()
        if not EXTENSION.was_tried:
            raise UnsupportedTorch(
                "the extension in C++ must split a small graph as autograd does",
                got=f"other gradients with torch {torch.__version__}",
                fix="do not call split.accelerate() with this release: the split works without",
            )
    EXTENSION.is_on = on


def _equals_autograd() -> bool:
    """Whether the extension's gradients of a small graph are those of a plain backward."""
    leaves = weight, bias, x = [torch.linspace(-1, 1, count).requires_grad_() for count in (12, 3, 8)]
    loss = torch.addmm(bias, x.sin().view(2, 4), weight.view(4, 3)).square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    EXTENSION.is_on = True
    try:
        found, pending = backward_input(loss, None, x)
    finally:
        EXTENSION.is_on = False
    pending.run()
    return all(map(torch.allclose, (weight.grad, bias.grad, found), expected))
