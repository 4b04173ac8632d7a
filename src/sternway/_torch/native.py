"""The extension in C++ that a user may switch on: how it is built, and where it is kept.

It reads what nodes save off torch's own classes, whose layout changes with every release: it is built for one release,
and kept under that release's name. The compiler runs in another process, since torch's tool changes ``distutils`` where
it is imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from sternway._torch.probe import probe
from sternway.errors import UnsupportedTorch

ROLES = ("unusual", "plain", "leaf", "t", "transpose", "cast", "cut", "convolution", "mm", "bmm", "addmm", "baddbmm")
"""What nodes of a kind are to the extension: the names of ``Role`` in ``native.cpp``, in its order."""

TERMS = ("given", "of left", "of right", "filter", "bias")
"""What a term of a gradient is: the names of ``Term`` there."""

_NAME = "sternway_native"
_SOURCE = Path(__file__).with_name("native.cpp")
_HEADER = Path(torch.__file__).parent / "include/torch/csrc/autograd/generated/Functions.h"
_BUILD = """
import sys
from setuptools import Distribution
from torch.utils.cpp_extension import BuildExtension, CppExtension
name, source, folder = sys.argv[1:]
extension = CppExtension(name, [source], extra_compile_args=["-O2", "-g0"])
build = BuildExtension.with_options(use_ninja=False)(Distribution({"name": name, "ext_modules": [extension]}))
build.build_lib = build.build_temp = folder
build.ensure_finalized()
build.run()
"""


def load_extension() -> Any:
    """The extension, built if this release of torch has none yet.

    Raises UnsupportedTorch if it cannot be built.
    """
    place = _folder() / f"{_NAME}{EXTENSION_SUFFIXES[0]}"
    if not place.exists():
        _build(place)
    spec = spec_from_file_location(_NAME, place)
    assert spec is not None  # the suffix is one of Python's own
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    """Where the extension is kept: another folder for another torch, Python or source."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
    source = hashlib.sha256(_SOURCE.read_bytes() + str(_HEADER).encode()).hexdigest()[:12]
    return cache / re.sub(r"[^\w.+-]", "_", f"{_NAME}-{torch.__version__}-{sys.implementation.cache_tag}-{source}")


def _build(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:  # several processes may build at once
        command = [sys.executable, "-c", _BUILD, _NAME, str(_SOURCE), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        built = list(Path(folder).glob(f"{_NAME}*"))
        if done.returncode or not built:
            lines = (done.stderr or done.stdout).strip().splitlines()
            fault = next((line for line in lines if "error" in line.lower()), (lines or ["nothing built"])[-1])
            raise UnsupportedTorch(
                "split.accelerate() must be able to build an extension in C++ for this torch",
                got=f"{fault.strip()} with torch {torch.__version__}",
                fix="install a C++ compiler and setuptools (apt install g++; pip install setuptools), or do not "
                "call it: the split works without",
            )
        built[0].replace(place)


@probe(
    "torch/csrc/autograd/generated/Functions.h",
    expected="is installed with torch, and has what products save as members",
    features=("split.native",),
)
def _header() -> bool:
    text = _HEADER.read_text()
    for kind, members in {
        "MmBackward0": ("self_", "mat2_"),
        "BmmBackward0": ("self_", "mat2_"),
        "AddmmBackward0": ("mat1_", "mat2_", "alpha", "beta"),
        "BaddbmmBackward0": ("batch1_", "batch2_", "alpha", "beta"),
        "ConvolutionBackward0": (
            "input_",
            "weight_",
            "stride",
            "padding",
            "dilation",
            "transposed",
            "output_padding",
            "groups",
        ),
        "TransposeBackward0": ("dim0", "dim1"),
    }.items():
        body = text.partition(f"struct TORCH_API {kind} :")[2].partition("\n};")[0]
        if not all(re.search(rf"\b{member}( = 0)?;", body) for member in members):
            return False
    return True
