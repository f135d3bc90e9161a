"""What a part of a core is worth: real steps in control groups, as root."""

from tests.lab.lab_cases import needs_root
from weft.lab import turns
from weft.lab.cgroups import groups_of_labs
from weft.lab.identity import Identity
from weft.lab.turns import measure_parts

pytestmark = needs_root


def test_a_part_of_a_core_is_measured_in_a_group_of_its_own(monkeypatch) -> None:
    """A real one: half of a core takes about as much of its time; nothing is left of the group."""
    monkeypatch.setattr(turns, "SPEEDS", (0.5,))
    monkeypatch.setattr(turns, "QUICK_ROUNDS", 1)
    (part,) = measure_parts(quick=True)
    assert part.speed == 0.5
    assert part.slowdown < 20
    own = Identity.own()  # other tests may have labs meanwhile
    assert not [each for each in groups_of_labs() if Identity.of_name(each.name) == own]
