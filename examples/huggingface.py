"""Variants of a Hugging Face model: a dict batch, the model's own loss, one learning rate per member."""

import numpy as np
from transformers import BertConfig, BertForSequenceClassification

import modelfleet as mf

VOCABULARY = 50


def make_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def main() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, (256, 8))
    labels = (tokens[:, 0] < VOCABULARY // 2).astype(np.int64)  # the first token decides
    batch = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels}

    rates = [1e-4, 3e-4, 1e-3, 3e-3]
    fleet = mf.Fleet.build(make_bert, 4, seed=0)
    fleet.compile("adamw", metrics=["accuracy"], lr=mf.each(rates))
    history = fleet.fit(batch, epochs=8, batch_size=32, progress=False)

    print(f"fused: {fleet.plan(batch).lanes[0].fused}")
    for name, rate in zip(fleet, rates, strict=True):
        print(f"lr {rate:g}: loss {history[name]['loss'][-1]:.3f}, accuracy {history[name]['accuracy'][-1]:.2f}")


if __name__ == "__main__":
    main()
