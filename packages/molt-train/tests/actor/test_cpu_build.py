"""The redirection of CUDA look-ups: in force while a model is built, and nowhere else or later."""

import sys
from types import ModuleType

import pytest
import torch

from molt.train.actor import cpu_build as module
from molt.train.actor.cpu_build import cpu_build


@pytest.fixture
def builders(monkeypatch):
    """Two modules that import torch, as AutoModel's builders do."""
    made = []
    for name in ("a_builder", "a_model"):
        builder = ModuleType(name)
        builder.torch = torch
        monkeypatch.setitem(sys.modules, name, builder)
        made.append(builder)
    monkeypatch.setattr(module, "_BUILDERS", ("a_builder",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return made


def test_cuda_devices_are_the_cpu_while_a_model_is_built(builders):
    builder, model = builders
    with cpu_build("a_model"):
        for view in (builder.torch, model.torch):
            assert view.cuda.current_device() == torch.device("cpu")
            assert view.cuda.is_available() is False
            assert view.device("cuda", 0) == view.device("cuda:1") == torch.device("cpu")


def test_all_else_of_torch_is_as_it_was(builders):
    builder, _ = builders
    with cpu_build():
        view = builder.torch
        assert view.tensor is torch.tensor
        assert view.cuda.synchronize is torch.cuda.synchronize
        assert view.device("meta") == torch.device("meta")
        assert isinstance(torch.device("cpu"), view.device)
        assert isinstance(view.device("cuda"), torch.device)
        assert isinstance(None, view.device | None)


def test_nothing_of_it_stays(builders):
    with cpu_build("a_model"):
        pass
    assert all(builder.torch is torch for builder in builders)


def test_nothing_of_it_stays_after_a_failed_build(builders):
    def fail():
        raise RuntimeError("no such checkpoint")

    with pytest.raises(RuntimeError, match="no such checkpoint"), cpu_build("a_model"):
        fail()
    assert all(builder.torch is torch for builder in builders)


def test_only_the_modules_named_are_redirected(builders):
    builder, model = builders
    with cpu_build():
        assert builder.torch is not torch
        assert model.torch is torch


def test_where_there_is_cuda_nothing_is_redirected(builders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with cpu_build("a_model"):
        assert all(builder.torch is torch for builder in builders)
