"""A model of transformers, run outside of any server with an attention of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from winnow_evaluation.machine import surroundings
from winnow_kernels.softmax import Softmax

_ATTENTION: Final = "winnow_offline"

Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attends in one layer. Called with the layer's number, rotated queries [rows, tokens, query heads, head dim], rotated
keys and values [rows, tokens, KV heads, head dim], and the scale; returns outputs like the queries. Where the layer has
a sliding window (``OfflineModel.windows``), it is the callee that keeps to it."""


class OfflineModel:
    """A causal language model with rotary embeddings, such as Llama, Qwen, Gemma or gpt-oss, and its tokenizer.

    Attributes:
        folder: where it lies.
        device: where it runs.
        dtype: of weights and activations.
        cache_dtype: of the KV cache.
        windows: of each layer, how many tokens before its own position a token sees; None for all.
        softmaxes: of each layer, what its softmax has beside scores: it is the callee of attention that applies it.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises OSError or ValueError if transformers cannot load the model, or it has linear attention."""
        self.folder, self.device, self.dtype, self.cache_dtype = folder, device, dtype, cache_dtype or dtype
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_ATTENTION)
        self._network = self._network.eval().to(device)
        config = self._network.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        if "linear_attention" in kinds:
            raise ValueError(f"{folder}: models with linear attention are not measured offline")
        self.windows: list[int | None] = [
            config.sliding_window - 1 if kind == "sliding_attention" else None for kind in kinds
        ]
        cap = getattr(config, "attn_logit_softcapping", None)
        sinks = {
            int(name.split(".")[-3]): parameter.detach().float()
            for name, parameter in self._network.named_parameters()
            if name.endswith("self_attn.sinks")
        }
        self.softmaxes = [Softmax(cap, sinks.get(layer)) for layer in range(len(kinds))]
        self.query_heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context_length: int = config.max_position_embeddings

    def environment(self) -> dict[str, Any]:
        """Return what a benchmark's record begins with: the model, and what it runs on."""
        record = surroundings("transformers")
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else record["cpu"]
        return {"model": self.name, "device": device, **record}

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.windows)

    @property
    def full_layers(self) -> list[int]:
        """The layers that see the whole context: those that policies act on, and that ratios and shares are of."""
        return [layer for layer, window in enumerate(self.windows) if window is None]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        end = self._network.generation_config.eos_token_id
        return [end] if isinstance(end, int) else list(end or ())

    @property
    def first_tokens(self) -> list[int]:
        """Tokens that any text begins with, such as Gemma's ``<bos>``."""
        first: list[int] = self._tokenizer("")["input_ids"]
        return first

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` as it stands."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    def encode_message(self, text: str) -> list[int]:
        """Return the tokens of a conversation that begins with the user's message ``text``, up to the answer."""
        return self.encode(self.conversation([{"role": "user", "content": text}]))

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a chat request's messages in the model's chat template, up to the answer."""
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Run the network but for its last step.

        Args:
            tokens: int64 [rows, tokens].
            positions: int64, same shape; of each token in its context.
            attend: called in each layer, in order.

        Returns:
            [rows, tokens, hidden size].
        """
        output = self._network.base_model(tokens, position_ids=positions, use_cache=False, attend=attend)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return those of each next token, float32 [..., vocabulary], for ``hidden``, [..., hidden size]."""
        logits: Tensor = self._network.get_output_embeddings()(hidden)
        return logits.float().log_softmax(-1)

    def best(self, hidden: Tensor) -> Tensor:
        """Return each most likely next token, int64 [...], for ``hidden``, [..., hidden size]."""
        logits: Tensor = self._network.get_output_embeddings()(hidden)
        return logits.argmax(-1)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    attend: Attention,
    **_options: Any,
) -> tuple[Tensor, None]:
    queries, keys, values = (heads.transpose(1, 2) for heads in (query, key, value))
    return attend(module.layer_idx, queries, keys, values, scaling), None


AttentionInterface.register(_ATTENTION, _attention)
