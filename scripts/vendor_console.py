"""Fetch the console's libraries anew: ``python scripts/vendor_console.py [NAME=VERSION...]``.

The service serves them as they are, so they lie in the repository. This takes single files out of npm's packages, with
their licences, and writes down what came from where (``vendored.json``). npm checks what it downloads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

VENDOR: Final = Path(__file__).resolve().parents[1] / "service/winnow_service/console/page/vendor"
RECORD: Final = VENDOR / "vendored.json"
LICENCE: Final = "LICENSE"
# From each package: what the page takes and what that imports, unchanged, below a folder that is left out here.
FILES: Final = {
    "uplot": ("dist/uPlot.esm.js", "dist/uPlot.min.css"),
    "diff": ("libesm/diff/base.js", "libesm/diff/word.js", "libesm/util/string.js"),
    "eventsource-parser": ("dist/errors.js", "dist/index.js", "dist/parse.js"),
}


def main(arguments: list[str]) -> None:
    """Fetch the versions that are recorded, or those that ``arguments`` name."""
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    asked = dict(argument.split("=", 1) for argument in arguments)
    if unknown := set(asked) - set(FILES):
        sys.exit(f"there is no {min(unknown)!r}; there are {', '.join(FILES)}")
    record = {}
    for name in FILES:
        version = asked.get(name) or recorded.get(name, {}).get("version", "latest")
        record[name] = _vendor(name, version)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def _vendor(name: str, version: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--json", "--pack-destination", folder, f"{name}@{version}"]
        [packed] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        with tarfile.open(Path(folder) / packed["filename"]) as archive:
            archive.extractall(folder, filter="data")
        package = Path(folder) / "package"
        licence = json.loads((package / "package.json").read_text())["license"]
        shutil.rmtree(VENDOR / name, ignore_errors=True)
        targets = {path.partition("/")[2]: path for path in FILES[name]} | {LICENCE: LICENCE}
        files = {target: _copy(package / path, VENDOR / name / target) for target, path in targets.items()}
    return {"version": packed["version"], "licence": licence, "integrity": packed["integrity"], "sha256": files}


def _copy(source: Path, target: Path) -> str:
    # Source maps are not served: a browser would ask for them.
    lines = source.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("//# sourceMappingURL="))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
