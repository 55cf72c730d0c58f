from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.loggers.wandb import WandbLogger
from tests.callbacks.runs import linear, samples
from tests.loggers.reading import read_wandb, wandb_files, wandb_records

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def _fit(logger: WandbLogger, folder: Path, epochs: int, **more: Any) -> None:
    saving = Checkpoint(folder / "saved", "1ep", keep=9)
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[saving], loggers=[logger], progress=False)
    trainer.fit(linear(), samples(8), batch_size=4, **more)


def _runs(folder: Path) -> list[Any]:
    return [
        record.run
        for file in wandb_files(folder)
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "run"
    ]


def test_name_project_config_and_further_arguments_reach_the_run(tmp_path: Path) -> None:
    logger = WandbLogger(
        "things", "first", folder=tmp_path / "new", mode="offline", config={"note": 7, "seed": "mine"}, group="some"
    )
    _fit(logger, tmp_path, 1)
    run = _runs(tmp_path / "new")[0]
    assert (run.project, run.display_name, run.run_group, run.run_id) == ("things", "first", "some", logger.run_id)
    config: dict[str, Any] = {}
    for record in wandb_records(wandb_files(tmp_path / "new")[0]):
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    assert (config["note"], config["seed"]) == (7, "mine")
    assert config["versions"]["paraflow"] == pf.__version__
    assert config["plan"]["precision"] == "fp32"


def test_a_resumed_run_has_the_id_of_the_checkpoint_and_a_new_one_its_own(tmp_path: Path) -> None:
    first = WandbLogger("things", folder=tmp_path, mode="offline")
    _fit(first, tmp_path, 1)
    second = WandbLogger("things", folder=tmp_path, mode="offline")
    _fit(second, tmp_path, 2, resume=tmp_path / "saved")
    assert first.run_id is not None
    assert second.run_id == first.run_id
    _fit(second, tmp_path, 1)
    assert second.run_id not in (None, first.run_id)
    assert {run.run_id for run in _runs(tmp_path)} == {first.run_id, second.run_id}


def test_a_run_of_ones_own_is_used_and_left_open(tmp_path: Path) -> None:
    run = wandb.init(project="own", dir=str(tmp_path), mode="offline")
    try:
        logger = WandbLogger("other")
        pf.Trainer(max_epochs=1, loggers=[logger], progress=False).fit(linear(), samples(8), batch_size=4)
        assert logger.run_id == run.id
        assert wandb.run is run
        run.log({"mine": 1.0}, step=10)
    finally:
        run.finish()
    series = read_wandb(tmp_path).series
    assert set(series["epoch_loss"]) == {2}
    assert series["mine"] == {10: 1.0}


def test_steps_that_the_run_has_are_not_sent_again(tmp_path: Path) -> None:
    run = wandb.init(project="own", dir=str(tmp_path), mode="offline")
    try:
        run.log({"loss": -1.0}, step=3, commit=True)  # W&B goes on with step 4
        pf.Trainer(max_steps=6, loggers=[WandbLogger(every=1)], progress=False).fit(linear(), samples(24), batch_size=4)
    finally:
        run.finish()
    losses = read_wandb(tmp_path).series["loss"]
    assert sorted(losses) == [3, 4, 5, 6]
    assert losses[3] == -1.0


def test_a_run_that_breaks_off_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    run = wandb.init(project="own", dir=str(tmp_path), mode="offline")
    finish = LambdaCallback(on_step_begin=lambda trainer, logs: trainer.step == 2 and run.finish())
    trainer = pf.Trainer(max_steps=5, callbacks=[finish], loggers=[WandbLogger(every=1)], progress=False)
    with pytest.warns(UserWarning, match="W&B does not take the numbers of step 3, and training goes on") as said:
        trainer.fit(linear(), samples(20), batch_size=4)
    assert sum("W&B" in str(warning.message) for warning in said) == 1
    assert trainer.step == 5


def test_what_cannot_begin_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParaflowError, match=r"WandbLogger cannot write '.*file': File exists"):
        _fit(WandbLogger(folder=tmp_path / "file", mode="offline"), tmp_path, 1)
    with pytest.raises(ParaflowError, match=r"W&B could not begin a run: .*mode='offline'"):
        _fit(WandbLogger(folder=tmp_path, mode="offline", no_such_argument=1), tmp_path, 1)
