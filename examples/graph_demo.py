"""See what a forward keeps for its backward, and what a change would save.

sternway graph examples/graph_demo.py:loss --text
sternway graph examples/graph_demo.py:model_and_sample --html graph.html
python examples/graph_demo.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sternway import graph


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(dim) for _ in range(layers)), nn.Linear(dim, 10)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def model_and_sample() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(32, 64)


def loss() -> tuple[Tensor, nn.Module]:
    model, sample = model_and_sample()
    return model(sample).square().mean(), model


def main() -> None:
    graphs = []
    for checkpointed in (False, True):
        model = Net(checkpointed=checkpointed)
        with graph.record(model):
            value = model(torch.randn(32, 64)).square().mean()
        graphs.append(graph.capture(value, model))
    before, after = graphs
    print(before.to_text(depth=2))
    print("\nWith every layer checkpointed:")
    print(before.diff(after, depth=1))
    print(f"wrote {before.to_html('graph.html', title='Before and after checkpointing', other=after)}")


if __name__ == "__main__":
    main()
