"""A byte-level GPT in less memory than it asks for: sharded, recomputed within a budget, built without weights.

python examples/memory.py                        one process: recomputation alone keeps to the budget
paraflow launch -n 2 examples/memory.py          two: each holds half of the state, so less need be recomputed

The text is that of examples/stdlib_lm.py. The training run is the same in both cases; its checkpoint, which two ranks
write in two parts, becomes one file that a model without a Trainer reads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from stdlib_lm import CONTEXT, read_text

import paraflow as pf
from paraflow.models.byte_text import BYTES, chunk
from paraflow.models.causal_lm import CausalLM, CausalLMConfig

FOLDER = Path("runs/memory")


def make_model() -> CausalLM:
    return CausalLM(CausalLMConfig(vocab_size=BYTES, layers=6, hidden=128, heads=4, context=CONTEXT))


def in_words(model: torch.nn.Module) -> str:
    """How many of a model's numbers have no memory."""
    sizes = [(parameter.numel(), parameter.is_meta) for parameter in model.parameters()]
    return f"{sum(size for size, empty in sizes if empty):,} of {sum(size for size, _ in sizes):,} have no memory yet"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = os.environ.get("PARAFLOW_QUICK") == "1"
    parser.add_argument("--quick", action="store_true", default=quick, help="a few seconds, to see that it runs")
    parser.add_argument("--budget", default="38MiB", help="what one rank may use (default 38MiB)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    train, held_out = read_text()
    rows, test_rows = (chunk(part, CONTEXT + 1, overlap=1) for part in (train, held_out[:8192]))

    pf.seed(0)
    with pf.deferred_init():
        model = make_model()
    if pf.is_main():
        print(f"parameters: {in_words(model)}")

    model.configure(optimizer="adamw", lr=1e-3, weight_decay=0.1, schedule="cosine", warmup=0.1)
    ranks = pf.world_size()
    trainer = pf.Trainer(
        max_steps=8 if arguments.quick else 40,
        fsdp=ranks if ranks > 1 else None,
        activation_checkpointing="auto",
        memory_budget=arguments.budget,
        clip_norm=1.0,
        callbacks=[pf.callbacks.Checkpoint(FOLDER / "checkpoints", keep=1)],
    )
    trainer.fit(model, rows, batch_size=8)
    loss = trainer.evaluate(model, test_rows, batch_size=32)["loss"]
    if pf.is_main():
        print(f"held-out loss by the Trainer: {loss:.4f} nats a byte")
        print(f"held-out loss by a plain module with the exported weights: {loss_of_export(test_rows):.4f}")


def loss_of_export(rows: torch.Tensor) -> float:
    """Exports the newest weights, and measures them in a module of its own: the sharded one is the Trainer's."""
    done = pf.checkpoint.export(FOLDER / "checkpoints", FOLDER / "model.safetensors", force=True)
    print(f"exported: {done.tensors} tensors of {done.checkpoint} to {done.files[0].name}")
    model = make_model().eval()
    pf.checkpoint.load_model(model, FOLDER / "model.safetensors")
    with torch.no_grad():
        return float(model.validation_step(rows)["loss"])


if __name__ == "__main__":
    main()
