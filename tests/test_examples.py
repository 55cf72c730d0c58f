"""Every example runs, shortened; the shortened one is the same script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PARAFLOW_QUICK": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stderr
    assert "epoch 1" in result.stdout
    assert "Warning" not in result.stderr, result.stderr
