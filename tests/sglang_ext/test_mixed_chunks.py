"""In a pass that prefills some requests, the others decode where their newest tokens lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_winnow.attention_registration import _place_decoding_rows


def test_whatever_sglang_knows_of_their_tokens() -> None:
    # The second is one token too far, as if the newest one had not been written yet.
    batch: Any = SimpleNamespace(prefix_lens=[0, 128, 40, 51])
    running: Any = SimpleNamespace(reqs=["one", "another"], seq_lens_cpu=torch.tensor([41, 51]))
    _place_decoding_rows(None, batch, running)
    assert batch.prefix_lens == [0, 128, 40, 50]
