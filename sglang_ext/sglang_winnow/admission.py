"""What a request must satisfy before SGLang's scheduler sees it.

The scheduler trusts what reaches it: an error there ends the server. These checks run in the process that takes
requests, where a ``ValueError`` becomes an answer with status 400.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sglang_winnow.audit_share import first_offset
from sglang_winnow.explain_requests import explanation_of
from sglang_winnow.left_policies import LEFT
from sglang_winnow.profile_settings import default_kl, load_requests, under_load_kl
from sglang_winnow.quality_choice import Choice, choose
from sglang_winnow.radix import NAMESPACE_PREFIX, namespace_of
from sglang_winnow.sampling_parameters import INT64_MAX, SamplingParameters, TokenId, Vocabulary
from sglang_winnow.server_information import PARAMETER, ServedModel, served_model_of
from sglang_winnow.sglang_versions.arguments import resolved
from sglang_winnow.sglang_versions.prefix_cache import cached_length_of
from sglang_winnow.sglang_versions.request_fields import present
from winnow_kernels.contract.explanation import PARAMETER as EXPLAIN
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quality import Quality

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

# One body may ask for so many sequences: prompts times samples of each.
MAX_SEQUENCES = 4096
MAX_TOP_LOGPROBS = 128
MAX_TOKEN_IDS_LOGPROB = 1024
PROMPTS: Final = ("text", "input_ids")
MEDIA: Final = ("image_data", "video_data", "audio_data", "modalities", "mm_content_hashes")
MEDIA_SETTINGS: Final = ("video_config", "mm_processor_kwargs")
# Set by SGLang's own processes. It accepts them in a body too.
INTERNAL: Final = (
    "http_worker_ipc",
    "lora_id",
    "positional_embed_overrides",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "mm_data_mooncake",
    "encoder_urls",
)

# Of the request, among its own ``custom_params``.
_REFERENCE: Final = "__req__"

# With these a request can end SGLang's scheduler.
NOT_SERVED: Final = {
    "session_params": "send the whole conversation, of which the radix cache knows what it has seen",
    "input_embeds": "send text or input_ids",
    "token_indices_to_pool": "ask for the log probabilities of the whole prompt",
    "kv_hints": "the radix cache keeps what was used last",
    "watermark": "tokens are drawn from the model's own distribution",
}

# For SGLang these are of one token of a row in each step.
_NOT_VERIFIED: Final = ("return_sampling_mask", "return_hidden_states", "custom_logit_processor")
_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
# Their grammars take back the drafts that fall. Without a backend SGLang refuses grammars itself.
_TAKE_BACK: Final = ("xgrammar", "llguidance", "none")

_STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False)
_Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]


@dataclass(frozen=True)
class Limits:
    """What the model and the server's command line allow. Lengths are in tokens.

    Attributes:
        model: what a policy is checked against.
        grammar_backend: SGLang's name of it.
        later_parameters: sampling parameters of the running SGLang that ``SamplingParameters`` does not know.
    """

    vocab_size: int
    model: ServedModel
    metric_labels: frozenset[str] = frozenset()
    multi_item_scoring: bool = False
    multimodal: bool = False
    grammar_backend: str = "none"
    later_parameters: frozenset[str] = frozenset()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocab_size)


def _refuse_namespace(extra_key: str) -> str:
    if extra_key.startswith(NAMESPACE_PREFIX):
        raise ValueError(f"must not begin with {NAMESPACE_PREFIX}, which is for prefixes of sparse prefill")
    return extra_key


class _PerSequence(BaseModel):
    """What each prompt of a body may have of its own, in a list as long as the prompts."""

    model_config = _STRICT

    rid: str | None
    sampling_params: SamplingParameters | None
    return_logprob: bool | None
    logprob_start_len: int | None = Field(ge=-1)
    top_logprobs_num: int | None = Field(ge=0, le=MAX_TOP_LOGPROBS)
    token_ids_logprob: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS_LOGPROB)] | None
    return_sampling_mask: bool | None
    return_hidden_states: bool | None
    lora_path: str | None
    custom_logit_processor: str | None
    extra_key: Annotated[str, AfterValidator(_refuse_namespace)] | None
    cache_salt: str | None = None
    sampling_logprobs_mode: Literal["selected", "support"] | None = None
    bootstrap_host: str | None
    bootstrap_port: _Int64 | None
    bootstrap_room: _Int64 | None
    bootstrap_pair_key: str | None
    decode_tp_size: _Int64 | None


class _Shared(BaseModel):
    """What all prompts of a body share."""

    model_config = _STRICT

    session_id: str | None
    stream: bool | None
    priority: _Int64 | None
    routed_dp_rank: _Int64 | None
    data_parallel_rank: _Int64 | None = None
    disagg_prefill_dp_rank: _Int64 | None
    routing_key: str | None
    routed_experts_start_len: int = Field(ge=0, le=INT64_MAX)
    return_routed_experts: bool | None
    return_indexer_topk: bool | None
    return_text_in_logprobs: bool | None
    return_prompt_token_ids: bool | None
    return_flat_raw_top_logprobs: bool | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None
    return_flat_raw_output_top_logprobs: bool | None = None
    return_entropy: bool | None
    return_bytes: bool | None
    require_reasoning: bool | None
    max_thinking_tokens: int | None = Field(None, ge=0, le=INT64_MAX)
    log_metrics: bool | None
    no_logs: bool | None
    background: bool | None
    received_time: float | None
    custom_labels: dict[str, str] | None


_TEXT: Final = TypeAdapter(str)
# The vocabulary's bound is checked at once: a prompt has many thousands of ids.
_IDS: Final = TypeAdapter(Annotated[list[int], Field(min_length=1)])


def check_request(request: GenerateReqInput, limits: Limits) -> None:
    """Check a request before SGLang has touched it.

    Raises:
        ValueError: a field is wrong; the message names it and the bound.
    """
    _check_unsupported(request, limits)
    prompts, batched = _prompts(request)
    _check_prompts(request, prompts, limits)
    _validate("", _Shared, {name: getattr(request, name) for name in present(_Shared.model_fields)}, limits)
    _check_labels(request, limits)
    samples = _check_sequences(request, len(prompts), batched, limits)
    if len(prompts) * samples > MAX_SEQUENCES:
        raise ValueError(
            f"sampling_params.n: at most {MAX_SEQUENCES} sequences for each request,"
            f" not {samples} for each of {len(prompts)} prompts"
        )


def check_custom_params(custom: Any, limits: Limits) -> None:
    """Check ``custom_params`` by themselves, where a form of SGLang's cannot answer with an error later.

    Raises:
        ValueError: they are not what SGLang carries, or have a policy that cannot be served.
    """
    _validate("", SamplingParameters, {"custom_params": custom}, limits)
    if custom and EXPLAIN in custom:
        raise PolicyError(EXPLAIN, "is not served in this form: ask /generate or /v1/chat/completions")
    limits.model.policy_of(custom)


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Check a prompt as the model will read it, whether it came as text or as ids; ValueError if it is wrong."""
    if not token_ids:
        raise ValueError("the prompt has no tokens; it must have at least 1")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ValueError(f"the prompt has a token outside the vocabulary; token ids must be from 0 to {vocab_size - 1}")


def attach_policy(
    req: Req, model: ServedModel, cache: BasePrefixCache | None = None, requests: Callable[[], int] = lambda: 0
) -> None:
    """Give a request that reached the scheduler its policy, as ``winnow_state``, and its part of the radix cache.

    Where the request leaves its policy to the server, it is chosen here, where the length of the prompt is known and
    ``cache`` can be asked, and how many other ``requests`` there are.

    A policy that cannot be served gets the request an answer with status 400: an error would end the server.
    """
    # Kernels are imported where they are used, not where requests are taken.
    from sglang_winnow.request_state import RequestState  # noqa: PLC0415
    from winnow_kernels.decode.explanation import Explanation  # noqa: PLC0415

    parameters = req.sampling_params.custom_params
    asked = choice = None
    try:
        policy = model.policy_of(parameters)
        if policy.quality is not None:
            choice = choice_of(req, policy.quality, model, cache, requests)
            policy = choice.policy.model_copy(update={"audit": policy.audit})
        asked = explanation_of(parameters, model, policy)
    except PolicyError as error:
        req.set_finish_with_abort(str(error))
        policy = AttentionPolicy()
    if parameters is not None and req.custom_logit_processor is None:
        # Nothing else reads SGLang's reference to the request, which would keep a finished one in memory.
        others = {name: value for name, value in parameters.items() if name not in (PARAMETER, EXPLAIN, _REFERENCE)}
        req.sampling_params.custom_params = others or None
    if model.has_policies:
        offset = first_offset(req.rid)
        req.winnow_state = RequestState(policy, len(req.origin_input_ids), audit_offset=offset, choice=choice)
        if asked is not None:
            req.winnow_state.explanation = Explanation(asked)
        req.extra_key = namespace_of(policy, req.extra_key, model.page_size)


def choice_of(
    req: Req, quality: Quality, model: ServedModel, cache: BasePrefixCache | None, requests: Callable[[], int]
) -> Choice:
    """Return the policy that a request gets which leaves it to the server.

    Args:
        req: the request, before it is queued.
        quality: what its answer must keep.
        model: with the profile to choose from.
        cache: where prefixes are kept; None for nowhere.
        requests: tells how many other requests the server has.

    Raises:
        PolicyError: no policy that it allows keeps the quality.
    """
    from sglang_winnow.crossover import crossover_tokens  # noqa: PLC0415

    assert model.profile is not None

    def cached(prefilled: AttentionPolicy) -> int:
        namespace = namespace_of(prefilled, req.extra_key, model.page_size)
        return 0 if cache is None else cached_length_of(cache, req, namespace)

    return choose(
        quality,
        len(req.origin_input_ids),
        model.choices,
        model.profile.lengths,
        default_kl=default_kl(),
        cached=cached,
        dense_until=crossover_tokens,
        left=LEFT.find,
        load=_load(requests),
        under_load_kl=under_load_kl(),
    )


def _load(requests: Callable[[], int]) -> int | None:
    from_requests_on = load_requests()
    if from_requests_on is None:
        return None
    number = requests()
    return number if number >= from_requests_on else None


def limits_of(manager: TokenizerManager) -> Limits:
    """Return what the model and the command line of a server allow."""
    arguments = resolved(manager.server_args)
    return Limits(
        vocab_size=manager.model_config.vocab_size,
        model=served_model_of(manager),
        metric_labels=frozenset(arguments.tokenizer_metrics_allowed_custom_labels or ()),
        multi_item_scoring=bool(arguments.enable_mis),
        grammar_backend=str(arguments.grammar_backend or "none"),
        multimodal=bool(manager.model_config.is_multimodal),
        later_parameters=_later_parameters(),
    )


@cache
def _later_parameters() -> frozenset[str]:
    from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

    return frozenset(SamplingParams.__struct_fields__) - SamplingParameters.model_fields.keys()


def _check_unsupported(request: GenerateReqInput, limits: Limits) -> None:
    for name in present(INTERNAL):
        if getattr(request, name) is not None:
            raise ValueError(f"{name}: set by the server, not by clients")
    for name in present(NOT_SERVED):
        if getattr(request, name) is not None:
            raise ValueError(f"{name}: not served: {NOT_SERVED[name]}")
    for name in present((*MEDIA, *MEDIA_SETTINGS)):
        if getattr(request, name) and not limits.multimodal:
            raise ValueError(f"{name}: this model reads text only")
    if request.multi_item_delimiter_indices is not None and not limits.multi_item_scoring:
        raise ValueError("multi_item_delimiter_indices: the server was started without --enable-mis")


def _check_labels(request: GenerateReqInput, limits: Limits) -> None:
    # A label that the server's metrics lack is an error when the first token is counted.
    if unknown := set(request.custom_labels or ()) - limits.metric_labels:
        allowed = ", ".join(sorted(limits.metric_labels)) or "none"
        raise ValueError(f"custom_labels: {_plain(min(unknown))} is not among the server's labels ({allowed})")


def _prompts(request: GenerateReqInput) -> tuple[Sequence[Any], bool]:
    """Return the prompts, and whether the body had a list of them."""
    given = [name for name in PROMPTS if getattr(request, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(PROMPTS)}; given: {', '.join(given) or 'none'}")
    (name,) = given
    prompt = getattr(request, name)
    if name == "text" and isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{name}: must be a list that is not empty{' or a string' if name == 'text' else ''}")
    if name == "text" or isinstance(prompt[0], list):
        return prompt, True
    return [prompt], False


def _check_prompts(request: GenerateReqInput, prompts: Sequence[Any], limits: Limits) -> None:
    for prompt in prompts:
        if request.text is not None:
            _validate("text", _TEXT, prompt, limits)
            if not prompt and not limits.multimodal:
                raise ValueError("text: must have at least 1 character")
        else:
            _validate("input_ids", _IDS, prompt, limits)
            if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
                raise ValueError(f"input_ids: token ids must be from 0 to {limits.vocab_size - 1}")


def _check_sequences(request: GenerateReqInput, count: int, batched: bool, limits: Limits) -> int:
    """Check what may differ between prompts; return how many samples each has."""
    columns = {name: getattr(request, name) for name in present(_PerSequence.model_fields)}
    # SGLang makes the other ids of a batch from one.
    lists = {name: values for name, values in columns.items() if _is_per_prompt(name, values)}
    media = {name: getattr(request, name) for name in present(MEDIA)} if batched else {}
    lists |= {name: values for name, values in media.items() if isinstance(values, list) and values}
    for name, values in lists.items():
        if not batched:
            raise ValueError(f"{name}: a list is for a list of prompts")
        if len(values) != count:
            raise ValueError(f"{name}: {len(values)} values for {count} prompts")
    samples = set()
    for index in range(count if lists else 1):
        row = {name: lists[name][index] if name in lists else value for name, value in columns.items()}
        row["sampling_params"] = _without_unset(row["sampling_params"], limits.later_parameters)
        checked = _validate("", _PerSequence, row, limits)
        if (checked.logprob_start_len or -1) > limits.model.context_length:
            raise ValueError(f"logprob_start_len: at most {limits.model.context_length}, the model's context length")
        parameters = checked.sampling_params
        policy = limits.model.policy_of(parameters and parameters.custom_params)
        if explanation_of(parameters and parameters.custom_params, limits.model, policy) is not None:
            _check_explained(request, parameters, batched=batched)
        if policy.verify is not None:
            _check_verified(checked, limits)
        samples.add((parameters and parameters.n) or 1)
    if len(samples) > 1:
        raise ValueError("sampling_params.n: must be the same for all prompts")
    (number,) = samples
    if number > 1 and "return_hidden_states" in lists:
        raise ValueError("return_hidden_states: cannot be a list when sampling_params.n is more than 1")
    return number


def _check_verified(row: _PerSequence, limits: Limits) -> None:
    """Refuse what is not served together with verification."""
    for name in _NOT_VERIFIED:
        if getattr(row, name):
            raise ValueError(f"{name}: is not served with attention.verify")
    if row.sampling_params is None or limits.grammar_backend in _TAKE_BACK:
        return
    if given := [name for name in _GRAMMARS if getattr(row.sampling_params, name)]:
        raise ValueError(
            f"sampling_params.{given[0]}: is not served with attention.verify by --grammar-backend"
            f" {limits.grammar_backend}, which cannot take tokens back; start the server with llguidance or xgrammar"
        )


def _check_explained(request: GenerateReqInput, parameters: SamplingParameters | None, *, batched: bool) -> None:
    if batched:
        raise ValueError(f"{EXPLAIN}: is for a single prompt, not a list of them")
    for name in present(MEDIA):
        if getattr(request, name):
            problem = f"must not be given together with {name}: explanations are of prompts of text alone"
            raise PolicyError(EXPLAIN, problem)
    if ((parameters and parameters.n) or 1) > 1:
        raise ValueError(f"{EXPLAIN}: is for a single sample; sampling_params.n must be 1")


def _without_unset(parameters: object, later: frozenset[str]) -> object:
    # SGLang's OpenAI forms fill in every parameter, those that are not known here with None.
    if not isinstance(parameters, dict):
        return parameters
    return {name: value for name, value in parameters.items() if value is not None or name not in later}


def _is_per_prompt(name: str, value: object) -> bool:
    if name == "token_ids_logprob":
        return isinstance(value, list) and any(isinstance(item, list) or item is None for item in value)
    return isinstance(value, list)


def _validate(field: str, kind: type[BaseModel] | TypeAdapter[Any], value: object, limits: Limits) -> Any:
    """Validate ``value``; the ValueError says which part of ``field`` is wrong, in ASCII and without what was sent."""
    validate = kind.validate_python if isinstance(kind, TypeAdapter) else kind.model_validate
    try:
        return validate(value, strict=True, context=limits.vocabulary)
    except ValidationError as error:
        # What else is wrong shows when this is put right.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(_plain(str(part)) for part in (field, *first["loc"]) if part != "")
        raise ValueError(f"{path}: {_plain(first['msg'].removeprefix('Value error, '))}") from None


def _plain(text: str) -> str:
    return text[:200].encode("ascii", "backslashreplace").decode()
