"""The names of block contents."""

from __future__ import annotations

from dataclasses import replace

from cluster.kv.keys import KeyContext, child_key, root_key

CONTEXT = KeyContext("model", 3, "adapter", "layout", "exact")


def test_every_field_and_the_salt_change_the_root() -> None:
    roots = {
        root_key(CONTEXT, "salt"),
        root_key(replace(CONTEXT, model="other"), "salt"),
        root_key(replace(CONTEXT, weights_version=4), "salt"),
        root_key(replace(CONTEXT, adapter=""), "salt"),
        root_key(replace(CONTEXT, layout="other"), "salt"),
        root_key(replace(CONTEXT, fidelity="int4"), "salt"),
        root_key(CONTEXT, ""),
    }
    assert len(roots) == 7


def test_fields_do_not_run_into_each_other() -> None:
    assert root_key(KeyContext("ab", adapter="c"), "") != root_key(KeyContext("a", adapter="bc"), "")
    assert root_key(KeyContext("m", adapter="x"), "") != root_key(KeyContext("m"), "x")
    assert root_key(KeyContext("m1", 2), "") != root_key(KeyContext("m", 12), "")


def test_a_child_depends_on_parent_tokens_and_order() -> None:
    root = root_key(CONTEXT, "")
    keys = {
        child_key(root, (1, 2)),
        child_key(root, (2, 1)),
        child_key(root, (1, 2, 0)),
        child_key(root, ()),
        child_key(child_key(root, (1,)), (2,)),
        child_key(root_key(CONTEXT, "salt"), (1, 2)),
    }
    assert len(keys) == 6
    assert child_key(root, (1, 2)) == child_key(root, [1, 2])


def test_names_are_the_same_in_every_process() -> None:
    assert child_key(root_key(KeyContext("m"), "s"), (1, 2, 3)).hex() == "71cc13f4fbaa5ef4b2b9d116aa74d5db"
