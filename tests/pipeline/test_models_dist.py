"""Unmodified models over gloo, each equal to its own backward. ``test_nccl_models.py`` runs the same on GPUs."""

from __future__ import annotations

from gloo import on_ranks
from model_steps import run_all
from nccl_cases import said


def test_two_processes() -> None:
    on_ranks(2, run_all, 2, "cpu", said, timeout=240)
