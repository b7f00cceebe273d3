"""What `subquad doctor` reports about `full:kernel=subquad` on this processor."""

import torch


def exact_kernel_on_amx() -> dict[str, str]:
    """A warning on processors with AMX, which SDPA uses in bf16 and `full:kernel=subquad` does not; empty on others.

    The speeds are the forward ones of benchmarks/results/exact-kernel-amx.md at 2,048 tokens.
    """
    if not torch.cpu.get_capabilities().get("amx_bf16"):
        return {}
    return {
        "full:kernel=subquad": "slower than SDPA in bf16 on this processor, because it does not use AMX: 0.25 to 0.70 "
        "times the speed at 2,048 tokens, measured once; in fp32, 1.03 to 1.31 times"
    }
