"""One form for one device, and ids in the order that people count in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.names import device_uuid, natural_key

HEX = "5f4dcc3b-5aa7-65d6-1d83-27deb882cf99"


@pytest.mark.parametrize(
    "text",
    [
        f"GPU-{HEX}",
        HEX,
        HEX.upper(),
        f"gpu-{HEX}",
        f"  Gpu-{HEX.upper()}\n",
    ],
)
def test_g9_a_device_has_one_name_however_its_driver_framework_or_setting_writes_it(text: str) -> None:
    assert device_uuid(text) == f"GPU-{HEX}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"mig-{HEX.upper()}", f"MIG-{HEX}"),
        (f"mig-gpu-{HEX.upper()}/1/0", f"MIG-GPU-{HEX}/1/0"),
        (f"CPU-{HEX}", f"CPU-{HEX}"),
        (" CPU-Node7-3 ", "CPU-Node7-3"),
        ("cpu-e0-1", "cpu-e0-1"),
        ("GPU-0", "GPU-0"),
    ],
)
def test_g9_an_instance_keeps_its_kind_and_a_name_of_another_shape_its_form(text: str, name: str) -> None:
    assert device_uuid(text) == name


@given(text=st.text(max_size=60))
def test_g9_the_one_form_of_a_device_is_its_own_form(text: str) -> None:
    assert device_uuid(device_uuid(text)) == device_uuid(text)


def test_names_are_ordered_as_numbers_where_they_are_numbers() -> None:
    names = ["CPU-10", "CPU-2", "e10", "e9b2", "e9b11", "e", "2", "10", "e09"]
    ordered = ["2", "10", "CPU-2", "CPU-10", "e", "e09", "e9b2", "e9b11", "e10"]
    assert sorted(names, key=natural_key) == ordered


@given(names=st.sets(st.text(alphabet="e0129²-", max_size=6), max_size=8), order=st.randoms())
def test_g5_the_order_of_names_is_total(names: set[str], order: object) -> None:
    assert sorted(names, key=natural_key) == sorted(sorted(names, reverse=True), key=natural_key)
    assert len({natural_key(n) for n in names}) == len(names)
