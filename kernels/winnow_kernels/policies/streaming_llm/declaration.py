"""StreamingLLM, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.streaming_llm.reference import StreamingLLMStep
from winnow_kernels.policies.streaming_llm.selector import KIND, StreamingLLMSelector


class StreamingLLMDeclaration(Declaration[StreamingLLM]):
    """The same tokens in all layers, which nothing is read for."""

    kind = KIND
    crossover = Crossover(cpu=4096, cuda=0)
    columns = Columns(("window",))

    def budget(self, parameters: StreamingLLM, prompt_length: int, length: int, page_size: int) -> int:
        return parameters.sinks + parameters.window

    def step(self, batch: PolicyBatch) -> StreamingLLMStep:
        return StreamingLLMStep(batch.context, batch.scale, batch.termination, batch.parameters(StreamingLLM))

    def own_parameters(self, parameters: StreamingLLM, prompt_length: int, page_size: int) -> OwnParameters:
        return OwnParameters({"window": parameters.window})

    def selector(self, server: Server) -> StreamingLLMSelector:
        return StreamingLLMSelector()


DECLARATION = StreamingLLMDeclaration()
