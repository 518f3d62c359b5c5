"""English prose and code from packages that anyone can install: collected once, read by split.

``load_text`` reads what ``winnow text collect`` has collected. Nothing here imports torch.
"""

from winnow_evaluation.text.documents import Document, Kind, Split, TextError, load_text, text_folder
from winnow_evaluation.text.haystack import TextHaystack

__all__ = ["Document", "Kind", "Split", "TextError", "TextHaystack", "load_text", "text_folder"]
