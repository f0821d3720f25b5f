import json

import pytest

from molt.train.gateway.call_error import CallError
from molt.train.gateway.routes import WIRES
from molt.train.gateway.wires.body import arguments_of
from molt.train.gateway.wires.nesting import MAX_DEPTH, check_depth


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("1", 0),
        ('"[[[["', 0),
        ('{"a": "}"}', 1),
        ('["\\"[", ["\\\\"], "\\\\\\"["]', 2),
        ('{"a": [{}, {"b": []}], "c": [[[[1]]]]}', 5),
        ('[{"{": "\\u005b"}]', 2),
    ],
)
def test_depth_counts_brackets_outside_strings(text, depth):
    inner = MAX_DEPTH - depth
    check_depth(("[" * inner + text + "]" * inner).encode(), "")
    with pytest.raises(CallError, match="the body is nested too deeply"):
        check_depth(("[" * (inner + 1) + text + ',"x{"' + "]" * (inner + 1)).encode(), "")


def test_a_path_counts_as_depth():
    check_depth(nested(MAX_DEPTH - 3), "messages[3].content")
    with pytest.raises(CallError, match=r"messages\[3\].content is nested too deeply"):
        check_depth(nested(MAX_DEPTH - 2), "messages[3].content")


def test_arguments_that_are_nested_too_deeply_are_text():
    deep = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert arguments_of(deep) == json.loads(deep)
    assert arguments_of('{"a":' + deep + "}") == '{"a":' + deep + "}"


@pytest.mark.parametrize("kind", ["timeout", "headers_too_large", "not_implemented"])
def test_every_kind_of_error_has_a_status_on_every_wire(kind):
    statuses = {wire.error(CallError(kind, "x"), "req")[0] for wire in WIRES.values()}
    assert statuses == {{"timeout": 408, "headers_too_large": 431, "not_implemented": 501}[kind]}
