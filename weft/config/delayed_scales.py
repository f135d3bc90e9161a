"""The section of what precision fp8-delayed makes its scales of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.config.values import Count, Section, Whole

MOST_HISTORY, MOST_MARGIN = 1024, 8


class DelayedScales(Section):
    """Scales of precision fp8-delayed."""

    history: Annotated[Count, Field(le=MOST_HISTORY)] = 16
    """Steps before whose largest numbers count."""
    margin: Annotated[Whole, Field(le=MOST_MARGIN)] = 0
    """Powers of two that scales leave for numbers to grow; what is larger is cut off."""
