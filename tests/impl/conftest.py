"""Kernels run under Triton's interpreter where there is no GPU; it must be told so before imports."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
