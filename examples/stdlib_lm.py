"""A byte-level GPT on Python's own documentation, which is in the standard library: nothing is downloaded.

    python examples/stdlib_lm.py                       # one process
    paraflow launch -n 2 examples/stdlib_lm.py         # two; the same training, because batch_size is global

It prints the bits per byte of text that the model has not seen, beside what `zlib -9` needs for the same text.
"""

from __future__ import annotations

import argparse
import math
import os
import pydoc_data.topics
import zlib

import torch

import paraflow as pf
from paraflow.models.byte_text import BYTES, chunk, decode, encode
from paraflow.models.causal_lm import CausalLM, CausalLMConfig

CONTEXT = 128


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on and the last tenth, held out.

    The topics quote each other at length; each paragraph is kept once, so that none is in both parts.
    """
    paragraphs = (
        paragraph.strip("\n") for topic in pydoc_data.topics.topics.values() for paragraph in topic.split("\n\n")
    )
    tokens = encode("\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if paragraph.strip())))
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def make_model() -> CausalLM:
    model = CausalLM(CausalLMConfig(vocab_size=BYTES, layers=3, hidden=128, heads=4, context=CONTEXT))
    model.configure(optimizer="adamw", lr=3e-3, weight_decay=0.1, schedule="cosine", warmup=0.05)
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = os.environ.get("PARAFLOW_QUICK") == "1"
    parser.add_argument("--quick", action="store_true", default=quick, help="a few seconds, to see that it runs")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 600; quick 20)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    steps = arguments.steps or (20 if arguments.quick else 600)
    train, held_out = read_text()
    # Rows share one byte: the last target of one is the first input of the next.
    rows, test_rows = chunk(train, CONTEXT + 1, overlap=1), chunk(held_out, CONTEXT + 1, overlap=1)
    if arguments.quick:
        test_rows = test_rows[:32]

    torch.manual_seed(0)
    model = make_model()
    trainer = pf.Trainer(max_steps=steps, seed=0, clip_norm=1.0, auto="O1")
    trainer.fit(model, rows, batch_size=16)
    loss = trainer.evaluate(model, test_rows, batch_size=64)["loss"]
    if not pf.is_main():
        return

    seen = bytes(held_out.tolist())
    packed = 8 * len(zlib.compress(seen, 9)) / len(seen)
    print(f"bits per byte, held out: {loss / math.log(2):.3f} (zlib -9: {packed:.3f})")
    generator = torch.Generator().manual_seed(0)
    sample = model.cpu().generate(encode("The "), 40 if arguments.quick else 300, temperature=0.7, generator=generator)
    print(decode(sample))


if __name__ == "__main__":
    main()
