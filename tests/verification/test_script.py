"""`paraflow verify`: a script is run up to its first fit, whose model and data are compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paraflow.errors import LaunchError
from paraflow.first_fit import at_first_fit
from paraflow.trainer import Trainer
from paraflow.verification.__main__ import main

SCRIPT = """
import sys
import torch
import paraflow as pf

pf.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
pf.configure(model, lr=1e-2, loss="cross_entropy")
data = torch.randn(24, 6), torch.randint(0, 3, (24,))
try:
    pf.Trainer(max_epochs=2, accumulate=int(sys.argv[1])).fit(model, data, batch_size=8)
except Exception:
    print("the script goes on")
print("the script has ended")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_what_fit_was_given_is_handed_over_and_the_script_ends(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, words = Trainer.fit, list(sys.argv)
    given = at_first_fit(script, ["2"], lambda trainer, model, data, batch_size: (trainer, model, data, batch_size))
    assert given[0].request.flags == {"accumulate": 2}
    assert given[3] == 8
    assert len(given[2][0]) == 24
    assert capsys.readouterr().out == ""
    assert Trainer.fit is fit
    assert sys.argv == words


def test_a_script_without_a_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("raise SystemExit(0)")
    with pytest.raises(LaunchError, match=r"empty\.py ended without a call of Trainer\.fit"):
        at_first_fit(tmp_path / "empty.py", [], lambda *given: given)
    with pytest.raises(LaunchError, match="There is no script"):
        at_first_fit(tmp_path / "missing.py", [], lambda *given: given)


def test_a_script_is_verified(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", "--steps", "3", str(script), "4"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "The plan (accumulate=4) trains as one process does: 3 steps" in said
    assert "the script" not in said
    monkeypatch.setattr(sys, "argv", ["verify", str(script), "100"])
    assert main() == 2
    assert "paraflow verify: [batch-covers-micro-batches]" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compares_two_ranks_with_one(script: Path) -> None:
    command = [sys.executable, "-m", "paraflow.cli", "verify", "-n", "2", "--steps", "2", str(script), "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "The plan (dp=2) trains as one process does: 2 steps" in result.stdout
