"""An SGLang plugin for benchmarks: ``tactic`` takes as many tokens as in a trace, whatever random weights attend to.

    python -m benchmarks.serving.serve run \
        --policy 'tactic, lengths of a trace={"decode": {"policy": "tactic", "p": 0.75}}' \
        --winnow-environment PYTHONPATH=benchmarks/kernels/tactic_trace/plugin:. \
        --winnow-environment TACTIC_TRACE=benchmarks/kernels/tactic_trace/generator-32k.json

With random weights attention is diffuse, and ``tactic`` reads far more than with a trained model. Here everything is
scored, ranked, sampled, fitted, united and attended to as ever, but for how many tokens of its list each query head
takes: that comes, for each layer, query head and step, from a trace (``benchmarks.kernels.tactic_trace.record``), in
proportion to the tokens in clusters. A request's ``p`` must be one of the trace's. Query heads of a group share as much
of their weights as makes unions about as large as the trace's; the server tells how large they are
(``attended_ratio``).

All requests for ``tactic`` on such a server do so. Layers that the policy leaves dense stay so, and other policies are
what they are. A server that cannot do as the trace says does not start. Where SGLang cannot even import this, it only
logs that: a server that has the plugin says ``IN_PLACE``, and needs the repository's root on its path, too.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from benchmarks.kernels.tactic_trace.alike_heads import make_heads_alike
from benchmarks.kernels.tactic_trace.given_fit import GivenFit
from benchmarks.kernels.tactic_trace.lengths import LengthTrace, ServedLengths
from sglang_winnow.hooks import Hook, install
from winnow_kernels.policies.tactic.gpu import selection as tactic
from winnow_kernels.policies.tactic.parameters import Tactic

if TYPE_CHECKING:
    from torch import nn

    from winnow_kernels.decode.gpu_step import Step
    from winnow_kernels.decode.request import Request
    from winnow_kernels.indexes.clusters import ClusterIndex
    from winnow_kernels.policies.tactic.selector import TacticSelector

ENVIRONMENT: Final = "TACTIC_TRACE"
IN_PLACE: Final = "tactic takes as many tokens as a trace says"
_SELECTOR: Final = "winnow_kernels.policies.tactic.selector.TacticSelector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the trace in place; SGLang calls this in each of its processes.

    Raises:
        SystemExit: the environment names no trace.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        raise SystemExit(f"{ENVIRONMENT}: must name a trace of lengths")
    try:
        trace = LengthTrace.read(Path(path))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{ENVIRONMENT}: {error}") from error
    install(hooks_of(trace))
    logger.warning("%s: %s", IN_PLACE, path)


def hooks_of(trace: LengthTrace) -> list[Hook]:
    """Return what puts ``trace`` in place; the fit's kernel is replaced where it is launched."""
    fit = GivenFit()
    # What launches it finds it by name.
    vars(tactic)["fit_kernel"] = fit

    def before_a_layer(_selector: TacticSelector, layer: int, *_: object) -> None:
        fit.layer = layer

    def after_construction(
        _nothing: None,
        _selector: TacticSelector,
        _clusters: ClusterIndex,
        _scale: float,
        query_heads: int,
        _requests: int,
        step: Step,
        *_: object,
    ) -> None:
        fit.lengths = ServedLengths.of(trace, step.counts.shape[0], query_heads, step.slots.device)

    def before_a_request(_selector: TacticSelector, request: Request, *_: object) -> None:
        check_share(request.decode, trace)

    def after_loading(model: nn.Module, *_: object, **__: object) -> None:
        make_heads_alike(model, trace.correlation)

    return [
        Hook(f"{_SELECTOR}.__init__", after_construction, HookType.AFTER),
        Hook(f"{_SELECTOR}.enter", before_a_request, HookType.BEFORE),
        Hook(f"{_SELECTOR}.select", before_a_layer, HookType.BEFORE),
        Hook("sglang.srt.model_loader.loader.DummyModelLoader.load_model", after_loading, HookType.AFTER),
    ]


def check_share(policy: Any, trace: LengthTrace) -> None:
    """Raise ValueError if the trace does not know how much ``policy`` takes."""
    if isinstance(policy, Tactic) and policy.p not in trace.shares:
        raise ValueError(f"p: must be one of the trace's, {trace.shares}; it is {policy.p}")
