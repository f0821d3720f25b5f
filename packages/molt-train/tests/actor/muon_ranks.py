"""One of two ranks of FSDP2 that train a small net with Muon: `python muon_ranks.py FOLDER RANK`."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from molt.train.actor.optimizer import make_optimizer
from molt.train.config import OptimizerConfig


class Net(torch.nn.Module):
    """Each kind of weight once: embeddings, matrices wide and tall, a bias, a norm, a bank of experts, a head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.up = torch.nn.Linear(5, 9)
        self.down = torch.nn.Linear(9, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5)
        self.experts = torch.nn.Parameter(torch.randn(2, 5, 5))
        self.lm_head = torch.nn.Linear(5, 3, bias=False)
        self.value = torch.nn.Linear(5, 1, bias=False)

    def forward(self, ids):
        hidden = self.norm(self.down(self.up(self.embed(ids)).tanh()))
        hidden = hidden @ (self.experts.sum(0))
        return self.lm_head(hidden).square().sum() + self.value(hidden).sum()


MUON = OptimizerConfig(name="muon", lr=0.05, weight_decay=0.1)


def net():
    torch.manual_seed(0)
    return Net()


def train(model, optimizer, num_steps, *, first=0):
    for i in range(first, first + num_steps):
        optimizer.zero_grad()
        model(torch.tensor([i % 7, 3, 6])).backward()
        optimizer.step()


def main(folder, rank):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = net()
    fully_shard(model)
    optimizer = make_optimizer(model, MUON)
    train(model, optimizer, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/checkpoint")
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(weights, f"{folder}/weights")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
