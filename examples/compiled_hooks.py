"""The norms of gradients, printed from inside a compiled model's backward, with no graph break.

python examples/compiled_hooks.py
python examples/compiled_hooks.py --backend aot_eager
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from sternway.state import BackwardState


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Some blocks; after each, a hook that prints the gradient's norm, and in front of the first one that clips it."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.state = BackwardState()

    def report(self, name: str, grad: Tensor) -> None:
        print(f"  step {self.state.step}  {name:8} {grad.norm().item():.4f}")

    def forward(self, x: Tensor) -> Tensor:
        x = self.state.on_grad(x, clip)
        for index, block in enumerate(self.blocks):
            x = self.state.on_grad(block(x), lambda grad, name=f"block {index}": self.report(name, grad))
        return x


def clip(grad: Tensor) -> Tensor | None:
    """The gradient, no longer than 0.05; None leaves it as it is."""
    norm = grad.norm()
    return grad * (0.05 / norm) if norm > 0.05 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor", help="of torch.compile: inductor, aot_eager, sternway")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Net(dim=32, layers=3)
    compiled = torch.compile(model, backend=arguments.backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(arguments.steps):
        x = torch.randn(16, 32, requires_grad=True)
        loss = compiled(x).square().mean()
        model.state.step = step  # after the forward, for the hooks to read
        loss.backward()
        assert x.grad is not None
        print(f"  step {step}  input    {x.grad.norm().item():.4f} (clipped)")
        optimizer.step()
        optimizer.zero_grad()
        torch.compiler.set_stance("fail_on_recompile")  # from the second step on
    print("one graph, without a break, served every step")


if __name__ == "__main__":
    main()
