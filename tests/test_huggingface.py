"""Hugging Face models go into fleets as they are: dict batches, their own `.loss`, fused, the same as alone.

Encoders, decoders, sequence to sequence and vision, each from a tiny configuration. strategy="fused" refuses
what has no batching rule, since vmap's slow fallback is off while a step is traced; so none of these loops.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modelfleet as mf
from modelfleet import testing
from modelfleet.types import Strategy

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers = pytest.importorskip("transformers")

ROWS, BATCH = 12, 4  # three steps
WORDS = 23
# Softmax does not feel a bias of the keys: its gradient is exactly 0, and as it begins at 0, all that it ever
# holds is rounding noise.
NOISE = ("key.bias", "k_proj.bias", "k_lin.bias")


def sentences(generator: torch.Generator) -> dict[str, Tensor]:
    """Sentences of different lengths, padded, and a class of three for each."""
    lengths = torch.randint(3, 8, (ROWS, 1), generator=generator)
    return {
        "input_ids": torch.randint(3, WORDS, (ROWS, 7), generator=generator),
        "attention_mask": (torch.arange(7) < lengths).long(),
        "labels": torch.randint(0, 3, (ROWS,), generator=generator),
    }


def texts(generator: torch.Generator) -> dict[str, Tensor]:
    """Sentences to go on with; some positions are not to be predicted."""
    words = torch.randint(3, WORDS, (ROWS, 7), generator=generator)
    labels = words.clone()
    labels[::3, :2] = -100
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    """Sentences and their translations."""
    return {
        "input_ids": torch.randint(3, WORDS, (ROWS, 6), generator=generator),
        "labels": torch.randint(3, WORDS, (ROWS, 5), generator=generator),
    }


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 3, (ROWS,), generator=generator),
    }


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], dict[str, Tensor]]


def case(kind: str, config: str, data: Any, **options: Any) -> Case:
    def model() -> nn.Module:
        return getattr(transformers, kind)(getattr(transformers, config)(**options))

    return Case(model, data)


BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "num_labels": 3,
}

CASES: dict[str, Case] = {
    "bert": case("BertForSequenceClassification", "BertConfig", sentences, **BERT),
    "roberta": case("RobertaForSequenceClassification", "RobertaConfig", sentences, **BERT),
    "electra": case("ElectraForSequenceClassification", "ElectraConfig", sentences, **BERT, embedding_size=6),
    "distilbert": case(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        sentences,
        vocab_size=WORDS,
        dim=8,
        n_layers=1,
        n_heads=2,
        hidden_dim=16,
        max_position_embeddings=16,
        num_labels=3,
    ),
    "albert": case(
        "AlbertForMaskedLM", "AlbertConfig", texts, **BERT, embedding_size=6, attention_probs_dropout_prob=0.1
    ),
    "gpt2": case(
        "GPT2LMHeadModel",
        "GPT2Config",
        texts,
        vocab_size=WORDS,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        attn_pdrop=0.2,
    ),
    "llama": case(
        "LlamaForCausalLM",
        "LlamaConfig",
        texts,
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    ),
    "gpt neox": case(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        texts,
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    ),
    "t5": case(
        "T5ForConditionalGeneration",
        "T5Config",
        pairs,
        vocab_size=WORDS,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "vit": case(
        "ViTForImageClassification",
        "ViTConfig",
        pictures,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=3,
    ),
    "swin": case(
        "SwinForImageClassification",
        "SwinConfig",
        pictures,
        image_size=16,
        patch_size=2,
        embed_dim=4,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=2,
        num_labels=3,
    ),
    "resnet": case(
        "ResNetForImageClassification",
        "ResNetConfig",
        pictures,
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    ),
    "convnext": case(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        pictures,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
        patch_size=2,
        num_labels=3,
    ),
}


def trained(case: Case, strategy: Strategy, momentum: float = 0.9) -> tuple[mf.Fleet, nn.Module]:
    """A fleet of two after three steps, and its second member trained alone."""
    data = case.data(torch.Generator().manual_seed(1))
    fleet = mf.Fleet.build(case.model, 2, seed=3)
    expected = testing.alone(
        fleet["1"], "1", data, seed=3, optimizer="sgd", lr=0.1, momentum=momentum, batch_size=BATCH
    )
    moved, _ = testing.largest_difference(fleet["1"], expected)
    assert moved > 1e-3  # the comparison is of trained weights
    fleet.compile("sgd", lr=mf.each([0.2, 0.1]), momentum=momentum)
    fleet.fit(data, batch_size=BATCH, strategy=strategy, progress=False)
    return fleet, expected


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    noise = [name for name, _ in model.named_parameters() if name.endswith(NOISE)]
    difference, where = testing.largest_difference(model, expected, ignoring=noise)
    assert difference <= 1e-4, where


@pytest.mark.parametrize("kind", CASES)
def test_a_fused_member_is_the_same_as_alone(kind: str) -> None:
    fleet, expected = trained(CASES[kind], "fused")
    (lane,) = fleet.plan().lanes
    assert lane.fused
    assert lane.program == "traced"
    assert_same(fleet["1"], expected)


def test_a_model_that_branches_on_a_tensor_takes_turns_and_says_why() -> None:
    bart = case(
        "BartForConditionalGeneration",
        "BartConfig",
        pairs,
        vocab_size=WORDS,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        encoder_layerdrop=0.5,  # drawn at every step; if the number is small, a layer is left out
    )
    fleet, expected = trained(bart, "auto", momentum=0)
    lanes = fleet.plan().lanes
    assert [lane.members for lane in lanes] == [("0",), ("1",)]
    assert all("its forward branches on the value of a tensor" in lane.reason for lane in lanes)
    assert_same(fleet["1"], expected)
