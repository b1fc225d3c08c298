"""Small sentence-transformers models with random weights, made on disk, and a task that only word order tells."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from classifier.types import RouterRequest

OAKS = ("oak", "elm", "fir", "yew", "bay", "ivy")
OWLS = ("owl", "emu", "fox", "yak", "bat", "imp")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_encoder(folder: Path, words: Iterable[str], *, seed: int = 0, layers: int = 2, max_tokens: int = 64) -> Path:
    """A BERT of 32 dimensions over a vocabulary of whole words and letters; gives its folder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizer

    bare = folder / "bare"
    bare.mkdir(parents=True)
    pieces = dict.fromkeys((*words, *LETTERS, *"0123456789?.,", *(f"##{each}" for each in LETTERS + "0123456789")))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (bare / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(vocab=str(bare / "vocab.txt")).save_pretrained(bare)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=max_tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(bare)
    path = folder / "sentence-model"
    # Of a bare encoder the library makes a model that averages over tokens.
    SentenceTransformer(str(bare), device="cpu").save(str(path))
    return path


def ordered_words(rng: random.Random, first: str) -> str:
    """Eight words, four of each family, the first of ``first``; the rest in any order: no count of words tells it."""
    ours, theirs = (OAKS, OWLS) if first == "oaks" else (OWLS, OAKS)
    rest = [rng.choice(ours) for _ in range(3)] + [rng.choice(theirs) for _ in range(4)]
    rng.shuffle(rest)
    return " ".join([rng.choice(ours), *rest])


def draw_ordered(rng: random.Random, count: int) -> tuple[tuple[RouterRequest, ...], np.ndarray]:
    """Prompts, and float64 (n,) whether an oak comes first."""
    firsts = [rng.choice(("oaks", "owls")) for _ in range(count)]
    requests = tuple(RouterRequest((("user", ordered_words(rng, first)),)) for first in firsts)
    return requests, np.array([float(first == "oaks") for first in firsts])
