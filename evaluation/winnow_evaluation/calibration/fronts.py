"""The Pareto front: the policies that no other one beats in both accuracy and cost."""

from __future__ import annotations

from collections.abc import Iterable


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return those of points, each a relative cost and a loss, that are on the front, cheapest first.

    Costs are relative to dense attention. What costs as much as dense attention is not on
    the front: that loses nothing.
    """
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if cost < 1 and (not front or loss < front[-1][1]):
            front.append((cost, loss))
    return front
