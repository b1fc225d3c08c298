"""Small tokenizers of the common kinds and of rarer ones, and folders that hold them with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Sort the numbers 5, 3, 9 and 1 in rising order.",
    "user assistant system hello world, what is seven plus nine? The answer is 16.",
    "Grüße aus Köln, naïve café; 東京 is the capital of 日本. Emoji: 🙂🙃👩‍👩‍👧 and Ωmega.",
] * 3

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>"]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is true %}{{- '<think>\\n' }}"
    "{%- else %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def byte_level(vocab_size: int = 420) -> Tokenizer:
    """Byte-level BPE with ChatML control tokens and reasoning tags, as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2's and Mistral's."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *alphabet]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    trained.train_from_iterator(["The quick brown fox jumps over the lazy dog and seven plus nine is sixteen"], trainer)
    raw = json.loads(trained.to_str())
    raw["model"]["byte_fallback"] = True
    raw["model"]["unk_token"] = "<unk>"
    raw["added_tokens"] = [each for each in raw["added_tokens"] if not each["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_fallback_alone() -> Tokenizer:
    """BPE over three letters, every other character in bytes, with spaces as they are."""
    vocab = {token: i for i, token in enumerate(["a", "b", " ", *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def without_bytes() -> dict[str, Tokenizer]:
    """Tokenizers whose tokens read otherwise beside others, by their decoder's name."""
    words = ["the", "quick", "##ing", "##s", ".", ",", "don", "'", "t", "n't", "é", "中", "##文", "e\u0301"]
    parts = ["a", "b", "ab</w>", "c</w>", "é</w>", "中", "</w>"]
    letters = ["<pad>", "|", "h", "e", "l", "o"]
    word_level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    word_piece = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="the"))
    word_piece.decoder = decoders.WordPiece(cleanup=True)
    suffixed = Tokenizer(models.BPE({part: i for i, part in enumerate(parts)}, []))
    suffixed.decoder = decoders.BPEDecoder()
    ctc = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    ctc.decoder = decoders.CTC()
    return {"none": word_level, "WordPiece": word_piece, "BPEDecoder": suffixed, "CTC": ctc}


def save(tokenizer: Tokenizer, folder: Path, *, template: str | None = CHAT_TEMPLATE, eos: str = "<|im_end|>") -> Path:
    """Write a folder that ``engine.tokenizer.Tokenizer`` (and transformers) reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(name) for name in (eos, "<|endoftext|>") if tokenizer.token_to_id(name) is not None]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
