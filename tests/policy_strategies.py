"""Policies for property tests: valid ones as JSON objects, and what a careless or hostile client makes of them."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.policy_rows import DRAFTS_ONLY, VOTED
from winnow_kernels.contract.early_termination import MAX_PATIENCE
from winnow_kernels.contract.fields import DEFAULT_SINKS, MAX_LAYERS, MAX_TOKENS, MAX_WINDOW, PAGE_TOKENS
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.policies.delta.parameters import MAX_DELTA_LAYERS
from winnow_kernels.policies.snapkv.parameters import MAX_KERNEL_SIZE
from winnow_kernels.policies.verified_pages.parameters import MAX_BUDGET

Json = dict[str, Any]

_tokens = st.integers(PAGE_TOKENS, MAX_TOKENS)
_ratio = st.floats(0, 1, exclude_min=True)


def _fields(optional: dict[str, st.SearchStrategy[Any]], **required: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(required, optional=optional)


@st.composite
def _sinks(draw: st.DrawFn) -> tuple[Json, int]:
    """The field, or nothing, and how many sinks that is."""
    sinks = draw(st.none() | st.integers(0, MAX_WINDOW))
    return ({}, DEFAULT_SINKS) if sinks is None else ({"sinks": sinks}, sinks)


@st.composite
def _budgeted(draw: st.DrawFn, /, name: str, beside: int, **optional: st.SearchStrategy[Any]) -> Json:
    """A policy with a budget that has room for sinks and ``beside`` tokens, a ratio, or (if that is enough) neither."""
    field, sinks = draw(_sinks())
    smallest = sinks + max(PAGE_TOKENS, beside)
    policy: Json = {"policy": name, **field, **draw(_fields(optional))}
    kind = draw(st.sampled_from(["budget", "ratio"] + ["default"] * (smallest <= 1024)))
    if kind == "budget":
        policy["budget"] = draw(st.integers(smallest, MAX_TOKENS))
    elif kind == "ratio":
        policy["budget_ratio"] = draw(_ratio)
    return policy


@st.composite
def _voted(draw: st.DrawFn, name: str) -> Json:
    window = draw(st.integers(1, MAX_WINDOW))
    odd = st.integers(0, MAX_KERNEL_SIZE // 2).map(lambda half: 2 * half + 1)
    return {**draw(_budgeted(name, window + 1, kernel_size=odd)), "observation_window": window}


@st.composite
def _delta(draw: st.DrawFn) -> Json:
    full_layers = draw(st.integers(0, 40))
    layers = draw(st.sets(st.integers(full_layers, MAX_LAYERS - 1), min_size=1, max_size=MAX_DELTA_LAYERS))
    field, sinks = draw(_sinks())
    recency = draw(st.integers(PAGE_TOKENS, MAX_TOKENS - sinks))
    return {
        "policy": "delta",
        **field,
        "budget": draw(st.integers(recency + sinks, MAX_TOKENS)),
        "recency": recency,
        "full_layers": full_layers,
        "delta_layers": draw(st.just(sorted(layers)) | st.none()),
    }


@st.composite
def _quoka_prefill(draw: st.DrawFn) -> Json:
    block = 16 * draw(st.integers(4, 32))
    optional = {
        "queries": st.integers(1, block),
        "dense_prefix": st.integers(0, MAX_TOKENS),
        "recency_ratio": st.floats(0, 1),
    }
    return {**draw(_budgeted("quoka", PAGE_TOKENS, **optional)), "block": block}


@st.composite
def _quest(draw: st.DrawFn) -> Json:
    field, sinks = draw(_sinks())
    budget = {"budget": st.integers(sinks + PAGE_TOKENS, MAX_TOKENS)}
    full_layers = {"full_layers": st.integers(0, MAX_LAYERS)}
    # The default budget is 2,048.
    drawn = _fields(budget | full_layers) if sinks + PAGE_TOKENS <= 2048 else _fields(full_layers, **budget)
    return {"policy": "quest", **field, **draw(drawn)}


@st.composite
def _tactic(draw: st.DrawFn) -> Json:
    field, sinks = draw(_sinks())
    cap = st.integers(sinks + PAGE_TOKENS, MAX_TOKENS) | st.none()
    optional = {"p": _ratio, "max_tokens": cap, "full_layers": st.integers(0, MAX_LAYERS)}
    return {"policy": "tactic", **field, **draw(_fields(optional))}


@st.composite
def _lowbit_top_p(draw: st.DrawFn) -> Json:
    field, sinks = draw(_sinks())
    least = draw(st.none() | st.integers(0, MAX_TOKENS))
    cap = st.integers(max(sinks + PAGE_TOKENS, least or 0), MAX_TOKENS) | st.none()
    own = {} if least is None else {"min_tokens": least}
    return {"policy": "lowbit_top_p", **field, **own, **draw(_fields({"p": _ratio, "max_tokens": cap}))}


@st.composite
def _verified_pages(draw: st.DrawFn) -> Json:
    sinks, recency = draw(st.integers(0, MAX_WINDOW)), draw(st.integers(PAGE_TOKENS, 4096))
    budget = draw(st.integers(sinks + recency, MAX_BUDGET))
    return {"policy": "verified_pages", "sinks": sinks, "budget": budget, "recency": recency}


decode_policies = st.one_of(
    st.just({"policy": "dense"}),
    _fields({"sinks": st.integers(0, MAX_WINDOW), "window": _tokens}, policy=st.just("streaming_llm")),
    _quest(),
    *map(_voted, VOTED),
    _delta(),
    _tactic(),
    _budgeted("quoka", PAGE_TOKENS),
    _budgeted("sparq", PAGE_TOKENS, channels=st.integers(1, 256)),
    _lowbit_top_p(),
    _budgeted("lowbit_top_k", PAGE_TOKENS),
    _verified_pages(),
)
prefill_policies = st.just({"policy": "dense"}) | _quoka_prefill()
terminations = _fields(
    {
        "scale": _ratio,
        "direction": st.floats(0, 2, exclude_min=True),
        "patience": st.integers(1, MAX_PATIENCE),
    }
)
verifications = _fields({"draft_tokens": st.integers(1, MAX_DRAFT_TOKENS) | st.just("auto")})


@st.composite
def _valid_policies(draw: st.DrawFn) -> Json:
    policy = draw(
        _fields(
            {
                "decode": decode_policies,
                "prefill": prefill_policies,
                "early_termination": terminations | st.none(),
                "keep": st.booleans(),
            }
        )
    )
    if policy.get("decode", {}).get("policy") in DRAFTS_ONLY:
        return {**policy, "prefill": {"policy": "dense"}, "keep": False, "verify": draw(verifications)}
    drafts = policy.get("decode", {}).get("policy", "dense") != "dense"
    is_dense_before = policy.get("prefill", {}).get("policy", "dense") == "dense"
    if drafts and is_dense_before and not policy.get("keep") and draw(st.booleans()):
        policy["verify"] = draw(verifications | st.none())
    return policy


valid_policies: st.SearchStrategy[Json] = _valid_policies()

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def mutated_policies(draw: st.DrawFn) -> Any:
    """A valid policy in which one member, at any depth, is replaced, renamed, removed or added."""
    policy = copy.deepcopy(draw(valid_policies))
    holders = [policy, *(value for value in policy.values() if isinstance(value, dict))]
    holder = draw(st.sampled_from(holders))
    name = draw(st.sampled_from(sorted(holder)) if holder else st.text(max_size=12))
    match draw(st.sampled_from(["replace", "rename", "remove", "add", "nothing"])):
        case "replace":
            holder[name] = draw(json_values)
        case "rename":
            holder[draw(st.text(max_size=60))] = holder.pop(name, None)
        case "remove":
            holder.pop(name, None)
        case "add":
            holder[draw(st.text(max_size=60))] = draw(json_values)
    return policy
