"""GGUF files and adapters as model folders, against what transformers makes of them and plain arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_winnow.model_folders import dequantize as dequantize_command
from sglang_winnow.model_folders import merge_adapter
from sglang_winnow.model_folders.adapter import merge, sha256_of
from sglang_winnow.model_folders.gguf_weights import write_folder
from tests.gguf_files import (
    CONTEXT,
    GEMMA_HEAD_DIM,
    GEMMA_WINDOW,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SPECIAL,
    gemma_tensors,
    gemma_vocabulary,
    vocabulary,
    write_gemma_gguf,
    write_gguf,
)

RANK = 4
ALPHA = 6
Q_NAME = "model.layers.1.self_attn.q_proj.weight"
DOWN_NAME = "model.layers.0.mlp.down_proj.weight"


def _nothing(_done: int, _total: int) -> None:
    pass


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(gguf_file, out, _nothing)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_weights_are_those_of_the_file(gguf_file: Path, folder: Path) -> None:
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(gguf_file).tensors}
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights

    def same(name: str, expected: Any) -> None:
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], torch.tensor(expected).bfloat16())

    same("model.embed_tokens.weight", stored["token_embd.weight"])
    same("model.layers.1.mlp.down_proj.weight", stored["blk.1.ffn_down.weight"])
    same("model.layers.0.input_layernorm.weight", stored["blk.0.attn_norm.weight"])
    # GGUF has the rows of each head's queries and keys in pairs that rotate together, (0, d/2), (1, d/2 + 1) and so on.
    order = [row for half in (0, 1) for row in range(half, HEAD_DIM, 2)]
    for heads, ours, theirs in ((HEADS, "q_proj", "attn_q"), (KV_HEADS, "k_proj", "attn_k")):
        rows = [head * HEAD_DIM + row for head in range(heads) for row in order]
        same(f"model.layers.0.self_attn.{ours}.weight", stored[f"blk.0.{theirs}.weight"][rows])


def test_the_folder_loads_with_the_files_configuration(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (
        LAYERS,
        HEADS,
        KV_HEADS,
    )
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (CONTEXT, 100_000.0)
    assert config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == config.eos_token_id == 2
    assert "_model_name_or_path" not in json.loads((folder / "config.json").read_text())


def test_the_end_of_a_turn_ends_an_answer(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", SPECIAL[0])
    assert tokenizer.model_max_length == CONTEXT
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert prompt[0] == 1
    assert prompt.count(2) == 1
    # Nothing is put before a text unasked.
    assert tokenizer("th")["input_ids"] == [vocabulary()[0].index("th")]


def test_digits_are_split_off_before_pairs_are_merged(tokenizer: Any) -> None:
    # With a plain byte-level split the second newline would go to the digit, and each be a token.
    two_newlines = vocabulary()[0].index(vocabulary()[0][-2])
    assert tokenizer("\n\n12")["input_ids"][0] == two_newlines
    assert len(tokenizer("\n\n12")["input_ids"]) == 3


@pytest.mark.parametrize("text", ["the  lamp, 12\n\n3. x", "ünï 漢字 ▁ \t\n  x", "", " a b "])
def test_texts_survive_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre: must be one of gpt-2, smollm, not llama-bpe"),
        ({"leave_out": "blk.1.ffn_up.weight"}, "has no weights for model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_files_that_cannot_be_converted_are_refused(tmp_path: Path, options: dict[str, str], problem: str) -> None:
    file = write_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ValueError, match=problem):
        write_folder(file, tmp_path / "out", _nothing)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_folder(write_gemma_gguf(folder / "tiny.gguf"), folder / "tiny", _nothing)
    return folder / "tiny"


def test_gemmas_norms_lose_the_one_that_the_file_adds(gemma: Path) -> None:
    weights = load_file(gemma / "model.safetensors")
    stored = gemma_tensors()
    assert sum(name.endswith("norm.weight") for name in weights) == 1 + 6 * 6
    for ours, theirs in (
        ("model.norm", "output_norm"),
        ("model.layers.3.input_layernorm", "blk.3.attn_norm"),
        ("model.layers.3.self_attn.k_norm", "blk.3.attn_k_norm"),
        ("model.layers.3.post_attention_layernorm", "blk.3.post_attention_norm"),
        ("model.layers.3.pre_feedforward_layernorm", "blk.3.ffn_norm"),
        ("model.layers.3.post_feedforward_layernorm", "blk.3.post_ffw_norm"),
    ):
        expected = torch.tensor(stored[f"{theirs}.weight"]).double() - 1
        torch.testing.assert_close(weights[f"{ours}.weight"].double(), expected, rtol=2**-8, atol=1e-6)


def test_gemmas_configuration(gemma: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(gemma).config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config.sliding_window, config.head_dim, config.vocab_size) == (
        GEMMA_WINDOW,
        GEMMA_HEAD_DIM,
        len(gemma_vocabulary()[0]),
    )
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the in", ["t", "he", "▁", "in"]),
        # Of overlapping pairs, the one whose token has the best score is merged first: ▁t before he, then ▁the.
        (" the", ["▁the"]),
        (" these", ["▁the", "s", "e"]),
        # What the file has with plain spaces, longest first.
        ("t   the", ["t", "▁▁▁", "t", "he"]),
        ("\n\n\n1", ["\n\n", "\n", "1"]),
        ("<b>12", ["<b>", "1", "2"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("🚀", ["<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"]),
    ],
)
def test_gemmas_tokens(gemma: Path, text: str, tokens: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *tokens]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"space_prefix": True}, "tokenizer.ggml.add_space_prefix: must be false"),
        ({"kind": "t5"}, r"tokenizer.ggml.model: must be gpt2 \(byte-level BPE\) or llama \(SentencePiece\), not t5"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    file = write_gemma_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ValueError, match=problem):
        write_folder(file, tmp_path / "out", _nothing)


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], *, rank: int = RANK, **changes: object
) -> dict[str, torch.Tensor]:
    """Write an adapter in two files; ``changes`` are what the merged model has otherwise."""
    folder.mkdir()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, folder / f"adapter-{number:05}-of-00002.safetensors")
    config = {"r": rank, "lora_alpha": ALPHA, "use_rslora": bool(changes.pop("use_rslora", False)), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if changes:
        (folder / "model_config.json").write_text(json.dumps(changes))
    return tensors


def factors(inner: int = 96) -> dict[str, torch.Tensor]:
    """Random factors for one matrix of attention and one of an MLP with ``inner`` hidden neurons."""
    generator = torch.Generator().manual_seed(1)
    shapes = {Q_NAME: (HIDDEN, HEADS * HEAD_DIM), DOWN_NAME: (inner, HIDDEN)}
    made = {}
    for name, (columns, rows) in shapes.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        made[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator).bfloat16()
        made[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator).bfloat16()
    return made


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_merged_model_has_the_updates_and_nothing_else(folder: Path, tmp_path: Path, use_rslora: bool) -> None:
    adapter = write_adapter(
        tmp_path / "adapter",
        factors(),
        use_rslora=use_rslora,
        rope_theta=2e6,
        max_position_embeddings=2048,
        base_sha256=sha256_of([folder / "model.safetensors"]),
    )
    seen: list[tuple[int, int]] = []
    merge(folder, tmp_path / "adapter", tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    scale = ALPHA / (math.sqrt(RANK) if use_rslora else RANK)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name not in (Q_NAME, DOWN_NAME):
            assert torch.equal(after[name], weight)
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapter[f"{stem}.lora_{part}.weight"].double() for part in "AB")
        # Half a unit in the last of bfloat16's 8 bits.
        torch.testing.assert_close(after[name].double(), weight.double() + scale * b @ a, rtol=2**-8, atol=1e-6)
        assert not torch.equal(after[name], weight)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (2e6, 2048)
    assert config.rope_parameters["rope_type"] == "default"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 2048


def _without_a_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def _of_no_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1." in name]:
        tensors[name.replace("layers.1.", "layers.7.")] = tensors.pop(name)


def _with_something_else(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without_a_half, r"has only lora_B of model\.layers\.0\.mlp\.down_proj\.weight"),
        (_of_no_layer, r"changes model\.layers\.7\.self_attn\.q_proj\.weight, which .* does not have"),
        (_with_something_else, r"base_model\.model\.lm_head\.weight, which is not a part of a low-rank update"),
        (dict[str, torch.Tensor].clear, "has no safetensors files with low-rank updates"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    tensors = factors()
    change(tensors)
    write_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(ValueError, match=problem):
        merge(folder, tmp_path / "adapter", tmp_path / "out", _nothing)


def test_an_adapter_of_other_shapes_weights_or_rank_is_refused(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "shape", factors(inner=32))
    with pytest.raises(ValueError, match=r"as \[64, 32\], and the model has \[64, 96\]"):
        merge(folder, tmp_path / "shape", tmp_path / "out", _nothing)
    write_adapter(tmp_path / "weights", factors(), base_sha256="0" * 64)
    with pytest.raises(ValueError, match="is for other weights than those in"):
        merge(folder, tmp_path / "weights", tmp_path / "out", _nothing)
    write_adapter(tmp_path / "rank", factors(), rank=8)
    with pytest.raises(ValueError, match="and the rank is 8"):
        merge(folder, tmp_path / "rank", tmp_path / "out", _nothing)
    write_adapter(tmp_path / "field", factors(), rope_factor=4)
    with pytest.raises(ValueError, match=r"model_config.json: rope_factor: Extra inputs"):
        merge(folder, tmp_path / "field", tmp_path / "out", _nothing)


def test_the_commands_tell_progress_and_end_with_one_sentence(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["dequantize", "--gguf", str(gguf_file), "--out", str(out)])
    dequantize_command.main()
    lines = capsys.readouterr().out.splitlines()
    total = 2 + 9 * LAYERS
    assert lines == [f"{done} {total}" for done in range(1, total + 1)]
    with pytest.raises(SystemExit, match=rf"^error: {out} is not empty$"):
        dequantize_command.main()
    options = ["--base", str(out), "--adapter", str(tmp_path), "--out", str(tmp_path / "merged")]
    monkeypatch.setattr("sys.argv", ["merge", *options])
    with pytest.raises(SystemExit, match=r"^error: .*adapter_config.json"):
        merge_adapter.main()
