"""Section ``move_experts``: which rank has which expert, while a run goes on."""

from __future__ import annotations

from weft.config.values import Count, Section, Whole


class MoveExpertsConfig(Section):
    """Experts on other ranks of the same stage where some have more tokens than others, between
    steps, with the same numbers. Null by default: experts stay. `move_experts={}` takes what is
    below."""

    every: Count = 100
    """Steps from one look to the next. Experts change places where ranks then have at least 5 %
    less to wait for, by tokens of the logged steps between."""
    replicate: Whole = 0
    """Copies of a layer's experts that ranks may have besides, where no change of places helps."""
