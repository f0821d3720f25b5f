"""Stage 10, refit: the actor's weights into the engines, through vLLM's weight-transfer API.

Two halves: `sender.py` runs on the actor ranks, `gloo_engine.py` in vLLM's workers (the one module here that imports
vllm). On CUDA both halves are vLLM's own `nccl` backend; on the CPU this is its twin over gloo.
"""
