"""What benchmarks/hybrid.py runs on each host: one rank's steps, by hand and by Paraflow, in turn.

A case is trained by Paraflow's Trainer, and before each of its steps those by hand make theirs, in the same process, on
rows of the same sizes. The models are those of the examples.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import by_hand_classification
import by_hand_pipeline
import torch
import torch.distributed as dist
from host_turns import BesideFit, Steps, take_turns, tell
from torch.utils.data import DataLoader

import paraflow as pf
from paraflow.models.byte_text import chunk
from paraflow.models.masking import MaskingCollator

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import bert_pipeline
import classification_100k
from transformers_bert import CONTEXT, MASK, PAD, VOCABULARY, read_text

COLLATE = MaskingCollator(MASK, VOCABULARY, special_tokens=[PAD])
WARM_UP = 2
"""Steps of each that are not counted, as `Stopwatch` has it."""


def by_hand_of_images(arguments: argparse.Namespace, plain: bool) -> Steps:
    """Steps on images, of the same model on all ranks."""
    torch.manual_seed(0)
    net = classification_100k.Net(arguments.classes, plain=True)
    share = arguments.images // dist.get_world_size()
    images, classes = classification_100k.make_images(share, arguments.classes)
    if not plain:
        hybrid = by_hand_classification.HybridByHand(net.features, net.head)
        return {"hybrid by hand": lambda: hybrid.step(images, classes)}
    whole = by_hand_classification.DataParallelByHand(net.features, net.head)
    return {
        "computing alone": lambda: whole.step_alone(images, classes),
        "data parallel by hand": lambda: whole.step(images, classes),
    }


def fit_images(arguments: argparse.Namespace, plain: bool, name: str) -> None:
    """Trains on images, and those by hand beside it."""
    pf.seed(0)
    net = classification_100k.Net(arguments.classes, plain=plain)
    net.configure(optimizer="sgd", lr=by_hand_classification.LEARNING_RATE, loss="cross_entropy")
    data = classification_100k.make_images(8 * arguments.images, arguments.classes)
    beside = BesideFit(name, lambda: by_hand_of_images(arguments, plain), tell)
    _trainer(arguments, beside).fit(net, data, batch_size=arguments.images)


def read_rows() -> list[torch.Tensor]:
    """The documentation, in rows."""
    return list(chunk(read_text()[0], CONTEXT))


def by_hand_of_bert(arguments: argparse.Namespace, plain: bool) -> Steps:
    """Steps of BERT, of the same model on all ranks."""
    torch.manual_seed(0)
    model = bert_pipeline.make_model(arguments.layers)
    if not plain:
        pipeline = by_hand_pipeline.PipelineByHand(model, arguments.stages, arguments.micro_batches)
        rows = COLLATE(read_rows()[: arguments.rows * arguments.stages // dist.get_world_size()])
        return {"pipeline by hand": lambda: pipeline.step(rows)}
    whole = by_hand_pipeline.DataParallelByHand(model)
    rows = COLLATE(read_rows()[: arguments.rows // dist.get_world_size()])
    return {"computing alone": lambda: whole.step_alone(rows), "data parallel by hand": lambda: whole.step(rows)}


def fit_bert(arguments: argparse.Namespace, plain: bool, name: str) -> None:
    """Trains BERT, and those by hand beside it."""
    pf.seed(0)
    model = bert_pipeline.make_model(arguments.layers)
    pf.configure(model, optimizer="adamw", lr=by_hand_pipeline.LEARNING_RATE, weight_decay=0.01)
    # A list of tensors is a dataset, which torch's types do not know.
    loader: Any = DataLoader(read_rows(), arguments.rows, drop_last=True, collate_fn=COLLATE)  # type: ignore[arg-type]
    beside = BesideFit(name, lambda: by_hand_of_bert(arguments, plain), tell)
    flags = {} if plain else {"pp": arguments.stages, "accumulate": arguments.micro_batches}
    _trainer(arguments, beside, **flags).fit(model, loader)


def _trainer(arguments: argparse.Namespace, beside: BesideFit, **flags: Any) -> pf.Trainer:
    steps = arguments.turns + WARM_UP
    return pf.Trainer(
        max_steps=steps, optimizer_implementation="fused", callbacks=[beside], progress=False, device="cpu", **flags
    )


CASES = {
    "classification": (by_hand_of_images, fit_images, "hybrid"),
    "bert": (by_hand_of_bert, fit_bert, "pipeline"),
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--plain", action="store_true", help="data parallel, instead of the hybrid")
    parser.add_argument("--by-hand", action="store_true", help="those by hand only")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    by_hand, fit, name = CASES[arguments.case]
    if arguments.by_hand:
        dist.init_process_group("gloo")
        tell(take_turns(lambda: by_hand(arguments, arguments.plain), arguments.turns + WARM_UP))
        dist.destroy_process_group()
    else:
        fit(arguments, arguments.plain, f"{'data parallel' if arguments.plain else name} by Paraflow")


if __name__ == "__main__":
    main()
