from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from paraflow.errors import ParaflowError
from paraflow.history import History


def history() -> History:
    made = History()
    made.add(0, {"loss": 2.0, "lr": 0.1})
    made.add(1, {"loss": 1.0, "lr": 0.1, "val_loss": 1.5})
    made.add(2, {"loss": 0.5, "val_loss": 1.25})
    return made


def same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )


def test_one_list_a_metric_one_entry_an_epoch() -> None:
    made = history()
    assert made.epoch == [0, 1, 2]
    assert len(made) == 3
    assert list(made) == ["loss", "lr", "val_loss"]
    assert made["loss"] == made.history["loss"] == [2.0, 1.0, 0.5]
    assert same(made["lr"], [0.1, 0.1, math.nan])
    assert same(made["val_loss"], [math.nan, 1.5, 1.25])
    assert "val_loss" in made
    assert "accuracy" not in made


def test_what_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"'acc' was not measured; there is loss, lr, val_loss"):
        history()["acc"]
    with pytest.raises(KeyError, match=r"nothing yet"):
        History()["loss"]


def test_state_is_plain_data_and_goes_on() -> None:
    made, resumed = history(), History()
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict(3))))
    resumed.add(3, {"loss": 0.25})
    assert resumed["loss"] == [2.0, 1.0, 0.5, 0.25]
    assert resumed.epoch == [0, 1, 2, 3]
    assert made["loss"] == [2.0, 1.0, 0.5]


def test_an_epoch_that_is_cut_short_is_not_saved() -> None:
    resumed = History()
    resumed.load_state_dict(history().state_dict(2))
    assert resumed.epoch == [0, 1]
    assert resumed["loss"] == [2.0, 1.0]
    assert same(resumed["val_loss"], [math.nan, 1.5])
    assert len(History().state_dict(0)["epoch"]) == 0


def test_table_has_a_row_an_epoch() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(history().table("run"))
    lines = [line.split() for line in out.getvalue().splitlines()]
    cells = [[cell for cell in line if cell not in "│┃"] for line in lines]
    assert ["epoch", "loss", "lr", "val_loss"] in cells
    assert ["1", "2", "0.1", "–"] in cells
    assert ["3", "0.5", "–", "1.25"] in cells


def test_plot_is_a_picture(tmp_path: Path) -> None:
    path = history().plot(tmp_path / "new" / "curve.png")
    assert path == tmp_path / "new" / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ParaflowError, match="no epoch to plot"):
        History().plot(tmp_path / "empty.png")
