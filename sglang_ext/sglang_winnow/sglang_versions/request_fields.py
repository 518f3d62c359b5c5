"""Which fields of a request some releases of SGLang have and others lack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from packaging.version import Version

from sglang_winnow.sglang_versions.releases import OLDEST, RUNNING

SINCE: Final = {
    "max_thinking_tokens": Version("0.5.17"),
    "return_flat_raw_top_logprobs": Version("0.5.17"),
    "return_flat_raw_top_logprobs_b64": Version("0.5.17"),
    "cache_salt": Version("0.5.18"),
    "data_parallel_rank": Version("0.5.18"),
    "mm_content_hashes": Version("0.5.18"),
    "video_config": Version("0.5.19"),
    "kv_hints": Version("0.5.21"),
    "sampling_logprobs_mode": Version("0.5.21"),
    "token_indices_to_pool": Version("0.5.21"),
    "return_flat_raw_output_top_logprobs": Version("0.5.22"),
    "watermark": Version("0.5.22"),
    "mm_processor_kwargs": Version("0.5.23"),
}
"""Of ``GenerateReqInput``: the first release that has a field. All have those that are not here."""
GONE: Final = {"mm_data_mooncake": Version("0.5.19")}
"""Of ``GenerateReqInput``: the first release that has a field no more."""

PARAMETERS_SINCE: Final = {
    "beam_width": Version("0.5.19"),
    "ebnf_full_assistant": Version("0.5.20"),
    "watermark": Version("0.5.22"),
}
"""Sampling parameters that are not served, and the first release that has them."""


def present(fields: Iterable[str], running: Version = RUNNING) -> list[str]:
    """Return those of a request's fields that the running SGLang has."""
    return [
        name for name in fields if SINCE.get(name, OLDEST) <= running and not (name in GONE and GONE[name] <= running)
    ]
