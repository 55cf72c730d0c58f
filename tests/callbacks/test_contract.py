"""The contract of all callbacks and loggers: a class without a row in `contract.TABLE` fails the first test."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import HOOKS
from paraflow.checkpoint.format import write
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.reading import read
from tests.callbacks.contract import EPOCHS, STEPS_AN_EPOCH, TABLE, Grab, X, Y, equal, fit, make, net, same

callbacks, loggers = pf.callbacks, pf.loggers
_SLOW = ("wandb", "mlflow")


def _row(name: str, *more: Any) -> Any:
    package = TABLE[name].package
    missing = package is not None and importlib.util.find_spec(package) is None
    marks = [pytest.mark.skipif(missing, reason=f"{package} is not installed")]
    return pytest.param(name, *more, marks=[*marks, *([pytest.mark.slow] if name in _SLOW else [])])


rows = pytest.mark.parametrize("name", [_row(name) for name in TABLE])
sizes = pytest.mark.parametrize("size", [1, 2])
# On two ranks each row by itself where a rank could differ; the others run together.
rows_and_sizes = pytest.mark.parametrize(
    ("name", "size"),
    [_row(name, 1) for name in TABLE] + [_row(name, 2) for name, row in TABLE.items() if row.keeps or row.changes],
)


def public(module: Any) -> set[type]:
    return {value for name in module.__all__ if inspect.isclass(value := getattr(module, name))}


def test_every_callback_and_logger_has_a_row() -> None:
    classes = public(callbacks) | public(loggers)
    assert len(classes) > 20
    assert {row.of for row in TABLE.values()} == classes
    assert all(issubclass(row.of, pf.Callback) for row in TABLE.values())


def test_each_has_a_file_of_its_own_of_150_lines_at_most() -> None:
    files: dict[str, str] = {}
    for cls in public(callbacks) | public(loggers):
        path = Path(inspect.getsourcefile(cls) or "")
        text = path.read_text(encoding="utf-8")
        classes = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        assert [name for name in classes if not name.startswith("_")] == [cls.__name__], path.name
        assert len(text.splitlines()) <= 150, path.name
        files[str(path)] = cls.__name__
    assert len(files) == len(public(callbacks) | public(loggers))


def overridden(callback: pf.Callback) -> set[str]:
    """The events a callback has a method of its own for, by its classes' and its own dicts."""
    before_base = type(callback).__mro__[: type(callback).__mro__.index(pf.Callback)]
    return {hook for hook in HOOKS if hook in vars(callback) or any(hook in vars(cls) for cls in before_base)}


@rows
def test_only_events_that_are_overridden_are_called(tmp_path: Path, name: str) -> None:
    callback = make(name, str(tmp_path))
    dispatcher = pf.Trainer(progress=False, callbacks=[callback]).dispatcher
    for hook in HOOKS:
        expected = [getattr(callback, hook)] if hook in overridden(callback) else []
        assert list(dispatcher._methods[hook]) == expected, hook
    in_step = {f"on_{field}": listeners for field, listeners in listeners_of(dispatcher).items()}
    assert {hook for hook, listeners in in_step.items() if listeners} == overridden(callback) & in_step.keys()
    dispatcher.start(0, lambda value: value)
    assert len(dispatcher._step_end) == ("on_step_end" in overridden(callback))


def listeners_of(dispatcher: Any) -> dict[str, Any]:
    return {field: value for field, value in vars(dispatcher.step_hooks()).items() if field != "bytes_held"}


def test_a_plain_callback_adds_nothing_to_any_event() -> None:
    dispatcher = pf.Trainer(progress=False, callbacks=[pf.Callback(), pf.Callback()]).dispatcher
    assert all(not methods for methods in dispatcher._methods.values())
    assert not any(listeners_of(dispatcher).values())
    assert dispatcher.step_hooks().bytes_held() == 0
    dispatcher.start(0, lambda value: value)
    assert dispatcher.due(1) == []


def test_callbacks_come_as_given_then_loggers_then_the_bar(capsys: Any) -> None:
    seen: list[tuple[str, str]] = []

    class Noting(pf.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

    def note(hook: str) -> Any:
        return lambda self, trainer, logs: seen.append((hook, self.name))

    for hook in HOOKS:
        setattr(Noting, hook, note(hook))
    first, second, third = Noting("first"), Noting("second"), Noting("third")
    trainer = pf.Trainer(max_steps=2, callbacks=[second, first], loggers=[third])
    trainer.fit(net(), (X, Y), (X, Y), batch_size=6)
    trainer.predict(net(), X)
    assert len({hook for hook, _ in seen}) == len(HOOKS) - 1  # all but on_exception
    for place in range(0, len(seen), 3):
        hook = seen[place][0]
        assert seen[place : place + 3] == [(hook, "second"), (hook, "first"), (hook, "third")]
    assert trainer.callbacks[:3] == (second, first, third)
    assert [type(callback) for callback in trainer.callbacks[3:]] == [callbacks.ProgressBar]
    assert trainer.dispatcher._methods["on_epoch_end"][-1] == trainer.callbacks[3].on_epoch_end


Lived = Callable[[str, int], list[dict[str, Any]]]


def grabbed(name: str, folder: str) -> tuple[bool, bool]:
    """Whether there is state in the middle of a run, and whether it comes through the disk and another object."""
    mine, grab = make(name, folder), Grab()
    fit(mine, folder, more=(grab,))
    stopped_before = name == "early stopping that stops"
    state = copy.deepcopy(mine.state_dict()) if stopped_before else grab.state[f"{type(mine).__name__}-1"]
    place = Path(folder) / f"state-{pf.rank()}"
    write(place, take_apart(state))
    other = make(name, folder)
    other.load_state_dict(read(place))
    return bool(state), equal(other.state_dict(), state)


@rows_and_sizes
def test_state_comes_back_through_the_disk(lived: Lived, name: str, size: int) -> None:
    assert [found["state"] for found in lived(name, size)] == [(TABLE[name].keeps, True)] * size


@functools.cache
def fresh(name: str | None, world_size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of a whole run with a new object, or without one, and the callbacks' state in its middle."""
    grab = Grab()
    with tempfile.TemporaryDirectory() as folder:
        return fit(None if name is None else make(name, folder), folder, more=(grab,)), grab.state


def resumed(name: str, folder: str) -> dict[str, bool]:
    """Whether a run that is stopped and resumed with a callback ends as one that is not, and as one without it."""
    home = Path(folder)
    (bare, _), (whole, _) = fresh(None, pf.world_size()), fresh(name, pf.world_size())
    fit(make(name, str(home / "parts")), str(home / "parts"), stop=True)
    rest = fit(make(name, str(home / "parts")), str(home / "parts"), resume=True)
    # Statistics of batch normalisation are rank 0's; the other ranks get them with the next forward.
    kept = [key for key in whole if pf.rank() == 0 or "running" not in key]
    alike = all(torch.equal(whole[key], bare[key]) for key in kept)
    return {"as one that was not stopped": same(rest, whole), "as one without it": alike}


@rows_and_sizes
def test_a_resumed_run_is_the_run(lived: Lived, name: str, size: int) -> None:
    for found in [life["resumed"] for life in lived(name, size)]:
        assert found["as one that was not stopped"]
        assert found["as one without it"] or TABLE[name].changes
        assert not (found["as one without it"] and TABLE[name].changes and size == 1), "the row shows nothing"


def fit_twice(name: str, folder: str) -> tuple[bool, bool]:
    used, grab = make(name, folder), Grab()
    fit(used, folder)
    second = fit(used, folder, more=(grab,))
    whole, state = fresh(name, pf.world_size())
    return same(second, whole), TABLE[name].timed or equal(grab.state, state)


@rows_and_sizes
def test_a_second_fit_begins_anew(lived: Lived, name: str, size: int) -> None:
    if name in _SLOW:
        pytest.skip("a second run has an id of its own")
    assert [found["again"] for found in lived(name, size)] == [(True, True)] * size


def life(name: str, folder: str) -> dict[str, Any]:
    """What the three tests above ask for, in one call of the ranks."""
    home = Path(folder)
    for part in ("state", "resumed", "again"):
        (home / part).mkdir(exist_ok=True)
    state, rest = grabbed(name, str(home / "state")), resumed(name, str(home / "resumed"))
    return {"state": state, "resumed": rest, "again": name in _SLOW or fit_twice(name, str(home / "again"))}


@pytest.fixture(scope="module")
def lived(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """`lived(name, size)`: what comes of a callback on each of so many ranks, once."""

    @functools.cache
    def of(name: str, size: int) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = ranks(size, life, name, str(tmp_path_factory.mktemp("life")))
        return outcomes

    return of


class Break(pf.Callback):
    """Raises at an event of the second epoch, or when the run begins."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._raise)

    def _raise(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == 0 or trainer.step > STEPS_AN_EPOCH:
            raise ZeroDivisionError("broken on purpose")


def left_behind(name: str, folder: str, event: str) -> dict[str, Any]:
    """What an exception leaves behind: files, threads, modes and hooks, and the weights."""
    mine, model = make(name, folder), net()
    threads = set(threading.enumerate())
    breaking = Break(event)
    first, last = ([breaking], []) if event == "on_train_begin" else ([], [breaking])
    listed = [*first, *([] if isinstance(mine, loggers.Logger) else [mine]), *last]
    logging = [mine] if isinstance(mine, loggers.Logger) else []
    trainer = pf.Trainer(max_epochs=EPOCHS, progress=False, clip_norm=1.0, callbacks=listed, loggers=logging)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer.fit(model, (X, Y), (X, Y), batch_size=6)
    weights = copy.deepcopy(model.state_dict())
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # one that ends by itself
    again = fit(mine, folder)
    open_files = [target for target in map(_target, Path("/proc/self/fd").iterdir()) if target.startswith(folder)]
    return {
        # A package's own files and threads serve the runs to come.
        "files": open_files if TABLE[name].package is None else [],
        "threads": [
            thread.name
            for thread in set(threading.enumerate()) - threads
            if TABLE[name].package is None or thread.name.startswith("paraflow")
        ],
        "modes": [part for part, module in model.named_modules() if not module.training],
        "hooks": [
            part
            for part, module in model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        ],
        "profiling": torch._C._autograd._profiler_enabled(),
        "gradients off": not torch.is_grad_enabled(),
        "weights": weights,
        "the next fit is as the first": same(again, fresh(name, 1)[0]),
    }


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # the listing's own
        return ""


@functools.cache
def broken_without(event: str) -> dict[str, torch.Tensor]:
    return left_behind("plain", "", event)["weights"]


@rows
@pytest.mark.parametrize("event", ["on_train_begin", "on_validation_begin"])
def test_an_exception_leaves_nothing_behind(tmp_path: Path, name: str, event: str) -> None:
    """Also where the run breaks before the callback was told that it begins."""
    clean = {"files": [], "threads": [], "modes": [], "hooks": [], "profiling": False, "gradients off": False}
    without = broken_without(event)
    found = left_behind(name, str(tmp_path / "mine"), event)
    weights = found.pop("weights")
    assert found == {**clean, "the next fit is as the first": True}
    assert TABLE[name].changes or same(weights, without)


def on_two_ranks(folder: str, event: str) -> dict[str, Any]:
    """As `left_behind`, of all that change nothing at once; every rank breaks."""
    together = [
        make(name, f"{folder}/{name}") for name in TABLE if not TABLE[name].changes and TABLE[name].package is None
    ]
    listed = [callback for callback in together if not isinstance(callback, loggers.Logger)]
    logging = [callback for callback in together if isinstance(callback, loggers.Logger)]
    threads, model = set(threading.enumerate()), net()
    trainer = pf.Trainer(
        max_epochs=EPOCHS, progress=False, clip_norm=1.0, callbacks=[*listed, Break(event)], loggers=logging
    )
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer.fit(model, (X, Y), (X, Y), batch_size=6)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
    return {
        "files": [target for target in map(_target, Path("/proc/self/fd").iterdir()) if target.startswith(folder)],
        "threads": [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("paraflow")],
        "modes": [part for part, module in model.named_modules() if not module.training],
    }


def test_an_exception_leaves_nothing_behind_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    clean: dict[str, Any] = {"files": [], "threads": [], "modes": []}
    assert ranks(2, on_two_ranks, str(tmp_path), "on_step_end") == [clean, clean]


def together_on_a_rank(folder: str) -> tuple[bool, bool]:
    """All that change nothing, in one run: whole, and stopped and resumed."""
    home, names = Path(folder), [name for name in TABLE if not TABLE[name].changes and TABLE[name].package is None]

    def run(part: str, **how: Any) -> dict[str, torch.Tensor]:
        made = tuple(make(name, str(home / part / name)) for name in names)
        return fit(None, str(home / part), more=made, **how)

    whole, bare = run("whole"), fit(None, str(home / "bare"))
    run("parts", stop=True)
    parameters = [key for key in whole if pf.rank() == 0 or "running" not in key]
    return same(run("parts", resume=True), whole), all(torch.equal(whole[key], bare[key]) for key in parameters)


@sizes
def test_all_that_change_nothing_together(ranks: Any, tmp_path: Path, size: int) -> None:
    assert ranks(size, together_on_a_rank, str(tmp_path)) == [(True, True)] * size
