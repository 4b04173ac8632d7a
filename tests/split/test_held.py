"""``Pending.nbytes`` is what stays allocated after I: every storage is watched from its making to its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shapes import BRANCHES, TOKENS, WIDTH, Adapted, Derived, Frozen
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sternway import pipeline, split
from sternway._storage import tensors_in
from sternway._torch.saved_hooks import intercept

Call = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Watched:
    """Storages that operators make in a block, and which of them are still there; those of ``model`` apart."""

    def __init__(self, model: nn.Module) -> None:
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._apart = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __call__(self, operator: Any, args: Any, kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        for storage in (tensor.untyped_storage() for tensor in tensors_in(result)):
            if storage._cdata not in self._apart:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(size for ref, size in self._made.values() if not ref.expired())


def _plain(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return model(x, ids)


def _checkpointed(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return checkpoint(model, x, ids, use_reentrant=False, preserve_rng_state=False)


ALL = {**BRANCHES, "derived": Derived, "adapted": Frozen}


@pytest.mark.parametrize("needs", [True, False], ids=["middle", "first"])
@pytest.mark.parametrize("call", [_plain, _checkpointed])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_nbytes_is_what_is_alive(make: Callable[[], nn.Module], call: Call, needs: bool) -> None:
    model = make()
    watched = Watched(model)
    ids = torch.randint(0, TOKENS, (2, 4))
    for _ in range(2):  # the first builds what torch keeps for good
        with intercept(watched):
            x = torch.randn(2, 6, WIDTH).requires_grad_(needs)
            output = call(model, x, ids.clone())
            pending = split.backward_input(output, torch.ones_like(output), [x])[1]
        del x, output
    assert pending.nbytes == watched.alive
    pending.run()
    assert pending.nbytes == 0


def test_a_profile_plans_with_it() -> None:
    stages = [nn.Sequential(Adapted(), nn.GELU(), Adapted()), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    x = torch.randn(6, WIDTH)
    found = pipeline.profile(stages, x, repeats=1)
    _, pending = split.backward_input(stages[0](x), torch.randn(6, WIDTH))
    assert found.bytes_after_I[0] == pending.nbytes
