"""Drawing an explanation on a terminal: shares by layer, and the prompt as a heat strip."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from winnow_service.cli.explanation import (
    DECADES,
    LayerShare,
    Token,
    heat,
    share_of,
    steps_found,
    title,
    tokens_of,
)

_MAX_DRAWN: Final = 800
"""Tokens of a strip that are drawn; of a longer one its ends, and what is near its heaviest tokens."""
_ENDS: Final = 48
_AROUND: Final = 6
_DRAWN_WEIGHTS: Final = 0.02
# From cold to hot, of what was attended to and of what was missed: xterm's colours, with text that stays legible.
_ATTENDED: Final = ("color(230)", "color(229)", "color(222)", "color(215)", "color(208)")
_MISSED: Final = ("color(255)", "color(195)", "color(153)", "color(117)", "color(75)")


def draw(console: Console, explanation: dict[str, Any]) -> None:
    """Draw what each policy attended to."""
    for policy in explanation["policies"]:
        console.print(Text(plain(title(policy)), style="bold"))
        for warning in policy["warnings"]:
            console.print(Text(f"  {plain(warning)}", style="yellow"))
        if policy["missing_steps"]:
            missing = ", ".join(map(str, policy["missing_steps"]))
            console.print(
                f"  Not explained: step {missing}; the answer took {policy['decode_steps']} steps.", highlight=False
            )
        if steps := steps_found(policy):
            console.print(_shares(policy, explanation["layers"], steps, console))
            console.print(f"  The context in step {steps[-1]}, over these layers and heads:", highlight=False)
            console.print(_strip(tokens_of(explanation["prompt"], policy, steps[-1])), soft_wrap=False)
        console.print()
    console.print(_legend())


def plain(text: str) -> str:
    """Return a text with nothing in it that a terminal would obey."""
    return "".join(
        character if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs") else "\u00b7"
        for character in text
    )


def _shares(policy: dict[str, Any], layers: Sequence[int], steps: Sequence[int], console: Console) -> Table:
    table = Table(
        "layer", box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN, title_justify="left", padding=(0, 1)
    )
    for step in steps:
        table.add_column(f"step {step}: share", justify="right")
        table.add_column("tokens read", justify="right")
    for layer in [*layers, None]:
        cells = [cell for step in steps for cell in _cells(share_of(policy, layer, step))]
        table.add_row("all" if layer is None else str(layer), *cells)
    return table


def _cells(share: LayerShare | None) -> tuple[str, str]:
    if share is None:
        return "", ""
    return f"{share.share:.1%}", f"{share.attended:.1%}{' (dense step)' if share.dense else ''}"


def _strip(tokens: Sequence[Token]) -> Text:
    largest = max(token.weight for token in tokens)
    drawn = _drawn(tokens)
    strip, before = Text(), -1
    for position in drawn:
        if position > before + 1:
            strip.append(f" \u2026 {position - before - 1} tokens \u2026 ", style="dim italic")
        token = tokens[position]
        strip.append(plain(token.text), style=_style(token, largest))
        before = position
    return strip


def _drawn(tokens: Sequence[Token]) -> list[int]:
    """Return the positions that are drawn, in order."""
    if len(tokens) <= _MAX_DRAWN:
        return list(range(len(tokens)))
    drawn = {*range(_ENDS), *range(len(tokens) - _ENDS, len(tokens))}
    for token in sorted(tokens, key=lambda token: -token.weight):
        around = range(max(0, token.position - _AROUND), min(len(tokens), token.position + _AROUND + 1))
        if len(drawn | set(around)) > _MAX_DRAWN:
            break
        drawn.update(around)
    return sorted(drawn)


def _style(token: Token, largest: float) -> Style:
    colours = _ATTENDED if token.attended > 0 else _MISSED
    level = heat(token.weight, largest)
    # Without colours, what nobody attended to is told by its underline.
    missed = token.attended == 0
    if level <= _DRAWN_WEIGHTS:
        return Style(dim=missed, underline=missed)
    return Style(color="black", bgcolor=colours[min(len(colours) - 1, int(level * len(colours)))], underline=missed)


def _legend() -> Text:
    legend = Text()
    legend.append(" attended ", style=Style(color="black", bgcolor=_ATTENDED[-1]))
    legend.append("  ")
    legend.append(" attended by no head ", style=Style(color="black", bgcolor=_MISSED[-1], underline=True))
    legend.append(
        f"  Strength: the weight that dense attention gives a token, by its logarithm, down to {DECADES} powers of ten"
        " below the largest."
    )
    return legend
