"""Dequantising a GGUF file into a folder that transformers and SGLang load.

transformers reads the configuration, maps the names of weights, and undoes what llama.cpp does to some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from sglang_winnow.model_folders.gguf_tokenizer import read_field, read_tokenizer

WEIGHTS_FILE: Final = "model.safetensors"
_DTYPE = torch.bfloat16

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
    architecture = read_field(reader, "general.architecture")
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
