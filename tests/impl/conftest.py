"""Run the kernels in Triton's CPU interpreter where there is no GPU: set before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
