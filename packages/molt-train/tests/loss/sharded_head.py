"""One of two gloo ranks that hold a head together: `python sharded_head.py STORE RANK`."""

import sys

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from molt.train.loss.logprob import head_logprobs

N, V, H = 6, 11, 4
"""The vocabulary is odd: one rank has a token less."""


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        check(mesh, placement)
    destroy_process_group()


def check(mesh, placement) -> None:
    torch.manual_seed(0)  # alike on both ranks
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(V, H, dtype=torch.float64), torch.randn(V, dtype=torch.float64)
    targets = torch.tensor([0, 5, 6, 10, 3, 6])  # 0 to 5 are the first rank's, 6 to 10 the second's
    whole = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    sharded = [
        distribute_tensor(weight, mesh, [placement]).requires_grad_(),
        distribute_tensor(bias, mesh, [placement if placement == Shard(0) else Replicate()]).requires_grad_(),
    ]
    expected = compute(hidden, *whole, targets)
    found = compute(hidden, *sharded, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(loss(expected), [hidden, *whole])
    given = torch.autograd.grad(loss(found), [hidden, *sharded])
    assert given[1].placements == (placement,)
    given = (given[0], *(gradient.full_tensor() for gradient in given[1:]))
    torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-12)


def compute(hidden, weight, bias, targets):
    return head_logprobs(hidden, weight, targets, temperature=0.7, chunk_size=4, with_entropy=True, bias_V=bias)


def loss(values):
    return (values[0] * torch.arange(1.0, N + 1)).sum() + (values[1] ** 2).sum()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
