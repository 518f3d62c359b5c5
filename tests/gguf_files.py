"""A small GGUF file for tests, and the Python package that it comes in."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 2, 64, 4, 2, 16, 96, 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: the special tokens, all bytes, two newlines in one token, and ``th``."""
    # As in GPT-2: printable bytes stand for themselves, others for characters from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    newline = chr(256 + others.index(10))
    return [*SPECIAL, *characters, newline * 2, "th"], [f"{newline} {newline}", "t h"]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a tiny Llama, by GGUF's names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(vocabulary()[0]), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
            }.items()
        }
    return {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, *, pre: str = "smollm", leave_out: str = "") -> Path:
    """Write a tiny Llama with 4-bit matrices to ``path``, without the tensor called ``leave_out``; return ``path``."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weights in tensors().items():
        if name == leave_out:
            continue
        if weights.ndim == 1:
            writer.add_tensor(name, weights)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GEMMA_LAYERS, GEMMA_HEAD_DIM, GEMMA_WINDOW = 6, 32, 48
BEFORE_BYTES = ("<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "  ", "   ", "<b>")
"""Control tokens, then those that are looked for before anything else: GGUF has them with plain spaces."""


def gemma_vocabulary() -> tuple[list[str], list[float], list[gguf.TokenType]]:
    """Tokens, scores and types as SentencePiece has them: the better a token's score, the sooner it is merged."""
    pieces = ["▁t", "he", "in", "▁the", "es", "▁", "t", "h", "e", "i", "n", "s", "1", "2"]
    tokens = [*BEFORE_BYTES, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [-1000.0] * len(BEFORE_BYTES) + [0.0] * 256 + [-float(rank) for rank in range(len(pieces))]
    types = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.USER_DEFINED] * (len(BEFORE_BYTES) - 4)
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    return tokens, scores, types


def gemma_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a tiny Gemma 3, by GGUF's names: those of norms have 1 added."""
    rng = np.random.default_rng(seed)
    width, kv_width = HEADS * GEMMA_HEAD_DIM, KV_HEADS * GEMMA_HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(gemma_vocabulary()[0]), HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for layer in range(GEMMA_LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (width, HIDDEN),
                "attn_q_norm": (GEMMA_HEAD_DIM,),
                "attn_k": (kv_width, HIDDEN),
                "attn_k_norm": (GEMMA_HEAD_DIM,),
                "attn_v": (kv_width, HIDDEN),
                "attn_output": (HIDDEN, width),
                "post_attention_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
                "post_ffw_norm": (HIDDEN,),
            }.items()
        }
    return {
        f"{name}.weight": (rng.normal(0, 0.1, shape) + name.endswith("norm")).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gemma_gguf(path: Path, *, space_prefix: bool = False, kind: str = "llama") -> Path:
    """Write a tiny Gemma 3 to ``path``, whose tokenizer is of a ``kind``; return ``path``."""
    tokens, scores, types = gemma_vocabulary()
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("Tiny Gemma")
    writer.add_block_count(GEMMA_LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(GEMMA_HEAD_DIM)
    writer.add_value_length(GEMMA_HEAD_DIM)
    writer.add_sliding_window(GEMMA_WINDOW)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)
    for name, weights in gemma_tensors().items():
        if weights.ndim == 1:
            writer.add_tensor(name, weights)
        else:
            quantized = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(weights, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, name: str, version: str, member: str, content: bytes) -> Path:
    """Write a wheel to ``folder`` that has the one file ``member``; return its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    information = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: not-to-be-fetched\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        for file, text in information.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
        files = [member, *(f"{stem}.dist-info/{file}" for file in (*information, "RECORD"))]
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join(f"{file},,\n" for file in files))
    return path
