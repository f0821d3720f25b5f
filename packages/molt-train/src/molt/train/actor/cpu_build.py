"""Let AutoModel build a model on a machine without CUDA.

AutoModel asks for the current CUDA device while it builds a model, also where there is none. For that time exactly
those look-ups are redirected to the CPU; nothing of it stays afterwards.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

_BUILDERS = ("nemo_automodel._transformers.auto_model", "nemo_automodel._transformers.model_init")


class _CpuAsCuda:
    """`torch.cuda`, where the current device is the CPU."""

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_available() -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _DeviceMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __or__(cls, other: Any) -> Any:
        return torch.device | other


class _CpuDevice(metaclass=_DeviceMeta):
    """`torch.device`, where every CUDA device is the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and str(args[0]).startswith("cuda"):
            return torch.device("cpu")
        return torch.device(*args, **kwargs)


class _CpuTorch:
    """`torch` as a model builder should see it without CUDA."""

    cuda = _CpuAsCuda()
    device = _CpuDevice

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def cpu_build(*model_modules: str) -> Iterator[None]:
    """Redirect the CUDA device look-ups of AutoModel, and of `model_modules`, to the CPU; a no-op where CUDA is."""
    if torch.cuda.is_available():
        yield
        return
    modules: list[Any] = [importlib.import_module(name) for name in (*_BUILDERS, *model_modules)]
    originals = [module.torch for module in modules]
    for module in modules:
        module.torch = _CpuTorch()
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.torch = original
