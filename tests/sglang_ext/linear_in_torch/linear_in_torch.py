"""An SGLang plugin: layers with linear attention on a CPU, where SGLang has no kernels, and Winnow refuses them.

SGLang's backend for them, its pools, its radix cache and its scheduler are as on CUDA. What they launch is in torch:
the rule of gated delta nets, token by token.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64
"""Tokens between the states that SGLang's kernels of prefill give out."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Have such models served, and replace the kernels before a scheduler is made."""
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    from sglang_winnow import linear_attention  # noqa: PLC0415

    linear_attention.reasons = lambda *_: iter(())
    ServerArgs._validate_mamba_extra_buffer = lambda *_: None
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _replace_kernels, HookType.BEFORE)


def _replace_kernels(*_: object, **__: object) -> None:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as wrapper  # noqa: PLC0415
    from sglang.srt.layers.attention.linear import gdn_backend  # noqa: PLC0415
    from sglang.srt.layers.attention.linear.kernels import gdn_triton  # noqa: PLC0415
    from sglang.srt.models import qwen3_5, qwen3_next  # noqa: PLC0415

    qwen3_next.fused_qkvzba_split_reshape_cat = split_projections
    qwen3_next.FusedRMSNormGated = qwen3_next.RMSNormGated = GatedNorm
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = split_projections_side_by_side
    qwen3_5.RMSNormGated = GatedNorm
    qwen3_5.fused_sigmoid_mul = gate_output
    gdn_backend.causal_conv1d_fn = convolve
    gdn_backend.causal_conv1d_update = convolve_step
    gdn_backend.fused_gdn_gating = gates
    gdn_triton.chunk_gated_delta_rule = extend
    gdn_triton.fused_sigmoid_gating_delta_rule_update = decode
    gdn_triton.TritonGDNKernel.supports_packed_decode = False
    wrapper.track_mamba_states_if_needed = copy_states
    # Where states are copied is told from memory that only a GPU can pin.
    made = torch.tensor

    def unpinned(*data: Any, **options: Any) -> Tensor:
        options.pop("pin_memory", None)
        return made(*data, **options)

    def as_it_is(tensor: Any) -> Any:
        return tensor

    torch.tensor = unpinned
    tensors: Any = Tensor
    tensors.pin_memory = as_it_is
    logger.warning("linear attention is torch's")


class GatedNorm(nn.Module):
    """RMS norm, times the gate's activation."""

    def __init__(self, size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weight, self.eps) * functional.silu(gate)


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values side by side, the output's gate, and what the rule's two gates are made of."""
    tokens, group = len(qkvz), value_heads // key_heads
    parts = qkvz.view(tokens, key_heads, -1).split([key_dim, key_dim, group * value_dim, group * value_dim], dim=2)
    q, k, v, z = (part.reshape(tokens, -1) for part in parts)
    b, a = (part.reshape(tokens, -1) for part in ba.view(tokens, key_heads, -1).split([group, group], dim=2))
    return torch.cat((q, k, v), dim=-1), z.view(tokens, value_heads, value_dim), b, a


def split_projections_side_by_side(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same of Qwen3.5, whose projections lie side by side and not head by head."""
    channels = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + channels, channels], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(len(z), value_heads, value_dim), b.contiguous(), a.contiguous()


def gate_output(output: Tensor, gate: Tensor, *, inplace: bool) -> Tensor:
    """Return what a layer with full attention gives out, [tokens, channels], times its gate, [tokens, heads, dim]."""
    assert inplace
    return output.mul_(gate.reshape(output.shape).sigmoid())


def convolve(
    x: Tensor,
    weight: Tensor,
    _bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Return ``x``, [channels, tokens] of several sequences, convolved with what came before, and keep the end."""
    outputs = []
    starts = query_start_loc.tolist()
    for slot, known, start, end in zip(
        cache_indices.tolist(), has_initial_state.tolist(), starts, starts[1:], strict=False
    ):
        own = x[:, start:end]
        before = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        padded = torch.cat((before.to(own.dtype), own), dim=1)
        outputs.append(functional.silu(_convolved(padded, weight)))
        conv_states[slot] = padded[:, -before.shape[1] :]
    return torch.cat(outputs, dim=1)


def convolve_step(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    _bias: Tensor | None,
    _activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Return one token, [channels], of each row convolved."""
    before = conv_states[conv_state_indices]
    padded = torch.cat((before.to(x.dtype), x[:, :, None]), dim=2)
    conv_states[conv_state_indices] = padded[:, :, 1:].to(conv_states.dtype)
    return functional.silu((padded * weight).sum(dim=2))


def _convolved(padded: Tensor, weight: Tensor) -> Tensor:
    return functional.conv1d(padded[None], weight[:, None], groups=len(weight))[0]


def gates(decay_log: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of what is left of the state, and how much of it is replaced; [1, tokens, value heads]."""
    return (-decay_log.exp() * functional.softplus(a.float() + bias.float()))[None], b.float().sigmoid()[None]


def extend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Return the outputs and the states before each chunk; the last states are written in place."""
    outputs, states = [], []
    starts = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), starts, starts[1:], strict=False):
        state = initial_state[slot].clone()
        for token in range(start, end):
            if (token - start) % CHUNK == 0:
                states.append(state)
            state, output = _step(state, q[0, token], k[0, token], v[0, token], g[0, token], beta[0, token])
            outputs.append(output)
        initial_state[slot] = state
    return torch.stack(outputs)[None].to(v.dtype), None, torch.stack(states)[None]


def decode(
    *,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Return the outputs of one token of each row; states are written in place."""
    (g,), (beta,) = gates(A_log, a, b, dt_bias)
    outputs = []
    for row, slot in enumerate(initial_state_indices.tolist()):
        state, output = _step(initial_state_source[slot], q[0, row], k[0, row], v[0, row], g[row], beta[row])
        initial_state_source[slot] = state
        outputs.append(output)
    return torch.stack(outputs)[None].to(v.dtype)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state, [value heads, value dim, key dim], and the output, [value heads, value dim]."""
    group = len(v) // len(k)
    q, k = (functional.normalize(each.float(), dim=-1).repeat_interleave(group, dim=0) for each in (q, k))
    state = state.float() * g.exp()[:, None, None]
    new = (v.float() - torch.einsum("hvk,hk->hv", state, k)) * beta[:, None]
    state = state + new[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q) * k.shape[-1] ** -0.5


def copy_states(
    conv_states: Tensor,
    ssm_states: Tensor,
    own: Tensor,
    mask: Tensor,
    copies: Tensor,
    rows: int,
    **_: Any,
) -> None:
    """Copy the states of the rows of ``mask``."""
    chosen = mask[:rows]
    for states in (conv_states, ssm_states):
        states[copies[:rows][chosen]] = states[own[:rows][chosen].long()]
