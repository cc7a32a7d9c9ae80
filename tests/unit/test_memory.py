"""Memory: a small store per request."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from sparseprefill.memory import Memory


def test_read_and_write() -> None:
    memory = Memory()
    assert "none" == memory.get(("a", 0), "none")
    memory.put(("a", 0), 3)
    assert 3 == memory.get(("a", 0), 0)
    assert ("a", 0) in memory
    assert ("a", 1) not in memory
    assert 1 == len(memory)


def test_setdefault_makes_once() -> None:
    memory = Memory()
    made: list[int] = []

    def make(value: int) -> list[int]:
        made.append(value)
        return [value]

    first = memory.setdefault("key", lambda: make(1))
    assert first is memory.setdefault("key", lambda: make(2))
    assert [1] == made


def test_clear_forgets() -> None:
    memory = Memory()
    memory.put("key", 1)
    memory.clear()
    assert 0 == len(memory)


def test_two_memories_share_nothing() -> None:
    one, other = Memory(), Memory()
    one.put("key", 1)
    assert "key" not in other


def test_no_other_attribute_can_be_set() -> None:
    assert not hasattr(Memory(), "__dict__")
