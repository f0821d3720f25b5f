"""The composition root: what a command runs, put together from concrete parts. Nothing else names them together."""

from molt.train.launch.gateway import run_gateway
from molt.train.launch.supervised import run_supervised
from molt.train.launch.training import run_training

__all__ = ["run_gateway", "run_supervised", "run_training"]
