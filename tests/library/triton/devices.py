"""The device of the Triton kernels' cases: CPU tensors in the interpreter, or a GPU."""

import os

import torch

from tests.library.triton.processes import CHOSEN

ON_GPU = os.environ.get(CHOSEN) == "cuda"
DEVICE = os.environ.get("SUBQUAD_TEST_DEVICE", "cuda") if ON_GPU else "cpu"
MISSING = None if torch.device(DEVICE).type != "cuda" or torch.cuda.is_available() else "there is no GPU"

# The interpreter multiplies bf16 wrongly, so that only a GPU can show it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
