from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.loggers.mlflow import MLflowLogger
from tests.callbacks.runs import linear, samples
from tests.loggers.reading import mlflow_runs, read_mlflow

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def _logger(folder: Path, **more: Any) -> MLflowLogger:
    return MLflowLogger(tracking_uri=f"file:{folder / 'mlruns'}", **more)


def _fit(logger: MLflowLogger, folder: Path, epochs: int, callbacks: Any = (), **more: Any) -> None:
    saving = Checkpoint(folder / "saved", "1ep", keep=9)
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[*callbacks, saving], loggers=[logger], progress=False)
    trainer.fit(linear(), samples(8), batch_size=4, **more)


def test_experiment_name_and_params_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by variable")
    _fit(_logger(tmp_path, run_name="first", params={"note": 7, "model": {"width": 64}}), tmp_path, 1)
    _fit(_logger(tmp_path, experiment="said"), tmp_path, 1)
    first, second = mlflow_runs(tmp_path)
    assert first.info.run_name == "first"
    assert first.info.experiment_id != second.info.experiment_id
    expected = {"note": "7", "model.width": "64", "plan.dp": "1", "plan.precision": "fp32", "seed": "0"}
    assert expected.items() <= first.data.params.items()
    assert first.data.params["versions.paraflow"] == pf.__version__


def test_a_resumed_run_goes_on_with_the_run_and_sends_nothing_twice(tmp_path: Path) -> None:
    first = _logger(tmp_path, every=1)
    _fit(first, tmp_path, 2)
    before = read_mlflow(tmp_path).series
    second = _logger(tmp_path, every=1)
    _fit(second, tmp_path, 3, resume=tmp_path / "saved" / "step-00000002")
    assert second.run_id == first.run_id
    (run,) = mlflow_runs(tmp_path)
    assert run.data.tags["paraflow.resumed_at_step"] == "2"
    assert run.data.tags["paraflow.resumed_plan"] == "one device"
    after = read_mlflow(tmp_path).series  # refuses a step that is there twice
    assert sorted(after["loss"]) == [1, 2, 3, 4, 5, 6]
    assert {step: after["loss"][step] for step in (1, 2, 3, 4)} == before["loss"]
    _fit(second, tmp_path, 1)
    assert second.run_id != first.run_id


def test_a_run_that_is_gone_is_begun_anew_with_a_warning(tmp_path: Path) -> None:
    _fit(_logger(tmp_path), tmp_path, 1)
    with pytest.warns(UserWarning, match="MLflow has no run '.*' to go on with"):
        _fit(_logger(tmp_path / "elsewhere"), tmp_path, 2, resume=tmp_path / "saved")
    assert len(mlflow_runs(tmp_path / "elsewhere")) == 1


def test_a_name_that_mlflow_refuses_is_written_with_underscores(tmp_path: Path) -> None:
    name = LambdaCallback(on_epoch_end=lambda trainer, logs: logs.update({"top@5 (all)": 0.25}))
    _fit(_logger(tmp_path), tmp_path, 1, [name])
    assert read_mlflow(tmp_path).series["epoch_top_5 _all_"] == {2: 0.25}


def test_an_outage_warns_once_and_its_numbers_are_sent_later(tmp_path: Path) -> None:
    store, away = tmp_path / "mlruns", tmp_path / "away"

    def go_and_come_back(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == 1:
            store.rename(away)
            store.write_text("no store here")
        if trainer.step == 3:
            store.unlink()
            away.rename(store)

    outage = LambdaCallback(on_step_begin=go_and_come_back)
    with pytest.warns(UserWarning, match="MLflow does not take the numbers of step 2, and training goes on") as said:
        _fit(_logger(tmp_path, every=1), tmp_path, 2, [outage])
    assert sum("MLflow" in str(warning.message) for warning in said) == 1
    log = read_mlflow(tmp_path)
    assert sorted(log.series["loss"]) == [1, 2, 3, 4]
    assert sorted(log.series["epoch_loss"]) == [2, 4]
    assert log.status == "finished"


def test_a_store_that_is_refused_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParaflowError, match=r"MLflow could not begin a run: .*Give MLflowLogger the tracking_uri"):
        _fit(MLflowLogger(tracking_uri="nonsense://host"), tmp_path, 1)


def test_a_database_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    logger = MLflowLogger("tests", tracking_uri=uri, every=1)
    _fit(logger, tmp_path, 1)
    assert logger.run_id is not None
    history = MlflowClient(uri).get_metric_history(logger.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2]
    assert MlflowClient(uri).get_run(logger.run_id).info.status == "FINISHED"
