"""A small source tree with every odd thing in it that a real one may have."""

from __future__ import annotations

import os
from pathlib import Path

MODEL = '''\
"""A small model.

Its second paragraph.
"""
import torch
import torch.nn as nn
from torch.optim import AdamW
from .util import scale, missing

__all__ = ["Block", "train"]


class Block(nn.Module):
    """One block; see ``scale``."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x, *, gain: float = 1.0):
        return scale(self.up(x)) * gain


class Deep(Block):
    pass


def train(path):
    model = Block()
    optimizer = AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    torch.manual_seed(0)
    loss = nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4))
    loss.backward()
    torch.save({"model": model.state_dict(), "step": 1}, path)
    state = torch.load(path, weights_only=True)
    return state["model"]


def sample():
    return Block(), torch.ones(3, 4)
'''

UTIL = '''\
"""Helpers that ``model`` uses."""
import pickle
import subprocess as sp
from functools import lru_cache


def scale(x):
    """Twice.

    Raises:
        ValueError: if it is wrong.
    """
    return 2 * x


@lru_cache
async def wait():
    return eval("1 + 1")


def not_dangerous(model, pickle):
    model.eval()
    pickle.loads(b"")  # a parameter, not the module
    "eval(x)  torch.load(y)"


def dangerous(data):
    sp.run(["ls"], shell=True)
    return pickle.loads(data)
'''

MAIN = """\
import argparse
import os

from pkg.model import train
import pkg.util as u
import nowhere


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    print(args.lr, os.environ["HOME"], os.environ.get("SEED"))
    u.scale(1)
    train("x")


if __name__ == "__main__":
    main()
"""

FENCES = "# Title\n\n```python\nx = 1\n```\n\n`````\nfive\n`````\n[not a link](nowhere.html)\n"
NASTY = 'a "b" <script>alert(1)<\'> & c.py'


def build(root: Path) -> Path:
    """Make the tree and return its root."""
    package = root / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A package."""\nfrom .model import Block\n')
    (package / "model.py").write_text(MODEL)
    (package / "util.py").write_text(UTIL)
    (root / "main.py").write_text(MAIN)
    (root / "README.md").write_text(FENCES)
    (root / "config.yaml").write_text("train:\n  lr: 0.1\n  model: small\n")
    (root / "pyproject.toml").write_text('[project]\nname = "x"\n\n[project.scripts]\ngo = "pkg.model:train"\n')
    (root / "data.json").write_text('{"a": {"b": [1, {"c": "x"}]},\n "d": 2}\n')
    (root / "broken.json").write_text("{not json")
    (root / "kernel.cu").write_text(
        '// Adds two vectors.\n#include "add.h"\n__global__ void add(float* x) { x[0] = 1; }\n'
    )
    (root / "add.h").write_text("struct Pair { int left; };\n")
    (root / "latin.py").write_bytes("# café naïveté\nname = 'é'\n".encode("latin-1"))
    (root / "cookie.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (root / "broken.py").write_text("def f(:\n")
    (root / "null.py").write_bytes(b"x = 1\0\n")
    (root / "empty.py").write_text("")
    (root / "binary.bin").write_bytes(bytes(range(256)) * 40)
    (root / NASTY).write_text(f"# {NASTY}\nvalue = '<script>alert(2)</script>'\n")
    os.mkdir(root / "index.md")  # a folder with a page's name
    (root / "index.md" / "x_docs.md").write_text("inside\n")
    (root / "sub ~ folder").mkdir()
    (root / "sub ~ folder" / "é.txt").write_text("word écrit\n")
    (root / "deep.py").write_text("x = " + "(" * 60 + "1" + ")" * 60 + "\ny = " + " + ".join(["1"] * 2000) + "\n")
    with open(root / "huge.txt", "wb") as file:  # text, 100 MB; the end is a hole
        file.write(b"some words\n" * 1000)
        file.truncate(100_000_000)
    with open(os.fsencode(root) + b"/bad\xff name.py", "w") as file:  # a name that is no UTF-8
        file.write("odd = 1\n")
    os.symlink(root, root / "loop")
    os.symlink("self", root / "self")
    os.symlink("/etc", root / "out_of_tree")
    os.symlink("main.py", root / "alias.py")
    os.mkfifo(root / "pipe.py")
    (root / "older" / ".atlas").mkdir(parents=True)  # another run's output
    (root / "older" / "index.md").write_text("# Pages\n")
    (root / ".gitignore").write_text("*.log\n/ignored/\n!keep.log\n")
    (root / "noise.log").write_text("noise\n")
    (root / "keep.log").write_text("kept\n")
    (root / "ignored").mkdir()
    (root / "ignored" / "x.py").write_text("x = 1\n")
    return root
