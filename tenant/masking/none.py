"""`masking = "none"`: rows are quantised and sent without a mask."""

import logging

from symbiosis_priv.federation import Federation
from tenant.core.masked import UNMASKED_BY_CHOICE, UnmaskedByChoice
from tenant.masking.scheme import Materials, SessionScheme

log = logging.getLogger(__name__)


class NoMasking(SessionScheme):
    """Hides nothing: every executor sees the rows. Only for providers that you trust. Bit-exact, verified."""

    name = "none"
    summary = "every executor; for providers you trust"
    roles = frozenset({"executor"})
    hides_from = frozenset()
    assumption = "you trust the executor"

    def check(self, federation: Federation) -> None:
        super().check(federation)
        if federation.helpers:
            log.warning(
                "masking = 'none': executors can read your rows, though this federation has helpers; masking = 'pad' "
                "hides the rows"
            )

    def effects(self, materials: Materials) -> UnmaskedByChoice:
        return UNMASKED_BY_CHOICE
