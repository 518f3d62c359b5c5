"""Quest, for the runtime."""

from __future__ import annotations

from winnow_kernels.decode.declaration import Crossover, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters
from winnow_kernels.decode.gpu_selector import SCRATCH_BYTES, Server
from winnow_kernels.decode.policy_batch import PolicyBatch
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quest.reference import QuestStep
from winnow_kernels.policies.quest.selector import KIND, QuestSelector
from winnow_kernels.selection.pages import pages_kept


class QuestDeclaration(Declaration[Quest]):
    """Whole pages, by the bounds of their keys."""

    kind = KIND
    crossover = Crossover(cpu=16_384, cuda=6144)
    columns = Columns(("pages", "full_layers"))
    index = PageBounds
    buffer_bytes = SCRATCH_BYTES

    def budget(self, parameters: Quest, prompt_length: int, length: int, page_size: int) -> int:
        return pages_kept(parameters.budget, 1, parameters.sinks, page_size) * page_size

    def step(self, batch: PolicyBatch) -> QuestStep:
        parameters = batch.parameters(Quest)
        step = QuestStep(batch.context, batch.scale, batch.termination, parameters, batch.indexes[PageBounds])
        batch.count_built(step.index_built_tokens)
        return step

    def own_parameters(self, parameters: Quest, prompt_length: int, page_size: int) -> OwnParameters:
        pages = pages_kept(parameters.budget, 1, parameters.sinks, page_size)
        return OwnParameters({"pages": pages, "full_layers": parameters.full_layers})

    def selector(self, server: Server) -> QuestSelector:
        return QuestSelector(server.indexes[PageBounds], server.step)


DECLARATION = QuestDeclaration()
