"""The contract checks that every refiner must pass."""

from sparseprefill.testing import check_refiner


def test_contract() -> None:
    check_refiner("first-layers", full={})
    check_refiner("first-layers", parameters={"layers": 0})
