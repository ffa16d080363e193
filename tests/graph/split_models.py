"""Models to cut, each with inputs."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers


class Block(nn.Module):
    """Block of a ResNet: its input is added to its output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu_(self.norm(self.first(x)))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(8) for _ in range(4)])
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean((2, 3)).view(x.size(0), -1)))


class UNet(nn.Module):
    """Every level of the way down is joined to the same level of the way up. Returns two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(n, 2 * n, 3, padding=1) for n in (2, 4, 8)])
        self.up = nn.ModuleList([nn.Conv1d(3 * n, n, 3, padding=1) for n in (8, 4, 2)])

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        levels = []
        for layer in self.down:
            levels.append(x)
            x = torch.tanh(layer(x))
        deepest = x
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, levels.pop()], 1)))
        return {"map": x * scale[:, None, None], "deepest": deepest}


class Encoder(nn.Module):
    """Transformer of torch's own layers, which torch.fx can't trace inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.positions = nn.Parameter(torch.randn(6, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(words) + self.positions)[:, 0])


class Branching(nn.Module):
    """Some of it branches on values, which torch.fx can't trace; torch.export can't either."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    """Returns inputs with a number of rows."""
    stages: int = 3


def images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8)


def words(rows: int) -> Tensor:
    return torch.randint(0, 17, (rows, 6))


def sentences(rows: int) -> dict[str, Tensor]:
    mask = (torch.arange(6) < torch.randint(2, 7, (rows, 1))).long()
    return {"input_ids": words(rows), "attention_mask": mask, "labels": torch.randint(0, 3, (rows,))}


def texts(rows: int) -> dict[str, Tensor]:
    found = words(rows)
    return {"input_ids": found, "labels": found.clone()}


def make_mlp() -> nn.Module:
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), inner, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def make_bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(vocab_size=17, intermediate_size=32, **sizes)
    return transformers.BertForSequenceClassification(config)


def make_gpt2(**more: Any) -> nn.Module:
    options: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 8, "use_cache": False}
    options |= {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 0, **more}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def make_llama() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    more: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 8}
    switches: dict[str, Any] = {"tie_word_embeddings": False, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=17, **sizes, **more, **switches))


CASES: dict[str, Case] = {
    "sequential": Case(make_mlp, lambda rows: torch.randn(rows, 8)),
    "resnet": Case(ResNet, images, 4),
    "unet": Case(UNet, lambda rows: (torch.randn(rows, 2, 12), torch.randn(rows)), 4),
    "encoder": Case(lambda: Encoder(0.1), words),
    "bert": Case(make_bert, sentences),
    "gpt2": Case(lambda: make_gpt2(tie_word_embeddings=False), texts),
    "llama": Case(make_llama, texts),
}
