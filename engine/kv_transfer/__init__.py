"""KV caches on their way from one engine to another: a prompt is computed here and decoded there.

Two transports: GPU to GPU inside a node, through staging buffers that the target shares by CUDA IPC, and everywhere
else through host memory over TCP, encrypted (on a GPU by way of pinned buffers). NCCL, RDMA and GPUDirect are not used:
between nodes host memory and TCP bound a transfer.
"""
