"""A family from outside: one object, and no line of Weft that knows it."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from weft.config import names, open_fields
from weft.config.errors import ConfigError
from weft.config.names import Registry
from weft.config.open_fields import section_of
from weft.cost.flops import forward_flops_per_token
from weft.models.family import Family
from weft.models.hugging_face import export_hf
from weft.models.registry import (
    FAMILIES,
    build_model,
    default_family,
    param_specs,
    register_family,
    shape_of,
    spec_from_dict,
)

NAME = "outsider"
OURS = FAMILIES["llama"]
KNOWN = list(FAMILIES)
ROW = replace(OURS.sizes["debug-1m"], family=NAME)
OUTSIDER = replace(OURS, name=NAME, order=9, sizes={"one": ROW}, converter=None)


@pytest.fixture
def family() -> Iterator[Family]:
    register_family(OUTSIDER)
    yield OUTSIDER
    FAMILIES.remove(NAME)


def test_ours_are_found_in_their_order() -> None:
    assert sorted(KNOWN, key=lambda name: FAMILIES[name].order) == KNOWN
    assert KNOWN[:2] == ["llama", "gpt2"]
    assert default_family() is OURS
    assert all(family.name == name for name, family in FAMILIES.items())


def test_a_family_from_outside_is_one_like_ours(family: Family, tmp_path) -> None:
    assert list(FAMILIES) == [*KNOWN, NAME]
    assert param_specs(ROW) == param_specs(OURS.sizes["debug-1m"])
    assert shape_of(ROW) == shape_of(OURS.sizes["debug-1m"])
    assert forward_flops_per_token(ROW, 8) == forward_flops_per_token(OURS.sizes["debug-1m"], 8)
    assert build_model(ROW).spec is ROW
    with pytest.raises(
        ConfigError, match=r"model.family = 'outsider': expected one of llama, gpt2"
    ):
        export_hf(tmp_path, ROW, {}.__getitem__, None)


def test_it_cannot_be_added_twice(family: Family) -> None:
    with pytest.raises(AssertionError, match="outsider is there already"):
        register_family(family)


def test_a_saved_model_of_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        spec_from_dict({"family": "lama"})
    known = ", ".join(KNOWN)
    message = f"model.family = 'lama': expected one of {known}. Did you mean llama?"
    assert str(caught.value) == message


def with_package(patch: pytest.MonkeyPatch, name: str, value: str) -> Registry[Family]:
    """Our families, and one of an installed package."""
    points = EntryPoints([EntryPoint(name, value, "weft.families")])
    patch.setattr(names, "entry_points", lambda group: points.select(group=group))
    return Registry(Family, "weft.models", folder="family", entry="FAMILY", group="weft.families")


def test_an_installed_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and who names what it would bring is told why."""
    registry = with_package(monkeypatch, "broken", "no_such_sdk:FAMILY")
    monkeypatch.setattr(open_fields, "registry_of", lambda kind: registry)
    assert section_of("families", "family", {"family": "gpt2"}).family == "gpt2"
    with pytest.raises(ConfigError, match=r"weft\.families: broken = .*no_such_sdk"):
        section_of("families", "family", {"family": "broken"})


def test_what_a_package_cannot_bring_is_nobodys_who_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lacks its module, or names no family; names of others, and what they are, stay known."""
    ours = {family.name: family for family in FAMILIES.imported()}
    for value, why in (("no_such_sdk:FAMILY", "no_such_sdk"), (f"{__name__}:ROW", "It is a")):
        registry = with_package(monkeypatch, "broken", value)
        assert list(registry) == [*ours, "broken"]
        assert list(registry.items()) == list(ours.items())
        assert list(registry.values()) == list(ours.values())
        monkeypatch.setattr(names, "imported", lambda *_: pytest.fail("it is tried once"))
        with pytest.raises(ConfigError, match=why):
            registry["broken"]
        monkeypatch.undo()


def test_an_entry_has_the_name_it_was_asked_for_by(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = with_package(monkeypatch, "other", f"{__name__}:OUTSIDER")
    with pytest.raises(ConfigError, match=rf"Its name is '{NAME}'"):
        registry["other"]


def test_an_installed_package_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = with_package(monkeypatch, NAME, f"{__name__}:OUTSIDER")
    assert list(registry) == [*KNOWN, NAME]
    assert len(registry) == len(KNOWN) + 1 and NAME in registry
    assert registry[NAME] is OUTSIDER
    assert list(registry) == [*KNOWN, NAME]
