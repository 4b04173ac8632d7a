"""Will a GPT of 66 billion parameters fit? Asked on a laptop:

sternway fit examples/fit_gpt.py:build --ranks 16 --microbatches 32 --memory 80GB
"""

import torch
from torch import Tensor, nn

from sternway.demo import GPTBlock

DIM, LAYERS, LENGTH, VOCABULARY = 8192, 80, 2048, 50_304


def build() -> tuple[nn.Module, Tensor]:
    """The model and one microbatch. No memory is taken: this runs on the meta device."""
    blocks = [GPTBlock(DIM, heads=64) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *blocks, nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY))
    return model.to(torch.bfloat16), torch.zeros(1, LENGTH, dtype=torch.long)
