"""A model that is built on the meta device: each process has the memory of its own stages."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway._torch.memory import OperationCounter
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline, make_weights, read_weights

DIM, LAYERS = 64, 8


class BufferedLayer(nn.Module):
    """A layer with a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("waves", torch.empty(DIM), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)
        self.waves.copy_(torch.sin(torch.arange(DIM)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(F.gelu(self.linear(x + self.waves)))


class LayeredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(BufferedLayer() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _empty(waves: bool = False) -> LayeredModel:
    """A model on meta; with ``waves``, but for the buffers that are not saved."""
    with torch.device("meta"):
        model = LayeredModel()
    for layer in model.layers if waves else ():
        layer.waves = torch.sin(torch.arange(DIM))
    return model


def _build(model: nn.Module, weights: Any, schedule: str = "1f1b", **options: Any) -> Pipeline:
    options = {
        "schedule": schedule,
        "n_microbatches": 4,
        "loss_fn": F.mse_loss,
        "sample": torch.zeros(2, DIM),
    } | options
    return Pipeline(model, weights=weights, **options)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """As the format is defined: a length, a JSON header, the bytes."""
    names = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else _scalar(tensor)
        place = [len(content), len(content) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        content += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def _scalar(tensor: Tensor) -> bytes:
    return tensor.reshape(1).view(torch.uint8).numpy().tobytes()


def _write_sharded(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The layout of large checkpoints: one file for each layer, and an index."""
    state = model.state_dict()
    file_of = {name: f"model-{name.split('.')[1]}.safetensors" for name in state}
    for file in set(file_of.values()):
        write_safetensors(folder / file, {name: value for name, value in state.items() if file_of[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return state


class RealBytes(OperationCounter):
    """Counts the bytes of tensors that have memory."""

    def _note(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._note(tensor)


def _bytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if not t.is_meta)


def _starts(rank: int, ranks: int, how: str, folder: str) -> None:
    model, asked = _empty(waves=how == "files"), []  # what is never saved is in no file
    make = make_weights(model, seed=3) if how == "init" else read_weights(folder)

    def weights(names: Any) -> Any:
        asked.extend(names)
        return make(names)

    whole = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    with RealBytes() as counter:
        pipe = _build(model, weights, "zb-h1")
    own = _bytes_of(model)
    assert own == pytest.approx(whole / ranks, rel=0.02), "the other stages have no memory"
    layers = {int(name.split(".")[1]) for name in asked}
    assert len(layers) == LAYERS // ranks, "nothing of other stages was made or read"
    if rank:  # the first process runs the sample on zeros, which the system does not give memory for
        assert counter.peak <= 1.5 * own
    reference = LayeredModel()
    state = make_weights(_empty(), seed=3)(list(reference.state_dict()))
    reference.load_state_dict(state)
    torch.manual_seed(0)
    x, target = torch.randn(8, DIM), torch.randn(8, DIM)
    pipe.step(x, target=target)
    for micro, goal in zip(x.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(reference(micro), goal) / 4).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=0, atol=0)
        torch.testing.assert_close(parameter.grad, expected[name].grad)
    pipe.close()


@pytest.mark.parametrize("how", ["init", "files"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_process_has_its_own_stages(how: str, ranks: int, tmp_path: Path) -> None:
    if how == "files":
        model = LayeredModel()
        model.load_state_dict(make_weights(_empty(), seed=3)(list(model.state_dict())))
        _write_sharded(tmp_path, model)
    on_ranks(ranks, _starts, ranks, how, str(tmp_path))


def _local(weights: Callable[[nn.Module], Any]) -> Pipeline:
    model = _empty()
    return _build(model, weights(model), transport=LocalTransport(), ranks=2)


def test_an_init_function_sets_all_or_is_refused() -> None:
    def constant(module: nn.Module) -> None:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(1)

    pipe = _local(lambda model: make_weights(model, constant))
    assert all(bool((parameter == 1).all()) for parameter in pipe.parameters())
    with pytest.raises(PipelineError, match=r"init must set every.*no values for scale of layers\.0, a BufferedLayer"):
        _local(lambda model: make_weights(model, lambda module: None))
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(4, 4), _Bare(), nn.Linear(4, 4))
    with pytest.raises(PipelineError, match=r"needs reset_parameters, or an init function; got 1, a _Bare"):
        _build(bare, make_weights(bare), transport=LocalTransport(), ranks=2, sample=torch.zeros(2, 4))


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_files_that_lack_something_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"weights must be in model\.safetensors, or in several files"):
        read_weights(tmp_path)
    state = _write_sharded(tmp_path, LayeredModel())
    with pytest.raises(PipelineError, match=r"none for layers\.0\.waves.*buffers that are not saved"):
        _local(lambda model: read_weights(tmp_path))
    read = read_weights(tmp_path)
    found = read(["layers.1.linear.weight", "layers.2.norm.num_batches_tracked", "layers.3.scale"])
    for name, value in found.items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    (tmp_path / "model-1.safetensors").write_bytes(b"short")
    with pytest.raises(PipelineError, match="a file of weights cannot be read"):
        read(["layers.1.linear.weight"])
    one = tmp_path / "one.safetensors"
    write_safetensors(one, {"weight": torch.arange(4, dtype=torch.bfloat16)})
    assert read_weights(one)(["weight"])["weight"].tolist() == [0, 1, 2, 3]
