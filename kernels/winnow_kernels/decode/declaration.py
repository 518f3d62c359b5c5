"""What a decode policy declares: all that the runtime must know of it beside its parameters."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

from winnow_kernels.contract.fields import Parameters
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import Selector, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.decode.request import PromptSelection
from winnow_kernels.decode.step import DecodeStep
from winnow_kernels.indexes.pool_indexes import PoolIndex

ALWAYS: Final = sys.maxsize
"""What ``covered_until`` says of requests of which no step reads less."""

P = TypeVar("P", bound=Parameters)


@dataclass(frozen=True)
class Crossover:
    """The longest contexts, in tokens, at which the policy was no faster than dense attention: there a step runs dense.

    On a CPU by benchmarks/cpu/attention.py; on a GPU by benchmarks/serving/serve.py, between the lengths measured on a
    straight line (8 requests of a Llama-3.1-8B's shape on an H200, ``benchmarks/results/serve.json``).
    """

    cpu: int
    cuda: int


class Declaration(ABC, Generic[P]):
    """A decode policy.

    Attributes:
        kind: policies of one kind share a selector and CUDA graphs; named after one of them.
        crossover: of the policy.
        columns: what its rows have on a GPU.
        index: over the KV pool, which it reads; None for none.
        has_own_layers: whether there are layers in which the selector attends by itself.
        buffer_bytes: of a GPU's memory that its selector takes at most, beside the index.
        longest_on_gpu: tokens of a context, at most, that its kernels can serve; None for as many as all kernels.
        pays_on_gpu: whether a server on a GPU was seen to be faster with it than densely. A GPU server serves what was
            not only if it is named.
        releases: whether requests may give back a part of their prompts. No step of theirs can read the whole context
            then: on a GPU selections must have room for all that they read, however long the context is.
    """

    kind: ClassVar[str]
    crossover: ClassVar[Crossover]
    columns: ClassVar[Columns] = Columns()
    index: ClassVar[type[PoolIndex] | None] = None
    has_own_layers: ClassVar[bool] = False
    buffer_bytes: ClassVar[int] = 0
    longest_on_gpu: ClassVar[int | None] = None
    pays_on_gpu: ClassVar[bool] = True
    releases: ClassVar[bool] = False

    @abstractmethod
    def budget(self, parameters: P, prompt_length: int, length: int, page_size: int) -> int | None:
        """Return the tokens that a KV head may read at a context of ``length`` tokens; None if there is no such bound.

        That is the budget, or what is always kept where this is more.
        """

    def covered_until(self, parameters: P, prompt_length: int, page_size: int) -> int:
        """Return the longest context, in tokens, that a step reads whole, whatever the crossover."""
        return self.budget(parameters, prompt_length, prompt_length, page_size) or 0

    def prompt_selection(self, parameters: P, prompt_length: int, layers: Sequence[int]) -> PromptSelection | None:
        """Return what a request that is about to be prefilled will keep of its prompt; None if it keeps all.

        ``layers`` are the numbers of those on which it acts.
        """
        del parameters, prompt_length, layers
        return None

    @abstractmethod
    def step(self, batch: PolicyBatch) -> DecodeStep:
        """Return a decode step of the torch reference."""

    @abstractmethod
    def own_parameters(self, parameters: P, prompt_length: int, page_size: int) -> OwnParameters:
        """Return what a request has in ``columns``."""

    @abstractmethod
    def selector(self, server: Server) -> Selector:
        """Return what selects on a GPU for all requests of this kind."""

    def order_matters(self, parameters: P, length: int) -> bool:
        """Return whether a step may leave out tokens that are selected, from the end, without early termination."""
        del parameters, length
        return False

    def own_layers(self, parameters: P) -> Collection[int]:
        """Return the layers in which the selector attends by itself."""
        del parameters
        return ()
