"""The house: arrows run down, the planner is pure Python, importing is cheap, files are small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import paraflow as pf

PACKAGE = Path(pf.__file__ or "").parent


def imports() -> dict[str, set[str]]:
    """The paraflow modules that each module imports when it is imported (not those in functions, nor for types)."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found[name] = {
            target
            for node in tree.body
            for target in _targets(node)
            if target.startswith("paraflow") or target == "torch" or target.startswith("torch.")
        }
    return found


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [path for path in inner if (PACKAGE.parent / path.replace(".", "/")).with_suffix(".py").exists()] or [
            node.module
        ]
    return []


def test_there_are_no_cycles() -> None:
    """Not through a room's own door either: whoever imports a part of another room runs that room's __init__."""
    graph = {
        name: {part for t in targets if t.startswith("paraflow.") for part in (t, *_doors(t, name))}
        for name, targets in imports().items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path, name])
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _doors(target: str, importer: str) -> list[str]:
    room = ".".join(target.split(".")[:2])
    return [room] if room != target and not importer.startswith(room) else []


def test_lower_rooms_do_not_know_upper_ones() -> None:
    upper = {"paraflow.trainer", "paraflow.run", "paraflow.evaluation", "paraflow.fitting", "paraflow.report"}
    lower = ("engine", "mesh", "plan", "rules", "loss", "plugins", "data", "models", "optim", "nn", "planner")
    for name, targets in imports().items():
        if name.split(".")[1:2] and name.split(".")[1] in lower:
            assert not targets & upper, f"{name} imports {targets & upper}"
    for name, targets in imports().items():
        if name.startswith(("paraflow.plugins", "paraflow.data", "paraflow.models")):
            assert "paraflow.engine" not in targets, f"{name} imports the engine"


def test_the_planner_is_pure_python() -> None:
    for name, targets in imports().items():
        if name.startswith("paraflow.planner"):
            assert all(target.startswith("paraflow.planner") for target in targets), f"{name} imports {targets}"


def test_importing_the_trainer_leaves_the_heavy_modules_alone() -> None:
    heavy = ["torchmetrics", "torch._dynamo", "torch.distributed.fsdp", "rich", "matplotlib", "transformers"]
    heavy += ["wandb", "mlflow", "tensorboard", "torch.utils.flop_counter"]
    code = f"import sys, paraflow; paraflow.Trainer; print(*[m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_files_are_rooms_not_houses() -> None:
    lengths = {file.relative_to(PACKAGE): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    lengths = {file.relative_to(PACKAGE): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    long = {file: lines for file, lines in lengths.items() if lines > 400}
    assert not long


def test_every_public_name_is_there() -> None:
    for name in pf.__all__:
        assert getattr(pf, name) is not None
