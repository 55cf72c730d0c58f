"""One Trainer, many uses: other models, unfreezing, other losses, evaluation in the middle of a fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1] * 8)


class Norms(pf.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.norms.append(float(trainer.engine.module[0].weight.grad.norm()))

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.rates.append(logs["lr"])


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return pf.configure(net, optimizer="sgd", lr=0.1, loss="cross_entropy")


def test_unfrozen_parts_train_in_the_next_fit() -> None:
    def gradients(again: bool) -> list[float]:
        net, norms = two_layers(), Norms()
        net[0].requires_grad_(False)
        trainer = pf.Trainer(max_epochs=2, progress=False)
        trainer.fit(net, (X, Y), batch_size=8)
        net[0].requires_grad_(True)
        if not again:
            trainer = pf.Trainer(max_epochs=2, progress=False)
        trainer.dispatcher = type(trainer.dispatcher)(trainer, [norms])
        trainer.fit(net, (X, Y), batch_size=8)
        return norms.norms

    assert gradients(again=True) == gradients(again=False)


def test_a_loss_that_was_configured_anew_is_used() -> None:
    net = pf.configure(nn.Linear(4, 1), loss="mse")
    trainer = pf.Trainer(progress=False)
    target = torch.full((16,), 3.0)
    trainer.fit(net, (X, target))
    pf.configure(net, loss="mae", optimizer="sgd", lr=1e-9)
    expected = (net(X).squeeze(1) - target).abs().mean().item()
    assert trainer.fit(net, (X, target), batch_size=16)["loss"] == [pytest.approx(expected)]


def test_evaluating_a_copy_in_the_middle_of_a_fit_leaves_the_fit_alone(tmp_path: Path) -> None:
    seen: list[float] = []

    class Copy(pf.Callback):
        def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            other = copy.deepcopy(trainer.engine.module)
            seen.append(trainer.evaluate(other, (X + 100, Y))["loss"])

    checkpoint = pf.callbacks.Checkpoint(tmp_path, monitor="val_loss")
    trainer = pf.Trainer(max_epochs=3, progress=False, callbacks=[Copy(), checkpoint])
    net = two_layers()
    history = trainer.fit(net, (X, Y), (X, Y), batch_size=8)
    plain = pf.Trainer(max_epochs=3, progress=False).fit(two_layers(), (X, Y), (X, Y), batch_size=8)
    assert history.history == plain.history
    assert checkpoint.best == min(history["val_loss"])
    assert trainer.engine.module is net
    assert len(seen) == 3


def test_the_logged_rate_is_the_one_that_was_used() -> None:
    class Halve(Norms):
        def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            trainer.engine.optimizer.param_groups[0]["lr"] /= 2

    halve = Halve()
    history = pf.Trainer(max_epochs=3, progress=False, callbacks=[halve]).fit(two_layers(), (X, Y), batch_size=16)
    assert halve.rates == history["lr"] == pytest.approx([0.1, 0.05, 0.025])


def test_a_frozen_model_can_be_evaluated_and_not_trained() -> None:
    net = two_layers().requires_grad_(False)
    trainer = pf.Trainer(progress=False)
    assert trainer.evaluate(net, (X, Y))["loss"] > 0
    assert trainer.predict(net, X).shape == (16, 2)
    with pytest.raises(pf.ModelError, match="nothing to train"):
        trainer.fit(net, (X, Y))


def test_parts_set_to_evaluation_stay_so_and_a_whole_model_does_not() -> None:
    modes: list[tuple[bool, bool]] = []

    class Modes(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            modes.append((trainer.engine.module[0].training, trainer.engine.module[1].training))

    net = two_layers()
    net[0].eval()
    pf.Trainer(progress=False, callbacks=[Modes()]).fit(net, (X, Y))
    pf.Trainer(progress=False, callbacks=[Modes()]).fit(two_layers().eval(), (X, Y))
    assert modes == [(False, True), (True, True)]


@pytest.mark.parametrize("optimizer", ["adagrad", "adamw"])
def test_an_implementation_is_set_also_where_there_is_state(optimizer: str) -> None:
    net = pf.configure(two_layers(), optimizer=optimizer, loss="cross_entropy")
    made = torch.optim.AdamW(net.parameters()) if optimizer == "adamw" else optimizer
    pf.configure(net, optimizer=made, loss="cross_entropy")
    for _ in range(2):
        trainer = pf.Trainer(optimizer_implementation="fused", progress=False)
        trainer.fit(net, (X, Y))
        assert trainer.engine.optimizer.param_groups[0]["fused"] is True


def test_parameters_of_others_are_refused() -> None:
    temperature = nn.Parameter(torch.ones(()))
    net = two_layers()
    pf.configure(net, optimizer=torch.optim.SGD([*net.parameters(), temperature], lr=0.1), loss="cross_entropy")
    with pytest.raises(pf.ModelError, match="also holds parameters that are not this model's"):
        pf.Trainer(progress=False).fit(net, (X, Y))


def test_two_optimizers_and_a_wrapped_model_are_refused() -> None:
    class Gan(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
            self.configure(loss="cross_entropy")

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.a.parameters()), torch.optim.Adam(self.b.parameters())

    with pytest.raises(pf.ModelError, match="one optimizer"):
        pf.Trainer(progress=False).fit(Gan(), (X, Y))
    with pytest.raises(pf.ModelError, match=r"wrapped in DataParallel.*model\.module"):
        pf.Trainer(progress=False).fit(nn.DataParallel(two_layers()), (X, Y))


def test_a_batch_that_does_not_fit_forward_is_said_in_terms_of_the_batch() -> None:
    net = pf.configure(nn.Linear(4, 2), loss="cross_entropy")
    with pytest.raises(pf.ModelError, match=r"Linear\.forward.*a tuple of 3\) gives: 2 inputs.*override training_step"):
        pf.Trainer(progress=False).fit(net, (X, torch.arange(16), Y))
    with pytest.raises(pf.ModelError, match=r"configure\(loss="):
        pf.Trainer(progress=False).fit(nn.Linear(4, 2), (X, Y))


def test_a_loss_and_metrics_set_in_init_are_used() -> None:
    class Own(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.loss = nn.CrossEntropyLoss()
            self.metrics = ["accuracy"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Own()
    result = pf.Trainer(progress=False).evaluate(model, (X, Y))
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(model(X), Y).item(), rel=1e-5)
    assert result["accuracy"] == pytest.approx((model(X).argmax(1) == Y).float().mean().item())


def test_misspelt_events_are_refused() -> None:
    class Misspelt(pf.Callback):
        def on_epoch_ends(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match=r"'on_epoch_ends', which is no event; did you mean 'on_epoch_end'"):
        pf.Trainer(callbacks=[Misspelt()])


def test_validation_may_have_batches_of_its_own() -> None:
    val = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=3)
    history = pf.Trainer(progress=False).fit(two_layers(), (X, Y), val, batch_size=8)
    assert history["val_loss"][0] > 0


def test_the_newest_checkpoint_is_the_one_written_last_and_the_best_is_kept(tmp_path: Path) -> None:
    def run(steps: int) -> nn.Module:
        net = two_layers()
        checkpoint = pf.callbacks.Checkpoint(tmp_path, every=1, monitor="val_loss")
        pf.Trainer(max_steps=steps, progress=False, callbacks=[checkpoint]).fit(net, (X, Y), (X, Y), batch_size=8)
        return net

    run(7)
    net = run(3)
    assert pf.checkpoint.find(tmp_path).name == "step-00000003"
    fresh = two_layers()
    pf.checkpoint.load_model(fresh, tmp_path, best=True)
    assert torch.equal(fresh[0].weight, net[0].weight)
    (tmp_path / "step-final").mkdir()
    assert pf.checkpoint.find(tmp_path).name == "step-00000003"
    (tmp_path / "step-00000003").rename(tmp_path / ".step-00000003.old")  # cut short between the two renames
    assert pf.checkpoint.find(tmp_path).name == ".step-00000003.old"
    pf.checkpoint.load_model(two_layers(), tmp_path, best=True)


def test_schedules_with_milestones_can_be_saved(tmp_path: Path) -> None:
    net = pf.configure(
        nn.Linear(4, 2),
        loss="cross_entropy",
        schedule=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1),
    )
    pf.Trainer(max_steps=3, progress=False, callbacks=[pf.callbacks.Checkpoint(tmp_path)]).fit(
        net, (X, Y), batch_size=4
    )
    history = pf.Trainer(max_epochs=2, progress=False).fit(net, (X, Y), batch_size=4, resume=tmp_path)
    assert history["lr"] == pytest.approx([1e-4, 1e-5])


def test_there_is_nothing_to_save_before_a_fit(tmp_path: Path) -> None:
    trainer = pf.Trainer(progress=False)
    trainer.evaluate(two_layers(), (X, Y))
    with pytest.raises(pf.ParaflowError, match="no run to save"):
        trainer.save(tmp_path / "a")
