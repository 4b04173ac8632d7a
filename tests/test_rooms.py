"""A room imports only the rooms above it: the contracts in pyproject.toml, checked by import-linter."""

from __future__ import annotations

from pathlib import Path

import pytest

lint = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")


def test_import_contracts_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert lint.lint_imports(no_cache=True) == lint.EXIT_STATUS_SUCCESS, capsys.readouterr().out
