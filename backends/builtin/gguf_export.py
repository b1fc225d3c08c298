"""Writes a built-in model as GGUF, the format of llama.cpp: ``python -m backends.builtin.gguf_export 1 tier1.gguf``.

The 4-bit weights are unpacked and stored in a type of llama.cpp's own; float16 keeps them as they are. For comparing
engines on the same weights, and for taking the models elsewhere. Needs the package ``gguf``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args

import gguf
import numpy as np
import orjson
from numpy.typing import NDArray

from backends.builtin.paths import model_dir
from backends.builtin.reference import dequantized_state

WeightType = Literal["f32", "f16", "q8_0", "q4_0"]

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
# A method of the writer, without its add_, and the key of config.json whose value it takes.
_SHAPE = (
    ("context_length", "max_position_embeddings"), ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"), ("feed_forward_length", "intermediate_size"),
    ("head_count", "num_attention_heads"), ("head_count_kv", "num_key_value_heads"), ("key_length", "head_dim"),
    ("value_length", "head_dim"), ("layer_norm_rms_eps", "rms_norm_eps"), ("rope_dimension_count", "head_dim"),
    ("rope_freq_base", "rope_theta"), ("vocab_size", "vocab_size"),
)  # fmt: skip
# The split pattern of the built-in tokenizer is Qwen2's, which llama.cpp knows by this name.
_PRE_TOKENIZER = "qwen2"


def export_gguf(folder: Path, path: Path, weight_type: WeightType = "f16") -> None:
    """Write the Llama checkpoint in ``folder`` to ``path``.

    Norms stay float32 whatever the type, as llama.cpp's own converter has it.
    """
    config = orjson.loads((folder / "config.json").read_bytes())
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, config, folder.name)
    writer.add_file_type(_FILE_TYPES[weight_type])
    _write_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in dequantized_state(folder).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"llama.cpp has no name for {name}"
        values = _interleaved(name, tensor.float().numpy(), config)
        _add(writer, theirs, values, weight_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: NDArray[np.float32], weight_type: WeightType) -> None:
    kind = _TYPES["f32"] if values.ndim == 1 else _TYPES[weight_type]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _interleaved(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """Reorder the rows of q and k: Hugging Face rotates halves of a head, llama.cpp rotates neighbours."""
    if name.endswith("q_proj.weight"):
        num_heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        num_heads = config["num_key_value_heads"]
    else:
        return values
    rows, columns = values.shape
    return values.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_shape(writer: Any, config: dict[str, Any], name: str) -> None:
    writer.add_name(f"suffice-{name}")
    for theirs, ours in _SHAPE:
        getattr(writer, f"add_{theirs}")(config[ours])


def _write_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = orjson.loads((folder / "tokenizer.json").read_bytes())
    settings = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    tokens, kinds = [], []
    for index in range(config["vocab_size"]):
        if index in added:
            tokens.append(added[index]["content"])
            special = added[index]["special"]
            kinds.append(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
        elif index in by_id:
            tokens.append(by_id[index])
            kinds.append(gguf.TokenType.NORMAL)
        else:
            tokens.append(f"[PAD{index}]")
            kinds.append(gguf.TokenType.UNUSED)
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def main() -> None:
    """Export one tier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", type=int, choices=(1, 2, 3))
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", default="f16", choices=get_args(WeightType))
    arguments = parser.parse_args()
    export_gguf(model_dir(arguments.tier), arguments.path, arguments.type)
    print(f"{arguments.path}: {arguments.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
