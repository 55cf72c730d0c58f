"""The pages for those who come from Whale and Megatron-LM: scripts run, and names are those of the code."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paraflow as pf
from paraflow.explaining import explain_script
from paraflow.pipelining.orders import SCHEDULES
from paraflow.plan import PLAN_FIELDS

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("from_whale", "from_megatron")}


def script_of(page: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    return str(code)


@pytest.mark.parametrize("page", PAGES)
def test_its_script_runs_on_one_process(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script_of(page), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"loss \d\.\d\d( to \d\.\d\d)?\n", result.stdout)


def test_the_readme_shows_what_explain_says_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script_of("from_whale"), encoding="utf-8")
    said = {" ".join(line.split()) for line in explain_script(tmp_path / "train.py", 4).splitlines()}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(Net: 67,112.*?)\n\nThe plan.*?```", readme, re.DOTALL)
    lines = [" ".join(line.split()) for line in shown.splitlines() if line]
    assert [line for line in lines if line not in said] == []
    assert len(lines) == 8


def test_the_megatron_plan_is_explained_for_eight_ranks(tmp_path: Path) -> None:
    text = script_of("from_megatron").replace("pf.Trainer(", "pf.Trainer(tp=2, pp=2, ")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    assert " on 8 ranks: dp=2, tp=2, pp=2, accumulate=4" in explain_script(tmp_path / "train.py", 8)


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_is_there(page: str) -> None:
    text = PAGES[page]
    for name in re.findall(r"\bpf\.(\w+(?:\.\w+)?)", text):
        found = pf
        for part in name.split("."):
            found = getattr(found, part)
    arguments = {*PLAN_FIELDS, *inspect.signature(pf.Trainer).parameters}
    for call in re.findall(r"(?<!\w)Trainer\(([^`)]*)", text):
        assert set(re.findall(r"(\w+)=", call)) <= arguments, call
    for cell in re.findall(r"`(\w+)=[^`(]*`", text.split("```python")[-1]):
        assert cell in {*arguments, "schedule", "batch_size", "optimizer", "chunks"}, cell
    named = re.findall(r'schedule="(\w+)"', text)
    assert set(named) <= {*SCHEDULES, "cosine"}


@pytest.mark.parametrize("page", PAGES)
def test_its_plugins_can_be_made(page: str) -> None:
    calls = re.findall(r"pf\.plugins\.\w+\((?:[^()`.]|\.(?!\.\.))*\)", PAGES[page])
    assert calls
    for call in calls:
        eval(call, {"pf": pf})


@pytest.mark.parametrize("page", PAGES)
def test_what_it_links_to_exists(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGES[page]):
        assert (ROOT / "docs" / target).exists(), target
