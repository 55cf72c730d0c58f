from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from torch.nn import functional

from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.models.metrics import MetricSet
from paraflow.plan import Plan
from tests.pool import Pool

CPU = torch.device("cpu")
SPLITS = [[5], [3, 2], [4, 1], [1, 1, 1, 1, 1]]


def measure(specs: Any, output: Any, target: Any, split: Sequence[int]) -> dict[str, float]:
    metrics = MetricSet(specs, CPU)
    for part, of in zip(torch.split(output, list(split)), torch.split(target, list(split)), strict=True):
        metrics.update(part, of, len(of))
    return metrics.compute()


PREDICTED, TARGET = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, 1, 1, 1, 2])
LOGITS = functional.one_hot(PREDICTED, 3) * 4.0 - 2.0
# By hand. Class 0: 1 hit, 1 false alarm; class 1: 2 hits, 1 miss; class 2: 1 false alarm, 1 miss.
BY_HAND = {
    "accuracy": 3 / 5,
    "precision": (1 / 2 + 1 + 0) / 3,
    "recall": (1 + 2 / 3 + 0) / 3,
    "f1": (2 / 3 + 4 / 5 + 0) / 3,
}


@pytest.mark.parametrize("split", SPLITS)
def test_classes_by_hand_over_uneven_batches(split: list[int]) -> None:
    assert measure(list(BY_HAND), LOGITS, TARGET, split) == pytest.approx(BY_HAND)


BINARY_LOGITS = torch.tensor([2.0, -1.0, 0.3, -0.2, 0.1])
BINARY_TARGET = torch.tensor([1, 1, 1, 0, 0])
# By hand: a logit above 0 says 1. Hits at 0 and 2, a miss at 1, a false alarm at 4; 4 of 6 pairs are in order.
BINARY_BY_HAND = {"accuracy": 3 / 5, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "auroc": 4 / 6}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("columns", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_two_classes_by_hand(split: list[int], columns: tuple[bool, bool], dtype: torch.dtype) -> None:
    # What bce_with_logits takes: logits, whose meaning does not depend on what else is in the batch.
    output = BINARY_LOGITS[:, None] if columns[0] else BINARY_LOGITS
    target = BINARY_TARGET[:, None] if columns[1] else BINARY_TARGET
    measured = measure(list(BINARY_BY_HAND), output, target.to(dtype), split)
    assert measured == pytest.approx(BINARY_BY_HAND)


@pytest.mark.parametrize("split", SPLITS)
def test_area_under_the_curve_of_many_classes_is_that_of_their_probabilities(split: list[int]) -> None:
    logits = torch.tensor([[0.9, 0.1, 0.0], [5.0, 1.0, 2.0], [0.2, 0.8, 0.4], [-1.0, 3.0, 0.5], [0.1, 0.2, 0.7]])
    target = torch.tensor([0, 2, 1, 1, 2])
    probabilities, areas = logits.softmax(1), []
    for label in range(3):
        mine, others = probabilities[target == label, label], probabilities[target != label, label]
        areas.append((mine[:, None] > others[None]).float().mean().item())
    assert measure(["auroc"], logits, target, split) == pytest.approx({"auroc": sum(areas) / 3})


@pytest.mark.parametrize("split", [[3], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("column", [False, True])
def test_regression_by_hand(split: list[int], column: bool) -> None:
    output, target = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 4.0, 3.0])
    measured = measure(["mae", "mse", "r2"], output[:, None] if column else output, target, split)
    assert measured == pytest.approx({"mae": 1.0, "mse": 5 / 3, "r2": 1 - 5 / (42 / 9)}, rel=1e-5)


TOKENS = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1], [2, 2, 2, 2]])
TOKEN_LOGITS = functional.one_hot(torch.tensor([[0, 1, 2, 0], [3, 0, 0, 1], [2, 1, 1, 1]]), 4) * 4.0 - 2.0


@pytest.mark.parametrize("split", [[3], [2, 1], [1, 2], [1, 1, 1]])
@pytest.mark.parametrize("masked", [(), ((2, 1), (2, 2), (2, 3)), ((0, 3), (2, 1))])
def test_tokens_that_are_not_predicted_do_not_count(split: list[int], masked: Any) -> None:
    target = TOKENS.clone()
    for row, place in masked:
        target[row, place] = -100
    right, all_of_them = (TOKEN_LOGITS.argmax(-1) == target).sum().item(), (target != -100).sum().item()
    assert right == 7
    assert measure(["accuracy"], TOKEN_LOGITS, target, split) == pytest.approx({"accuracy": right / all_of_them})


@pytest.mark.parametrize("split", SPLITS)
def test_samples_without_a_class_do_not_count(split: list[int]) -> None:
    target = torch.tensor([0, 1, 1, -100, 2])
    assert measure(["accuracy"], LOGITS, target, split) == pytest.approx({"accuracy": 2 / 4})


def test_classes_of_pixels_are_in_the_second_dimension() -> None:
    predicted = torch.tensor([[[0, 1, 2], [2, 1, 0]]])
    target = torch.tensor([[[0, 1, 1], [2, -100, 1]]])
    logits = functional.one_hot(predicted, 3).permute(0, 3, 1, 2) * 4.0 - 2.0
    assert measure(["accuracy"], logits, target, [1]) == pytest.approx({"accuracy": 3 / 5})


def bias(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).mean()


@pytest.mark.parametrize("split", SPLITS)
def test_a_function_is_a_mean_over_samples(split: list[int]) -> None:
    output, target = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]), torch.zeros(5)
    assert measure([bias], output, target, split) == pytest.approx({"bias": 4.0})
    assert measure({"mine": lambda o, t: 7}, output, target, split) == {"mine": 7.0}


def test_names_are_those_of_a_mapping_or_of_the_metric() -> None:
    named = {"top": "accuracy", "error": lambda o, t: (o.argmax(-1) != t).float().mean()}
    assert measure(named, LOGITS, TARGET, [3, 2]) == pytest.approx({"top": 0.6, "error": 0.4})
    measured = measure([torchmetrics.MeanSquaredError(), bias, "mae"], torch.ones(4), torch.zeros(4), [4])
    assert measured == pytest.approx({"mean_squared_error": 1.0, "bias": 1.0, "mae": 1.0})


def test_two_of_one_name_are_refused_rather_than_dropped() -> None:
    with pytest.raises(ModelError, match=r"mean_squared_error|bias"):
        MetricSet([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError(squared=False)], CPU)


def test_objects_are_used_as_they_are_and_left_alone() -> None:
    mine = torchmetrics.classification.MulticlassAccuracy(3, average="none")
    mine.update(LOGITS, PREDICTED)
    measured = measure({"each": mine}, LOGITS, TARGET, [2, 3])
    assert measured == pytest.approx({"each_0": 1.0, "each_1": 2 / 3, "each_2": 0.0})
    assert mine.compute().tolist() == [1.0, 1.0, 1.0]
    collection = torchmetrics.MetricCollection(
        {"top": torchmetrics.classification.MulticlassAccuracy(3, average="micro"), "mean": mine.clone()}
    )
    measured = measure({"all": collection}, LOGITS, TARGET, [2, 3])
    assert measured["all_top"] == pytest.approx(0.6)


def test_a_reset_begins_anew_and_a_stand_in_counts_nothing() -> None:
    metrics = MetricSet(["accuracy", "auroc"], CPU)
    metrics.update(LOGITS[:3], TARGET[:3], 3)
    metrics.update(LOGITS[3:4], 1 - TARGET[3:4], 0)
    assert metrics.compute()["accuracy"] == pytest.approx(2 / 3)
    metrics.reset()
    metrics.update(LOGITS[4:], TARGET[4:], 1)
    assert metrics.compute()["accuracy"] == 0.0


def test_no_metrics_want_nothing() -> None:
    metrics = MetricSet([], CPU)
    metrics.update(None, None, 3)
    assert not metrics
    assert metrics.compute() == {}


def test_graphs_are_not_kept() -> None:
    metrics = MetricSet(["auroc", bias], CPU)
    output = torch.tensor([0.5, 2.0, -3.0], requires_grad=True)
    metrics.update(output * 1, torch.tensor([1, 0, 1]), 3)
    assert not any(
        part.requires_grad
        for metric in metrics._metrics.values()
        for state in metric.metric_state.values()
        for part in (state if isinstance(state, list) else [state])
    )


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("acuracy", r"no metric named 'acuracy'\. Did you mean 'accuracy'\? The names are: accuracy, f1"),
        ("zzz", r"no metric named 'zzz'\. The names are"),
        (torchmetrics.Accuracy, r"must be a name, a torchmetrics object or a function"),
        (3, r"must be a name, a torchmetrics object or a function \(output, target\), not 3"),
    ],
)
def test_what_is_no_metric_is_refused(spec: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        MetricSet([spec], CPU)


@pytest.mark.parametrize(
    ("spec", "output", "target"),
    [
        ("accuracy", torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)),
        ("f1", torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int64)),
        ("accuracy", torch.zeros(4), torch.zeros(3, dtype=torch.int64)),
        ("mse", torch.zeros(4, 3), torch.zeros(4)),
        ("mae", torch.zeros(4), torch.zeros(4, 1)),
        ("r2", torch.zeros(3, 2), torch.zeros(2, 3)),
        (torchmetrics.MeanSquaredError(), torch.zeros(4), torch.zeros(3)),
        (bias, torch.zeros(4), torch.zeros(3)),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_shapes(spec: Any, output: Any, target: Any) -> None:
    metrics = MetricSet({"mine": spec}, CPU)
    with pytest.raises(ModelError) as caught:
        metrics.update(output, target, 4)
    message = str(caught.value)
    assert "'mine'" in message
    assert str(tuple(output.shape)) in message
    assert str(tuple(target.shape)) in message


def test_a_step_without_output_or_tensors_is_refused() -> None:
    for output, target in ((None, TARGET), (LOGITS, None)):
        with pytest.raises(ModelError, match=r"metrics accuracy need .*'output' and 'target'"):
            MetricSet(["accuracy"], CPU).update(output, target, 5)
    with pytest.raises(ModelError, match=r"'accuracy' compares tensors.* output is a dict.*function"):
        MetricSet(["accuracy"], CPU).update({"logits": LOGITS}, TARGET, 5)


def _specs(binary: bool) -> dict[str, Any]:
    made = torchmetrics.classification
    objects: dict[str, Any] = {
        "object": made.BinaryAveragePrecision() if binary else made.MulticlassAveragePrecision(4),
        "collection": torchmetrics.MetricCollection(
            {"recall": made.BinaryRecall() if binary else made.MulticlassRecall(4)}
        ),
    }
    return {**{name: name for name in ("accuracy", "f1", "auroc")}, "function": _batch_mean, **objects}


def _batch_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def _compared(binary: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (10,) if binary else (10, 4)
    target = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0]) + (0 if binary else 2 * (torch.arange(10) % 2))
    return 3 * torch.randn(shape, generator=generator), target


def _alone(binary: bool) -> dict[str, float]:
    return measure(_specs(binary), *_compared(binary), [10])


def _on_ranks(binary: bool, shares: list[int]) -> dict[str, float]:
    mesh = Mesh(Plan(dp=len(shares)), CPU)
    metrics = MetricSet(_specs(binary), CPU, mesh.data_group)
    output, target = (torch.split(part, shares)[mesh.rank] for part in _compared(binary))
    for _ in range(2):  # the second time after a reset
        metrics.reset()
        for start in range(0, len(target), 4):
            metrics.update(output[start : start + 4], target[start : start + 4], len(target[start : start + 4]))
        if not len(target):
            whole = _compared(binary)
            metrics.update(whole[0][:1], whole[1][:1], 0)
        measured = metrics.compute()
    return measured


@pytest.mark.parametrize("shares", [[7, 3], [10, 0], [0, 10], [3, 0, 7]])
@pytest.mark.parametrize("binary", [False, True])
def test_ranks_measure_what_one_would(ranks: Pool, binary: bool, shares: list[int]) -> None:
    expected = _alone(binary)
    assert set(expected) == {"accuracy", "f1", "auroc", "function", "object", "collection_recall"}
    for measured in ranks(len(shares), _on_ranks, binary, shares):
        assert measured == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("binary", [False, True])
def test_state_is_taken_up(binary: bool) -> None:
    output, target = _compared(binary)
    before, after = MetricSet(_specs(binary), CPU), MetricSet(_specs(binary), CPU)
    before.update(output[:6], target[:6], 6)
    expected = before.compute()
    after.load_state_dict(before.state_dict(), first=True)
    assert before.compute() == expected
    assert set(after.state_dict()) == set(_specs(binary))
    after.update(output[6:], target[6:], 4)
    assert after.compute() == pytest.approx(_alone(binary), rel=1e-5)
    after.reset()
    after.update(output[:6], target[:6], 6)
    assert after.compute() == pytest.approx(expected, rel=1e-5)


def _resumed_on_ranks(binary: bool, shares: list[int]) -> dict[str, float]:
    mesh = Mesh(Plan(dp=len(shares)), CPU)
    before, after = MetricSet(_specs(binary), CPU, mesh.data_group), MetricSet(_specs(binary), CPU, mesh.data_group)
    output, target = (torch.split(part, shares)[mesh.rank] for part in _compared(binary))
    before.update(output[:2], target[:2], 2)
    after.load_state_dict(before.state_dict(), first=mesh.data_rank == 0)
    after.update(output[2:], target[2:], len(target) - 2)
    return after.compute()


@pytest.mark.parametrize("binary", [False, True])
def test_ranks_take_up_a_state_that_counts_once(ranks: Pool, binary: bool) -> None:
    for measured in ranks(2, _resumed_on_ranks, binary, [7, 3]):
        assert measured == pytest.approx(_alone(binary), rel=1e-5)
