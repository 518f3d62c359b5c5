"""Explanations of what policies attend to, as clients ask for them and read them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from winnow_kernels.contract.explanation import MAX_DECODE_STEPS, Heads, Layers, Steps
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service.policies.names import POLICY_NAME
from winnow_service.policies.resource import Inline, Strict

MAX_PROMPT_CHARACTERS: Final = 1_000_000
MAX_MESSAGES: Final = 1000
MAX_POLICIES: Final = 4
DEFAULT_DECODE_STEPS: Final = 8


class _DescribedAsAsked:
    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [handler(AttentionPolicy.__pydantic_core_schema__), {"type": "string", "pattern": POLICY_NAME}]
        }


# A policy, or the name of one: read by the one parser of policies, whose errors name the field and its bound.
Asked = Annotated[Any, _DescribedAsAsked()]


class ChatMessage(Strict):
    """A message of a conversation, of text alone."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]


class ExplainQuestion(Strict):
    """What is to be explained: a prompt, or messages, under policies.

    Attributes:
        decode_steps: how many steps are decoded, if the answer does not end before.
        steps: which of them are explained; by default the first and the last.
        layers: by default four, spread over those that see the whole context.
        heads: KV heads; by default the first and the last.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    policies: Annotated[list[Asked], Field(min_length=1, max_length=MAX_POLICIES)]
    decode_steps: Annotated[int, Field(ge=1, le=MAX_DECODE_STEPS)] = DEFAULT_DECODE_STEPS
    steps: Steps | None = None
    layers: Layers | None = None
    heads: Heads | None = None

    @model_validator(mode="after")
    def _is_one_prompt_and_its_steps(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("explain", "prompt: give exactly one of prompt and messages")
        if sum(len(message.content) for message in self.messages or ()) > MAX_PROMPT_CHARACTERS:
            raise PydanticCustomError(
                "explain",
                "messages: must have at most {limit} characters in all",
                {"limit": MAX_PROMPT_CHARACTERS},
            )
        if self.steps is not None and self.steps[-1] > self.decode_steps:
            raise PydanticCustomError(
                "explain", "steps: must be at most decode_steps, {steps}", {"steps": self.decode_steps}
            )
        return self


class TokenizedText(BaseModel):
    """A text, and where its tokens are.

    Attributes:
        text: as the model reads it, of messages with the chat template. Null if the runtime has no tokenizer.
        offsets: where each token begins and ends, in characters (code points). Null if the tokenizer does not tell.
    """

    text: str | None
    offsets: list[tuple[int, int]] | None


class ExplainedHead(BaseModel):
    """What a KV head attended to in one layer of one decode step.

    Positions count the tokens of the prompt, and on from there those of the output.

    Attributes:
        dense: whether the step read everything, whatever its policy.
        attended: runs of positions: the first of each, and the one behind its last.
        attended_tokens: how many positions that is.
        share: of dense attention's weights, how much the attended tokens hold.
        weights: of dense attention, from the same query and KV cache, one for each position: means over the query
            heads of the KV head, rounded to six digits behind the point.
    """

    step: int
    layer: int
    head: int
    dense: bool
    attended: list[tuple[int, int]]
    attended_tokens: int
    share: float
    weights: list[float]


class ExplainedPolicy(BaseModel):
    """One policy's answer to the prompt, and what it attended to.

    Attributes:
        policy: the name under which it was asked for; null if it was given itself.
        attention: the policy as the model runs it.
        warnings: what the key's bounds have changed, and what else a client should know.
        output: the answer, of greedy decoding.
        decode_steps: that the answer took.
        missing_steps: that are not explained: the answer ended before them, or no decode step has computed them.
        statistics: what the answer's attention cost, as every answer tells.
    """

    policy: str | None
    attention: Inline
    fingerprint: str
    warnings: list[str]
    output: TokenizedText
    decode_steps: int
    missing_steps: list[int]
    statistics: dict[str, Any]
    entries: list[ExplainedHead]


class Explanation(BaseModel):
    """What each policy attended to, in the order in which they were asked for."""

    prompt: TokenizedText
    steps: list[int]
    layers: list[int]
    heads: list[int]
    policies: list[ExplainedPolicy]
