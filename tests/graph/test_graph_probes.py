"""Every entry of the room says so if torch does not do what it needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sternway import graph
from sternway._torch import probe
from sternway.errors import UnsupportedTorch


@pytest.mark.parametrize(
    "use",
    [
        lambda: graph.capture(torch.ones(1, requires_grad=True) * 1),
        lambda: graph.record(),
        lambda: graph.explain().__enter__(),
        lambda: graph.explain_inplace().__enter__(),
        lambda: graph.find_nonfinite(torch.ones(1, requires_grad=True).exp()),
        lambda: graph.why_alive(torch.ones(1)),
    ],
)
def test_a_torch_that_does_not_do_what_we_need_is_refused(use: Callable[[], object]) -> None:
    probe.require.cache_clear()
    probe.probe("torch._gone", expected="is there", features=("graph",))(lambda: False)
    added = probe._PROBES[-1]
    try:
        with pytest.raises(UnsupportedTorch, match=r"torch\._gone must do what graph need"):
            use()
    finally:
        probe._PROBES.remove(added)
        probe.require.cache_clear()
