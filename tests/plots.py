"""Whether a plot can be read where the documentation shows it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

from winnow_evaluation.plotting import SMALLEST_FONT, WIDTH_PIXELS

_PIXELS_PER_POINT = 96 / 72
_WIDEST = 3.0


def assert_readable(path: Path) -> None:
    """Check an SVG's fonts as a page of ``WIDTH_PIXELS`` shows them, and that it is no strip."""
    drawn = path.read_text()
    root = ET.fromstring(drawn)
    width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    # A page makes plots smaller that are wider, and leaves others as they are.
    scale = min(1.0, WIDTH_PIXELS / (width * _PIXELS_PER_POINT))
    sizes = [scale * float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", drawn)]
    assert sizes
    assert min(sizes) >= SMALLEST_FONT - 1e-6, f"{path.name}: {min(sizes):.1f} points"
    assert width / height <= _WIDEST, f"{path.name} is {width / height:.1f} times as wide as high"
