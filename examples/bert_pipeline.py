"""An unmodified `BertForMaskedLM` of Hugging Face's transformers, deep and narrow, as a pipeline of two stages.

    python examples/bert_pipeline.py                                  one process: no pipeline
    paraflow launch -n 4 examples/bert_pipeline.py                    2 stages × 2 replicas
    paraflow launch -n 4 examples/bert_pipeline.py --stages 1         4 replicas: data parallel

Data parallelism sends the gradients of every layer in each step. A stage's ranks send those of its own layers, to fewer
ranks, and between stages only the activations of a micro-batch. Where the network is slow that takes less time; the
training run is the same. It prints the time of a step, and the share of it in which a rank does not compute.
(`benchmarks/hosts.py` makes hosts with a slow network on one machine.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM
from transformers_bert import CONTEXT, MASK, PAD, VOCABULARY, read_text

import paraflow as pf
from paraflow.models.byte_text import chunk
from paraflow.models.masking import MaskingCollator


def make_model(layers: int = 24, hidden: int = 256) -> torch.nn.Module:
    """BERT, as it comes; without dropout, so that losses are the same under every plan."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
            max_position_embeddings=CONTEXT,
            pad_token_id=PAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class StepTimes(pf.Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.began.append(time.perf_counter())

    def median(self) -> float:
        """Seconds of a step; the first is left out, since ranks make their connections in it."""
        return statistics.median(after - before for before, after in pairwise(self.began[1:]))


def seconds_alone(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> float:
    """Forward and backward of the rows that fall to one rank: all layers, or half of them for twice the rows."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        model(**rows).loss.backward()
        taken.append(time.perf_counter() - began)
    model.zero_grad()
    return min(taken)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = os.environ.get("PARAFLOW_QUICK") == "1"
    ranks = pf.world_size()
    parser.add_argument("--stages", type=int, default=2 if ranks % 2 == 0 else 1, help="1 is data parallel")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step of the pipeline (default 2)")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step, over all ranks (default 8)")
    parser.add_argument("--layers", type=int, default=4 if quick else 24, help="default 24; quick 4")
    parser.add_argument("--steps", type=int, default=5 if quick else 20, help="optimizer steps (default 20; quick 5)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    rows = list(chunk(read_text()[0], CONTEXT))
    collate = MaskingCollator(MASK, VOCABULARY, special_tokens=[PAD])
    loader = DataLoader(rows, batch_size=arguments.rows, shuffle=True, drop_last=True, collate_fn=collate)

    pf.seed(0)
    model = make_model(arguments.layers)
    alone = seconds_alone(model, collate(rows[: max(1, arguments.rows // pf.world_size())]))

    pf.configure(model, optimizer="adamw", lr=1e-3, weight_decay=0.01)
    times = StepTimes()
    trainer = pf.Trainer(
        max_steps=arguments.steps,
        pp=arguments.stages if arguments.stages > 1 else None,
        accumulate=arguments.micro_batches if arguments.stages > 1 else None,
        optimizer_implementation="fused",
        callbacks=[times],
    )
    trainer.fit(model, loader)
    if pf.is_main():
        step = times.median()
        print(f"{pf.world_size()} ranks, {arguments.stages} stages: {step:.3f} s a step")
        share = max(0.0, 1 - alone / step)
        print(f"forward and backward alone: {alone:.3f} s; sending, waiting and the optimizer: {share:.0%} of a step")


if __name__ == "__main__":
    main()
