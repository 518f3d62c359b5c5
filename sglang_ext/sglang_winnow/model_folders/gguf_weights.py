"""Dequantising a GGUF file into a folder that transformers and SGLang load.

transformers reads the configuration and maps the names of weights. The tokenizer is made here: transformers' own
conversion leaves out how a text is split before its pairs are merged, and takes the wrong token for the end of a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

WEIGHTS_FILE: Final = "model.safetensors"
_DTYPE = torch.bfloat16

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS: Final = {
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
}
"""By ``tokenizer.ggml.pre``, llama.cpp's name of how a text is split."""

Report = Callable[[int, int], None]
"""Told how many tensors are done, of how many."""


def write_folder(gguf: Path, out: Path, report: Report) -> None:
    """Write configuration, bfloat16 weights, tokenizer and chat template of the file ``gguf`` to the folder ``out``.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the file is not a GGUF file, or has a model or a tokenizer of a kind that is not known here.
    """
    reader = GGUFReader(gguf)
    tokenizer = read_tokenizer(reader)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE)
    out.mkdir(parents=True, exist_ok=True)
    weights = read_weights(reader, model, report)
    save_file(weights, out / WEIGHTS_FILE, metadata={"format": "pt"})

    # Where the file came from, which is nobody's business later.
    vars(config).pop("_model_name_or_path", None)
    config.architectures = [type(model).__name__]
    config.dtype = _DTYPE
    end = tokenizer.eos_token_id
    config.update({"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id})
    config.save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(out)


def read_weights(reader: GGUFReader, model: Any, report: Report) -> dict[str, Tensor]:
    """Return the weights of ``model``, which may be on the device ``meta``, by the names that it has for them.

    Raises:
        ValueError: the file lacks some, or has them in other shapes.
    """
    architecture = _field(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        whole = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": weights},
        )
        if whole.name in names:
            weights[names[whole.name]] = torch.from_numpy(whole.weights.copy()).to(_DTYPE)
        report(done, len(reader.tensors))
    # Of two names of one tensor, the weights file has the first, as transformers writes it.
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    for name, shape in expected.items():
        if name not in weights:
            raise ValueError(f"{reader.data.filename} has no weights for {name}")
        if weights[name].shape != shape:
            raise ValueError(f"{reader.data.filename} has {name} as {list(weights[name].shape)}, not {list(shape)}")
    return {name: weights[name].contiguous() for name in expected}


def read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, with its special tokens and its chat template.

    Raises:
        ValueError: it is not a byte-level BPE, or splits texts in a way that is not known here.
    """
    kind, split = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model: must be gpt2 (byte-level BPE), not {kind}")
    if split not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: must be one of {', '.join(_PRE_TOKENIZERS)}, not {split}")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, of in zip(tokens, types, strict=True)
            if of == TokenType.CONTROL
        ]
    )
    ids = {
        f"{name}_token": _field(reader, f"tokenizer.ggml.{field}_token_id")
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    whole.chat_template = _field(reader, "tokenizer.chat_template")
    return whole


def _field(reader: GGUFReader, name: str) -> Any:
    """Return a field of the file's header; None if it has none of that name."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()
