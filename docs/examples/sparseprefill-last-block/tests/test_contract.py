"""The contract checks that every method must pass."""

from sparseprefill.testing import check_method


def test_contract() -> None:
    check_method("last-block")
