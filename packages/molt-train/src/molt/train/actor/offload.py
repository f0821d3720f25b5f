"""What of a policy lies in host memory while it is not used: nothing, the optimizer's states, or all of it.

With `optimizer` the states come to the GPU for the step alone, so they and the activations never stand there together.
The float32 masters are what FSDP gathers the forward pass from, so they stay; `full` leaves them, their gradients and
the states in host memory and makes the step there.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

Offload = Literal["none", "optimizer", "full"]
HOST = torch.device("cpu")


def fsdp_policy(offload: Offload) -> CPUOffloadPolicy | None:
    """What FSDP is told: under `full` its shards, and their gradients, lie in pinned host memory."""
    return CPUOffloadPolicy(pin_memory=True) if offload == "full" else None


def backend(offload: Offload, *, has_cuda: bool) -> str:
    """The process group's backend; under `full` gradients are also reduced (their norm is) in host memory."""
    if not has_cuda:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offload == "full" else "nccl"


def offload_states(optimizer: torch.optim.Optimizer, *, home: torch.device = HOST) -> None:
    """Keep the states of `optimizer` on `home` from now on; each of its steps fetches them, and sends them back.

    A checkpoint reads and writes them wherever they are. Single numbers, such as AdamW's count of steps, stay.
    """

    def fetch(*_: object) -> None:
        for parameter, state, name in _tensors(optimizer):
            state[name] = state[name].to(parameter.device)

    def send(*_: object) -> None:
        for _parameter, state, name in _tensors(optimizer):
            state[name] = state[name].to(home)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(send)
    optimizer.register_load_state_dict_post_hook(send)  # loading puts them beside the weights


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any], str]]:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                yield parameter, state, name
