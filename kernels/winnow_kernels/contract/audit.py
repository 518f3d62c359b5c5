"""What of a request's sparse decode steps is audited, where that is more than a share of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Discriminator, Field, Tag

from winnow_kernels.contract.fields import Contract

Share = Annotated[float, Field(ge=0, le=1)]


class Audit(Contract):
    """Audits that may go on to the next token.

    Attributes:
        share: of the decode steps that are audited.
        kl: whether the newest token of an audited step is put once more through the whole model, with dense attention
            in every layer, to tell how far the distribution of the next token is from that of the sparse step.
    """

    share: Share
    kl: bool = False


_NUMBER: Final = "number"
_OBJECT: Final = "object"


def _form(value: Any) -> str:
    return _OBJECT if isinstance(value, Mapping | Audit) else _NUMBER


def _shortest(audit: float | Audit) -> float | Audit:
    # Equal policies have equal text, and runtimes that know numbers alone serve what a number can say.
    return audit.share if isinstance(audit, Audit) and not audit.kl else audit


AuditedSteps = Annotated[
    Annotated[Share, Tag(_NUMBER)] | Annotated[Audit, Tag(_OBJECT)], Discriminator(_form), AfterValidator(_shortest)
]
"""A share of the decode steps, or an ``Audit``; one without ``kl`` becomes its share."""
