"""An unmodified `BertForMaskedLM` of Hugging Face's transformers, trained by Paraflow on Python's own documentation.

    python examples/transformers_bert.py
    paraflow launch -n 2 examples/transformers_bert.py

It prints the loss on masked bytes of text that the model has not seen, before and after training, beside the loss of
always guessing by how often each byte occurs. Weights are not downloaded: the model starts from random ones.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

import paraflow as pf
from paraflow.models.byte_text import BYTES, chunk, encode
from paraflow.models.masking import MaskingCollator

CONTEXT = 64
PAD, MASK, VOCABULARY = BYTES, BYTES + 1, BYTES + 2


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on and the last tenth, held out; each paragraph is kept once, so that none is in both."""
    paragraphs = (
        paragraph.strip("\n") for topic in pydoc_data.topics.topics.values() for paragraph in topic.split("\n\n")
    )
    tokens = encode("\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if paragraph.strip())))
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def mask_once(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Rows that are masked once and for all, so that every evaluation asks the same questions."""
    collate = MaskingCollator(MASK, VOCABULARY, special_tokens=[PAD], generator=torch.Generator().manual_seed(0))
    batch = collate(list(rows))
    return [{name: values[row] for name, values in batch.items()} for row in range(len(rows))]


def guessing_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Cross-entropy, in nats, of the held-out bytes under the frequencies of the training bytes."""
    seen = train.bincount(minlength=BYTES).double() + 1
    return float(-(seen / seen.sum()).log()[held_out].mean())


def make_model() -> torch.nn.Module:
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=CONTEXT,
            pad_token_id=PAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            # Larger than BERT's 0.02: so small a model leaves the plateau of guessing by frequency sooner.
            initializer_range=0.05,
        )
    )
    return pf.configure(bert, optimizer="adamw", lr=2e-3, weight_decay=0.01, schedule="linear", warmup=0.1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = os.environ.get("PARAFLOW_QUICK") == "1"
    parser.add_argument("--quick", action="store_true", default=quick, help="a few seconds, to see that it runs")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 1500; quick 20)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    steps = arguments.steps or (20 if arguments.quick else 1500)
    train, held_out = read_text()
    rows, test = chunk(train, CONTEXT), mask_once(chunk(held_out, CONTEXT))
    if arguments.quick:
        test = test[:64]

    torch.manual_seed(0)
    model = make_model()
    collator = MaskingCollator(MASK, VOCABULARY, special_tokens=[PAD])
    # A Sequence of tensors is a dataset; batch_size is global, whatever the number of ranks.
    loader = DataLoader(list(rows), batch_size=16, shuffle=True, drop_last=True, collate_fn=collator)
    trainer = pf.Trainer(max_steps=steps, seed=0, clip_norm=1.0, auto="O1")
    before = trainer.evaluate(model, DataLoader(test, batch_size=64))["loss"]
    trainer.fit(model, loader)
    after = trainer.evaluate(model, DataLoader(test, batch_size=64))["loss"]
    if pf.is_main():
        print(f"loss on masked bytes, held out, in nats: {before:.3f} before, {after:.3f} after")
        print(f"guessing each byte by its frequency: {guessing_loss(train, held_out):.3f}")


if __name__ == "__main__":
    main()
