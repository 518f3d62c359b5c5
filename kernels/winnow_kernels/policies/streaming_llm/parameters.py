"""The parameters of StreamingLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow_kernels.contract.fields import MAX_WINDOW, Sparse, Tokens


class StreamingLLM(Sparse):
    """Attend to the first ``sinks`` tokens and the ``window`` newest."""

    policy: Literal["streaming_llm"] = "streaming_llm"
    sinks: Annotated[int, Field(ge=0, le=MAX_WINDOW)] = 4
    window: Tokens = 1024
