"""Models for tests: a config and a tokenizer (enough for SGLang's ``--load-format dummy``), with weights if wanted."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NEEDLE = Path(__file__).resolve().parents[1] / "models" / "needle"
"""The model that ships."""
BOS_TOKEN = "<|begin|>"
EOS_TOKEN = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}
Family = Literal["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5"]
LINEAR_ATTENTION: Final[tuple[Family, ...]] = ("qwen3_next", "qwen3_5")
"""Families with linear attention in every layer with an even number."""
WITH_IMAGES: Final[tuple[Family, ...]] = ("qwen3_5",)
VISION_TOKENS: Final = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Those of models that see images, by the names of their ids in a config. They follow the beginning's and the end's."""
_PATCH, _MERGED, _FRAMES = 16, 2, 2
"""Pixels of a patch's side, patches of a token's side, frames of a patch."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a ``config.json`` says of a model. The defaults are small enough to load and run within seconds.

    Attributes:
        sliding_window: tokens that layers of Gemma and gpt-oss see: Gemma 3's but for every third one, which sees all,
            and of the others the first, the third and so on.
        logit_cap: what bounds the attention scores of Gemma 2.
        chosen_experts: of the four in a layer of gpt-oss or Qwen3-Next, how many compute a token.
    """

    family: Family = "llama"
    hidden_size: int = 256
    layers: int = 2
    query_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 256
    vocab_size: int = 512
    context_length: int = 8192
    sliding_window: int = 64
    logit_cap: float = 50.0
    chosen_experts: int = 2
    dtype: Literal["bfloat16", "float32"] = "float32"

    def __post_init__(self) -> None:
        if self.family == "qwen2" and self.head_dim * self.query_heads != self.hidden_size:
            raise ValueError(f"head_dim: Qwen2's is hidden_size / query_heads, it cannot be {self.head_dim}")

    def config(self) -> dict[str, object]:
        """Return the content of ``config.json``."""
        own = {
            "gemma2": self._of_gemma2,
            "gemma3_text": self._of_gemma3,
            "gpt_oss": self._of_gpt_oss,
            "qwen3_next": self._of_qwen3_next,
            "qwen3_5": self._of_qwen3_5,
        }
        config = self._common() | (own[self.family]() if self.family in own else {})
        return self._with_vision(config) if self.family in WITH_IMAGES else config

    def _of_gemma2(self) -> dict[str, object]:
        return {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.sliding_window,
            "layer_types": self._alternating(),
            "attn_logit_softcapping": self.logit_cap,
            "final_logit_softcapping": None,
            "pad_token_id": 0,
        }

    def _of_gemma3(self) -> dict[str, object]:
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.sliding_window,
            "layer_types": [
                "full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(self.layers)
            ],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "pad_token_id": 0,
        }

    def _of_gpt_oss(self) -> dict[str, object]:
        return {
            "sliding_window": self.sliding_window,
            "layer_types": self._alternating(),
            "num_local_experts": 4,
            "num_experts_per_tok": self.chosen_experts,
            "attention_bias": True,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        }

    def _of_qwen3_next(self) -> dict[str, object]:
        return {
            # What SGLang 0.5.16 takes: transformers writes another one where SGLang does not look for it.
            "rope_theta": 10_000.0,
            "num_experts": 4,
            "num_experts_per_tok": self.chosen_experts,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": False,
            **self._linear_attention(value_heads=2),
        }

    def _of_qwen3_5(self) -> dict[str, object]:
        rotated = 0.25
        pairs = int(self.head_dim * rotated) // 2
        height, width = pairs // 3, pairs // 3
        return {
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": rotated,
                "mrope_interleaved": True,
                "mrope_section": [pairs - height - width, height, width],
            },
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": False,
            # As in the larger models: each head of keys is of several heads of values.
            **self._linear_attention(value_heads=4),
        }

    @staticmethod
    def _linear_attention(*, value_heads: int) -> dict[str, object]:
        return {
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        }

    def _with_vision(self, text: dict[str, object]) -> dict[str, object]:
        """Return the config of a model that reads what ``text`` describes, and images."""
        architectures = text.pop("architectures")
        return {
            "architectures": architectures,
            "model_type": self.family,
            "text_config": text,
            "vision_config": {
                "model_type": self.family,
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "patch_size": _PATCH,
                "spatial_merge_size": _MERGED,
                "temporal_patch_size": _FRAMES,
                "out_hidden_size": self.hidden_size,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [],
            },
            **{name: 2 + place for place, name in enumerate(VISION_TOKENS)},
            "tie_word_embeddings": text["tie_word_embeddings"],
            "torch_dtype": self.dtype,
        }

    def _alternating(self) -> list[str]:
        return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(self.layers)]

    def _common(self) -> dict[str, object]:
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            # Wide enough that the likeliest token stands clear of the next.
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": self.dtype,
        }


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Write ``config.json`` and a byte-level BPE tokenizer of ``shape.vocab_size`` tokens to ``folder``; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.config())
    sees_images = shape.family in WITH_IMAGES
    added = VISION_TOKENS.values() if sees_images else ()
    _train_tokenizer(shape.vocab_size, *added).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": EOS_TOKEN,
            "model_max_length": shape.context_length,
            "chat_template": IMAGE_TEMPLATE if sees_images else CHAT_TEMPLATE,
            # SGLang pads prompts with images.
            **({"pad_token": EOS_TOKEN} if sees_images else {}),
        },
    )
    if sees_images:
        _write_processors(folder)
    return folder


def _write_processors(folder: Path) -> None:
    """Write how images and videos become patches, to the files that SGLang looks for beside the weights."""
    patches = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": _PATCH,
        "merge_size": _MERGED,
        "temporal_patch_size": _FRAMES,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": (_PATCH * _MERGED) ** 2, "longest_edge": 256 * (_PATCH * _MERGED) ** 2},
    }
    _write_json(folder / "preprocessor_config.json", patches | {"image_processor_type": "Qwen2VLImageProcessorFast"})
    videos = patches | {"video_processor_type": "Qwen3VLVideoProcessor"}
    _write_json(folder / "video_preprocessor_config.json", videos)


def write_weights(folder: Path, seed: int = 0) -> None:
    """Add random weights, the same for the same ``seed``, to a folder that ``write_model`` filled.

    Sink logits are as large as a trained model's, and numbers in the bfloat16 in which SGLang keeps them. Embeddings of
    Gemma 2 and 3, which these multiply, are small: a token would else be followed by itself, whatever attention comes
    to. Gemma 3's last norm makes up for it, so that the likeliest token stands clear of the next.
    """
    # Slow to import, and the models that run with dummy weights do without.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415

    torch.manual_seed(seed)
    written = json.loads((folder / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if config.model_type in WITH_IMAGES else AutoModelForCausalLM
    model = kind.from_config(config, dtype=config.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = torch.arange(2.0, 2.0 + len(parameter)).to(parameter.dtype)
        elif config.model_type in ("gemma2", "gemma3_text") and name.endswith("embed_tokens.weight"):
            parameter.data *= 0.05
        elif config.model_type == "gemma3_text" and name == "model.norm.weight":
            # Numbers are multiplied by one more than that.
            parameter.data.fill_(19)
    model.save_pretrained(folder)
    if config.model_type in LINEAR_ATTENTION:
        # transformers leaves out what it does not read; SGLang reads it.
        _write_json(folder / "config.json", written)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _train_tokenizer(vocab_size: int, *added: str) -> Tokenizer:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(vocab_size)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: {vocab_size} asked for, {tokenizer.get_vocab_size()} reached")
    return tokenizer
