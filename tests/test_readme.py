"""The README's example runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    (tmp_path / "train.py").write_text(code[1], encoding="utf-8")
    result = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "epoch 3/3" in result.stdout
    assert "torch.Size([200, 10])" in result.stdout
    assert list((tmp_path / "runs" / "net").glob("step-*"))


def test_what_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target


def test_the_tests_that_reliability_names_exist() -> None:
    root = README.parent
    text = (root / "docs" / "reliability.md").read_text(encoding="utf-8")
    rooms = {"T": "trainer", "C": "callbacks", "K": "checkpoint", "D": "data", "P": "pain"}
    named = [root / "tests" / rooms[room] / f"{name}.py" for room, name in re.findall(r"\b([TCKDP])/`(\w+)`", text)]
    named += [root / path for path in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", text)]
    assert len(named) > 60
    assert [path for path in named if not path.exists()] == []
