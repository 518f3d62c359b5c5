"""An explanation as one HTML file that needs nothing else: no other address, no library.

The answer is in the page as data. Its script puts all that it draws into text nodes, and no other script may run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from string import Template
from typing import Any, Final

from winnow_service.cli.explanation import share_of, steps_found, title

_TEMPLATE: Final = "explain_page.html"
# What could end the element that the data is in, or a line of a script.
_ESCAPED: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page(explanation: dict[str, Any]) -> str:
    """Return the page that shows an explanation."""
    template = files("winnow_service.cli").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    [script] = re.findall(r"<script>(.*?)</script>", template, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(explanation, ensure_ascii=True).translate(_ESCAPED)
    return Template(template).substitute(script_digest=digest, summary=_summary(explanation), data=data)


def _summary(explanation: dict[str, Any]) -> str:
    rows = []
    for policy in explanation["policies"]:
        steps = steps_found(policy)
        share = share_of(policy, None, steps[-1]) if steps else None
        cells = ("", "", "") if share is None else (str(steps[-1]), f"{share.share:.1%}", f"{share.attended:.1%}")
        numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row" class="policy">{html.escape(title(policy))}</th>{numbers}</tr>')
    return "\n".join(rows)
