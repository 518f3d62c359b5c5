"""An SGLang plugin: norms, activations and rotations in torch, since SGLang's kernels for CUDA take no float32."""

from __future__ import annotations

import logging

from sglang.srt.layers.utils import multi_platform

logger = logging.getLogger(__name__)


def register() -> None:
    """Have every layer of a model computed by torch. What attends is no such layer."""
    multi_platform.MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    logger.warning("norms and activations are torch's")
