from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback, ProgressBar
from paraflow.checkpoint import saved_in
from paraflow.loggers import CSVLogger
from tests.callbacks.runs import linear, samples
from tests.callbacks.test_csv import rows_of
from tests.pool import Pool

LINE = re.compile(r"^epoch (\d)/3  loss ([\d.e-]+)  lr 0\.1  val_loss ([\d.e-]+)  2 steps, \d+\.\d s$")


def epoch_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("epoch")]


def check_lines(text: str, losses: list[float]) -> None:
    matches = [LINE.match(line) for line in epoch_lines(text)]
    assert all(matches), text
    assert [int(match[1]) for match in matches if match] == [1, 2, 3]
    assert [float(match[2]) for match in matches if match] == pytest.approx(losses, rel=1e-3)


def test_off_a_terminal_an_epoch_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    history = pf.Trainer(max_epochs=3).fit(linear(), samples(8), samples(4), batch_size=4)
    out = capsys.readouterr().out
    check_lines(out, history["loss"])
    assert "\x1b" not in out


def test_without_progress_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    pf.Trainer(max_epochs=2, progress=False).fit(linear(), samples(8), samples(4), batch_size=4)
    assert capfd.readouterr() == ("", "")


def test_a_bar_of_ones_own_replaces_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    pf.Trainer(max_epochs=3, callbacks=[ProgressBar(every=1)]).fit(linear(), samples(8), batch_size=4)
    assert len(epoch_lines(capsys.readouterr().out)) == 3


def test_without_a_number_of_epochs_the_line_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    pf.Trainer(max_steps=3).fit(linear(), samples(8), batch_size=4)
    lines = epoch_lines(capsys.readouterr().out)
    assert [line.split("  ")[0] for line in lines] == ["epoch 1", "epoch 2"]
    assert [re.findall(r"(\d+) step", line) for line in lines] == [["2"], ["1"]]


def on_terminal(*callbacks: pf.Callback) -> tuple[pf.Trainer, io.StringIO]:
    out = io.StringIO()
    trainer = pf.Trainer(max_epochs=2, callbacks=[*callbacks, ProgressBar(every=1)])
    trainer.console = Console(file=out, force_terminal=True, width=120)
    return trainer, out


def test_on_a_terminal_there_is_a_bar_and_its_lines_stay() -> None:
    trainer, out = on_terminal()
    trainer.fit(linear(), samples(8), batch_size=4)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "2/2" in plain
    assert len([line for line in plain.splitlines() if re.match(r"\s*epoch \d/2  loss .* 2 steps", line)]) == 2


def test_after_an_exception_the_terminal_has_its_cursor_again() -> None:
    def fail(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        raise RuntimeError("broken")

    trainer, out = on_terminal(LambdaCallback(on_step_end=fail))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(linear(), samples(8), batch_size=4)
    hidden, shown = (out.getvalue().rfind(f"\x1b[?25{mark}") for mark in "lh")
    assert 0 <= hidden < shown


def _run_on_ranks(folder: str) -> tuple[str, list[float], Any]:
    checkpoint = Checkpoint(Path(folder) / "saved", "1ep", monitor="val_loss", keep=1)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        trainer = pf.Trainer(
            max_epochs=3, callbacks=[checkpoint], loggers=[CSVLogger(Path(folder) / "log.csv", every=1)]
        )
        history = trainer.fit(linear(), samples(7), samples(5), batch_size=4)
    return out.getvalue(), history["loss"], (checkpoint.best, checkpoint.best_step)


def test_rank_0_prints_and_writes_and_all_agree(ranks: Pool, tmp_path: Path) -> None:
    (out, losses, best), (silent, same_losses, same_best) = ranks(2, _run_on_ranks, str(tmp_path))
    assert silent == ""
    assert losses == same_losses
    assert best == same_best
    check_lines(out, losses)
    rows = rows_of(tmp_path / "log.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert [float(row["epoch_loss"]) for row in rows if row["epoch_loss"]] == losses
    alone = pf.Trainer(max_epochs=3, progress=False).fit(linear(), samples(7), samples(5), batch_size=4)
    assert losses == pytest.approx(alone["loss"], rel=1e-5)
    assert best == (pytest.approx(min(alone["val_loss"]), rel=1e-5), 6)
    assert [path.name for path in saved_in(tmp_path / "saved")] == ["step-00000006"]
