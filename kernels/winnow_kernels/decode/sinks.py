"""Attention sinks: the first tokens of a context, which every sparse policy can be told to attend to always.

The softmax has to put its mass somewhere: many models put most of it on the first token wherever nothing else matters
(Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.1). A selection
that leaves that token out gives everything else too much weight.
"""

from __future__ import annotations


def check_sinks(sinks: int) -> None:
    """Refuse a bad number of sinks.

    Raises:
        ValueError: it is negative.
    """
    if sinks < 0:
        raise ValueError(f"sinks: must be at least 0; it is {sinks}")
