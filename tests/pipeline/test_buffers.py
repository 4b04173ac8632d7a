"""Receive buffers: used again when, and only when, nobody holds their memory."""

from __future__ import annotations

import torch

from sternway import split
from sternway.pipeline.transport._buffers import Buffers
from sternway.pipeline.transport._payload import TensorSpec

SPEC = TensorSpec((4, 8), torch.float32, True)


def test_memory_is_used_again_once_it_is_let_go() -> None:
    buffers = Buffers(torch.device("cpu"))
    first = buffers.take(SPEC)
    place = first.data_ptr()
    assert buffers.take(SPEC).data_ptr() != place
    del first
    assert buffers.take(SPEC).data_ptr() == place


def test_a_view_a_graph_and_a_pending_hold_it() -> None:
    buffers = Buffers(torch.device("cpu"))
    layer = torch.nn.Linear(8, 8)
    place = (received := buffers.take(SPEC)).data_ptr()
    x = received.detach().requires_grad_()
    y = layer(x)
    del received
    held = x[1:]
    assert buffers.take(SPEC).data_ptr() != place
    _, pending = split.backward_input(y, torch.ones_like(y), x)
    del x, y, held
    assert buffers.take(SPEC).data_ptr() != place
    pending.run()
    assert buffers.take(SPEC).data_ptr() == place


def test_other_shapes_and_types_have_their_own() -> None:
    buffers = Buffers(torch.device("cpu"))
    place = buffers.take(SPEC).data_ptr()
    assert buffers.take(TensorSpec((4, 8), torch.float64, True)).dtype == torch.float64
    assert buffers.take(TensorSpec((8, 4), torch.float32, True)).shape == (8, 4)
    assert buffers.take(SPEC).data_ptr() == place
    buffers.clear()
    assert buffers._made == {}
