from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from paraflow.cli import main

ROOT = Path(__file__).parents[2]


def test_bad_use_is_one_sentence_and_status_2() -> None:
    for words, sentence in [
        (["-n", "0", __file__], "paraflow launch: -n 0 is no number of processes."),
        (["missing.py"], "paraflow launch: There is no script 'missing.py' in "),
    ]:
        result = CliRunner().invoke(main, ["launch", *words])
        assert result.exit_code == 2
        assert result.stderr.startswith(sentence)
        assert result.stderr.count("\n") == 1


def test_help_and_version_need_no_torch() -> None:
    program = "import sys; before = set(sys.modules); import paraflow.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("paraflow ")
