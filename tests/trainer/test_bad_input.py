"""Bad input is a sentence: what was given, what was expected, what to write; before training where it can be."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf

X, Y = torch.randn(8, 3), torch.zeros(8).long()


def net(**recipe: Any) -> torch.nn.Module:
    return pf.configure(torch.nn.Linear(3, 2), **{"loss": "cross_entropy", **recipe})


def fit(model: Any = None, data: Any = (X, Y), batch_size: int | None = None, **options: Any) -> pf.History:
    return pf.Trainer(progress=False, **options).fit(model or net(), data, batch_size=batch_size)


class NoStep(pf.Callback):
    """Fails a test in which a step begins."""

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        raise AssertionError("training started")


class Bare(pf.Model):
    """Returns what it is told to as its loss."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.returned = returned

    def training_step(self, batch: Any) -> Any:
        return self.returned(self.weight)


BEFORE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty arrays": ({"data": (X[:0], Y[:0])}, pf.DataError, "no sample"),
    "empty list": ({"data": []}, pf.DataError, "empty"),
    "empty loader": (
        {
            "data": torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(X[:2], Y[:2]), batch_size=4, drop_last=True
            )
        },
        pf.DataError,
        "drop_last",
    ),
    "no data": ({"data": None}, pf.DataError, "give arrays"),
    "a number": ({"data": 3}, pf.DataError, "int"),
    "ragged": ({"data": (X, Y[:5])}, pf.DataError, r"\(8, 3\), \(5,\)"),
    "batch of zero": ({"batch_size": 0}, pf.DataError, "at least 1"),
    "unknown field": ({"plan": {"dpp": 2}}, pf.PlanError, "dpp"),
    "degree and world": ({"dp": 2}, pf.PlanError, r"\[degrees-fill-world\].*for 2 ranks, and the world has 1.*dp=1"),
    "no such strategy": ({"fsdp": 1, "cp": 3}, pf.PlanError, r"\[strategy-missing\].*cp"),
    "accumulate over the batch": (
        {"batch_size": 2, "accumulate": 3},
        pf.PlanError,
        r"\[batch-covers-micro-batches\].*accumulate=2 or less",
    ),
    "accumulate of nothing": ({"accumulate": 0}, pf.PlanError, "accumulate must be a whole number of at least 1"),
    "precision": ({"precision": "fp8"}, pf.PlanError, "'fp32', 'bf16', 'fp16'"),
    "clip": ({"clip_norm": -1.0}, pf.PlanError, "above 0"),
    "auto": ({"auto": "O7"}, pf.PlanError, "'O1'"),
    "plugin class": ({"plugins": [pf.plugins.DataParallel]}, pf.PlanError, r"DataParallel\(\.\.\.\)"),
    "callback class": ({"callbacks": [pf.callbacks.ProgressBar]}, TypeError, r"ProgressBar\(\.\.\.\)"),
    "interval": ({"val_every": "often"}, ValueError, "10ep"),
    "no epochs": ({"max_epochs": 0}, ValueError, "max_epochs"),
    "device": ({"device": "abacus"}, pf.PlanError, "'cpu'"),
    "nothing to train": ({"model": net().requires_grad_(False)}, pf.ModelError, "nothing to train"),
    "unknown optimizer": ({"model": net(optimizer="adamm")}, pf.ModelError, "adam"),
    "unknown schedule": ({"model": net(schedule="cosin")}, pf.ModelError, "cosine"),
    "unknown metric": ({"model": net(metrics=["acuracy"])}, pf.ModelError, "accuracy"),
    "no fused": (
        {"model": net(optimizer="rmsprop"), "optimizer_implementation": "fused"},
        pf.PlanError,
        r"\[optimizer-implementation\] RMSprop",
    ),
    "resume of nothing": ({}, pf.CheckpointError, "nowhere"),
    "no module": ({"model": object()}, pf.ModelError, "nn.Module"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_refused_before_training(case: str) -> None:
    given, error, sentence = dict(BEFORE[case][0]), BEFORE[case][1], BEFORE[case][2]
    with pytest.raises(error, match=sentence):
        _run(case, given)


def _run(case: str, given: dict[str, Any]) -> None:
    if case == "unknown field":
        pf.Plan.from_dict(given["plan"])
    elif case == "resume of nothing":
        pf.Trainer(progress=False, callbacks=[NoStep()]).fit(net(), (X, Y), resume="nowhere")
    else:
        given.setdefault("callbacks", [NoStep()])
        fit(**given)


FIRST_STEP: dict[str, tuple[Any, type[Exception], str]] = {
    "no scalar": (lambda w: w * torch.ones(4), pf.ModelError, r"shape \(4,\)"),
    "no loss": (lambda w: None, pf.ModelError, "NoneType"),
    "a dict without it": (lambda w: {"los": w}, pf.ModelError, "'los'"),
    "detached": (lambda w: w.detach(), pf.ModelError, "does not depend on any parameter"),
    "weight below 0": (lambda w: {"loss": w, "weight": -1}, pf.ModelError, "0 or more"),
    "a string beside": (lambda w: {"loss": w, "note": "x"}, pf.ModelError, "'note'"),
}


@pytest.mark.parametrize("case", FIRST_STEP)
def test_refused_in_the_first_step(case: str) -> None:
    returned, error, sentence = FIRST_STEP[case]
    with pytest.raises(error, match=sentence):
        fit(Bare(returned))


def test_a_script_ends_with_the_sentence_and_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, paraflow as pf\npf.Trainer(dp=2).fit(torch.nn.Linear(1, 1), torch.ones(4, 1))\n")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("paraflow.errors.PlanError: [degrees-fill-world] The plan (dp=2)")
    assert result.stdout == ""


def test_no_loss_said() -> None:
    with pytest.raises(pf.ModelError, match=r"Linear has no loss.*configure\(loss="):
        fit(torch.nn.Linear(3, 2), data=X)


def test_no_target() -> None:
    with pytest.raises(pf.ModelError, match=r"a Tensor.*has no target"):
        fit(data=X)


def test_masked_class_targets_are_refused_not_averaged_wrongly() -> None:
    """A mean over the unmasked, weighted by all, would be biased; torch refuses the class instead."""
    with pytest.raises(IndexError, match="-100"):
        fit(data=(X, torch.tensor([0, -100] * 4)))


def test_regression_against_another_shape_is_aligned_or_refused() -> None:
    target = torch.randn(8)
    model = pf.configure(torch.nn.Linear(3, 1), loss=torch.nn.MSELoss())
    expected = torch.nn.functional.mse_loss(model(X).squeeze(1), target).item()
    assert pf.Trainer(progress=False).evaluate(model, (X, target))["loss"] == pytest.approx(expected)
    with pytest.raises(pf.ModelError, match=r"\(8, 2\).*\(8,\)"):
        fit(net(loss=torch.nn.MSELoss()), data=(X, target))


def test_an_iterator_can_be_read_once() -> None:
    with pytest.raises(pf.DataError, match="read only once"):
        fit(data=iter([(X, Y)]), max_epochs=2)


def refused_on_a_rank() -> str:
    import torch.distributed as dist

    with pytest.raises(pf.PlanError) as caught:
        fit(batch_size=1)
    return f"{caught.value} {dist.is_initialized()}"


def test_a_batch_smaller_than_the_ranks_is_refused_before_any_process_group(ranks: Any) -> None:
    for message in ranks(2, refused_on_a_rank):
        assert "[batch-covers-ranks] A batch of 1 cannot be divided over 2 data ranks" in message
        assert "batch_size=2 or more" in message
        assert message.endswith("False")


def degree_on_a_rank() -> str:
    with pytest.raises(pf.PlanError) as caught:
        fit(dp=2)
    return str(caught.value.rule)


def test_a_degree_that_does_not_fill_the_world(ranks: Any) -> None:
    assert ranks(3, degree_on_a_rank) == ["degrees-fill-world"] * 3


def unused_parameter() -> str:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with pytest.raises(pf.ModelError) as caught:
        fit(pf.configure(Two(), loss="cross_entropy"))
    fit(pf.configure(Two(), loss="cross_entropy"), plugins=[pf.plugins.DataParallel(find_unused_parameters=True)])
    return str(caught.value)


def test_unused_parameters_are_named(ranks: Any) -> None:
    for message in ranks(2, unused_parameter):
        assert "spare.weight, spare.bias" in message
        assert "find_unused_parameters=True" in message


SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "stall_timeout in epochs": ({"stall_timeout": "10ep"}, ValueError, "'10ep' is no time; write a time such as '30s'"),
    "stall_timeout in words": ({"stall_timeout": "soon"}, ValueError, "'soon' is no interval.*10ep"),
    "val_every of zero": ({"val_every": 0}, ValueError, "0 is no interval"),
    "a signal nobody can hear": ({"preempt_signal": "SIGKILL"}, ValueError, "SIGKILL"),
    "no signal": ({"preempt_signal": "NOSUCH"}, ValueError, "NOSUCH"),
    "overfit on nothing": ({"overfit": 0}, pf.DataError, "overfit must be a whole number of batches.*not 0"),
    "overfit on yes": ({"overfit": True}, pf.DataError, "overfit must be a whole number of batches.*not True"),
    "debug below zero": ({"debug": -1}, ValueError, "debug must be True, or a whole number of steps.*not -1"),
    "debug of zero": ({"debug": 0}, ValueError, "debug must be True, or a whole number of steps.*not 0"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_another_kind_are_refused_before_training(case: str) -> None:
    given, error, sentence = SETTINGS[case]
    with pytest.raises(error, match=sentence):
        fit(callbacks=[NoStep()], **given)


@pytest.mark.parametrize("every", ["often", "10 parsecs", "-3st", "0ep", 0, -1, 2.5, True, None, ""])
def test_an_interval_that_does_not_parse(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ValueError, match=r'is no interval; write 500 or "500st" for steps, "10ep" for epochs'):
        pf.callbacks.Checkpoint(tmp_path, every)


def test_a_monitor_that_nothing_produces_is_told_what_is_produced(tmp_path: Path) -> None:
    for watching in (
        pf.callbacks.Checkpoint(tmp_path, monitor="val_acc"),
        pf.callbacks.EarlyStopping("val_acc"),
    ):
        trainer = pf.Trainer(max_epochs=3, progress=False, callbacks=[watching])
        with pytest.raises(pf.ParaflowError, match=r"Nothing measures 'val_acc'; there is .*loss.*val_loss"):
            trainer.fit(net(), (X, Y), (X, Y))
        assert trainer.epoch == 1, "it is told as soon as it can be known"


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "x" * 300])
def test_a_resume_path_that_does_not_exist_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(pf.CheckpointError, match=r"does not exist|cannot be read"):
        pf.Trainer(progress=False, callbacks=[NoStep()]).fit(net(), (X, Y), resume=tmp_path / path)


def test_a_resume_path_that_is_a_file_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, sentence in (("file", "is no folder"), ("empty", "has no checkpoint in it")):
        with pytest.raises(pf.CheckpointError, match=f"{name}' {sentence}; give a folder that"):
            pf.Trainer(progress=False, callbacks=[NoStep()]).fit(net(), (X, Y), resume=tmp_path / name)


def unwritable(folder: str, on_error: Any) -> tuple[str, int]:
    saving = pf.callbacks.Checkpoint(Path(folder) / "file" / "runs", on_error=on_error)
    trainer = pf.Trainer(progress=False, callbacks=[saving])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(net(), (X, Y), batch_size=4)
        except pf.CheckpointError as error:
            return str(error), trainer.step
    return "; ".join(str(warning.message) for warning in caught), trainer.step


@pytest.mark.parametrize("size", [1, 2])
def test_a_place_that_cannot_be_written_is_told_before_the_first_step(ranks: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").touch()
    for said, step in ranks(size, unwritable, str(tmp_path), "raise"):
        assert said == f"No checkpoint can be written to {str(tmp_path / 'file' / 'runs')!r}: Not a directory."
        assert step == 0


@pytest.mark.parametrize("size", [1, 2])
def test_by_flag_training_goes_on_without_checkpoints(ranks: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").touch()
    (said, step), *others = ranks(size, unwritable, str(tmp_path), "continue")
    assert step == 2
    assert said.count("Training goes on.") == 2, "when it begins, and when it would have saved"
    assert others == [("", 2)] * (size - 1)


class Dying(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 0 and torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return X[index], Y[index]


def test_a_worker_that_dies_is_told() -> None:
    loader = torch.utils.data.DataLoader(Dying(), batch_size=2, num_workers=1)
    with pytest.raises(
        pf.DataError, match=r"A worker process that reads the training data died, after 0 samples of epoch 1"
    ):
        fit(data=loader)


def test_a_loss_that_is_not_finite_is_warned_of_at_the_epochs_end() -> None:
    with pytest.warns(UserWarning, match="The loss of the epoch is nan; NaNGuard finds where it begins"):
        fit(Bare(lambda w: w * float("nan")))


@pytest.mark.parametrize("metric", ["accuracy", "f1", "mse"])
def test_a_metric_on_another_shape_names_it_and_the_shapes(metric: str) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Two()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()

    pf.configure(model, loss=loss, metrics=[metric])
    with pytest.raises(pf.ModelError, match=rf"metric '{metric}' cannot compare .*\(8, 2\).*\(8, 2, 4\)"):
        fit(model, data=(X, torch.zeros(8, 2, 4).long()))
