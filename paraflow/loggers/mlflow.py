"""Writes numbers to MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Event, Logger
from paraflow.loggers.support import configuration, require_package, status_of

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # what MLflow takes in one request


class MLflowLogger(Logger):
    """Logs to a run of MLflow, with plan, seed and versions as its params.

    `Logger` says how numbers are named; characters that MLflow refuses in a name become ``_``. A resumed run goes on
    with the same run, by the id that the checkpoint holds. MLflow cannot take back what it has, so numbers of steps
    that it has already are not sent again (a resumed run would give the same), and the plan of a resumed run is a tag.

    A failure before the first step ends the run. Later ones warn, once for each outage, and training goes on: what was
    not taken is sent with the next numbers, up to 1000 of them. How long MLflow itself tries is set by
    MLFLOW_HTTP_REQUEST_MAX_RETRIES and MLFLOW_HTTP_REQUEST_TIMEOUT.

    Args:
        experiment: The experiment, made if it is not there; by default as MLFLOW_EXPERIMENT_NAME says, or ``Default``.
        run_name: The name of the run.
        tracking_uri: The server or database; by default as MLflow is set (MLFLOW_TRACKING_URI). A database needs
            sqlalchemy and alembic, which mlflow has and mlflow-skinny has not.
        every: How often a step is logged; None for epochs and validation only.
        params: Joined to the run's params.

    Attributes:
        run_id: The id of the run, on rank 0 once it has begun.

    Raises:
        ParaflowError: mlflow is not installed; or from `fit`: the run cannot begin.
    """

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        every: Interval | str | int | None = 50,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        require_package("mlflow", "MLflowLogger", "mlflow")
        super().__init__(every)
        self.experiment = experiment
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.run_id: str | None = None
        self._params = dict(params or {})
        self._resumed_id: str | None = None

    def begin(self, trainer: Trainer) -> None:
        """Begins the run, or goes on with it after a resume."""
        resumed_id, self._resumed_id = self._resumed_id if trainer.step else None, None
        self.run_id, self._waiting, self._known = None, list[Any](), dict[str, int]()
        self._entities = import_module("mlflow.entities")
        try:
            self._client = import_module("mlflow.tracking").MlflowClient(self.tracking_uri)
            if resumed_id is None or not self._go_on(resumed_id, trainer):
                self._create({**configuration(trainer), **self._params})
        except Exception as error:
            raise ParaflowError(
                f"MLflow could not begin a run: {error} Give MLflowLogger the tracking_uri of a server "
                "('http://host:5000'), or pip install mlflow and give that of a database ('sqlite:///mlflow.db')."
            ) from error

    def _go_on(self, run_id: str, trainer: Trainer) -> bool:
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            self.warn_once("run", f"MLflow has no run {run_id!r} to go on with; a new one is begun.")
            return False
        self.run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._client.set_tag(run_id, "paraflow.resumed_at_step", str(trainer.step))
        self._client.set_tag(run_id, "paraflow.resumed_plan", str(trainer.plan))
        for key in run.data.metrics:
            self._known[key] = max(metric.step for metric in self._client.get_metric_history(run_id, key))
        return True

    def _create(self, values: Mapping[str, Any]) -> None:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self.run_id = self._client.create_run(experiment, run_name=self.run_name).info.run_id
        params = [self._entities.Param(_key(key), str(value)) for key, value in _flat(values).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + _MOST_PARAMS])

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Sends the numbers, with those that wait."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_key(name), value, now, step) for name, value in numbers.items()]
        self._waiting += [metric for metric in metrics if step > self._known.get(metric.key, -1)]
        self._waiting = self._waiting[-_MOST_METRICS:]
        if not self._waiting:
            return
        try:
            self._client.log_batch(self.run_id, metrics=self._waiting)
        except Exception as error:
            self.warn_once("MLflow", f"MLflow does not take the numbers of step {step}, and training goes on: {error}")
        else:
            self._waiting = []
            self._warned.discard("MLflow")

    def end(self, step: int, error: BaseException | None) -> None:
        """Ends the run."""
        try:
            if self._waiting:
                self._client.log_batch(self.run_id, metrics=self._waiting)
            self._client.set_terminated(self.run_id, _STATUS[status_of(error)])
        except Exception as failure:
            self.warn_once("end", f"MLflow lacks the last {len(self._waiting)} numbers or the run's end: {failure}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the id of the run."""
        return {"run_id": self.run_id or self._resumed_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the id of the run to go on with."""
        self._resumed_id = state["run_id"]


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
