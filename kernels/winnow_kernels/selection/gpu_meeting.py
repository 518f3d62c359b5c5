"""Programs of one launch that wait for each other, where a second launch would cost more than the wait."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def meet(counter_ptr: tl.tensor, arrivals: tl.tensor) -> None:
    """Return when as many programs as ``arrivals`` have come here; what they wrote before may be read then.

    All of them must fit the device at once. It starts programs in the order of their numbers, so neighbours do not wait
    for what cannot start before they end, however large the grid is. What others wrote is to be read past the first
    level of caches (``cache_modifier=".cg"``).

    Args:
        counter_ptr: of an int32, to which each program adds one at each meeting.
        arrivals: what it counts up to: the programs, for all meetings so far.
    """
    # What all threads of this program have written must be there before it arrives.
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while seen < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def leave(counter_ptr: tl.tensor, arrivals: tl.tensor) -> tl.tensor:
    """Return, without waiting, whether this program is the last that comes here; the counter is 0 then.

    Args:
        counter_ptr: of ``meet``.
        arrivals: what it counts up to with this.
    """
    # What all threads of this program have written must be there before it arrives.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last
