"""Options of `generate` with which its steps are compiled, on every device."""

from typing import Any

from transformers import CompileConfig


def compiled_steps(length: int, **options: Any) -> dict[str, Any]:
    """The options with which `generate` compiles its steps once, on a static cache for up to `length` tokens.

        model.generate(prompt, max_new_tokens=128, **sq.hf.compiled_steps(2048))

    Args:
        length: tokens of the longest request, its new ones included. The cache has room for the next power of two.
        options: of `torch.compile`, such as `backend`.

    Requests of all lengths up to there run the same compiled step; the prompt itself is not compiled. transformers
    compiles by itself on GPUs and other accelerators alone. The step must be one graph: a model that breaks it is an
    error of `torch.compile`.

    Raises:
        ValueError: the length is below 1; or torch freezes weights (`torch._inductor.config.freezing`), which takes the
            static cache for a constant too, so that tokens would be wrong.

    >>> compiled_steps(1500)["max_cache_len"]
    2048
    """
    if length < 1:
        raise ValueError(f"length={length}, but a request has at least 1 token")
    from torch._inductor import config as inductor  # here, because only compilation needs it

    if inductor.freezing:
        raise ValueError(
            "torch._inductor.config.freezing is on, and transformers marks its static cache as fixed, so it would be a "
            "constant of the compiled step, and tokens would be wrong; turn it off (TORCHINDUCTOR_FREEZING=0)"
        )
    config = CompileConfig(**({"fullgraph": True, "mode": None} | options))
    config._compile_all_devices = True  # its only switch for CPUs
    return {
        "cache_implementation": "static",
        "max_cache_len": 1 << (length - 1).bit_length(),
        "compile_config": config,
    }
