"""Sequence parallelism of accelerate, which knows nothing of subquad's attention."""

import sys


def refuse_accelerate_splits() -> None:
    """Raise ValueError where accelerate splits tokens over ranks itself.

    Its context parallelism replaces SDPA alone, and its sequence parallelism wraps DeepSpeed's own attention functions
    alone, so that any other attention would see the tokens of one rank.
    """
    states = sys.modules.get("accelerate.state")
    shared = {} if states is None else states.AcceleratorState._shared_state
    config = shared.get("parallelism_config")
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, 1)
        if size > 1:
            raise ValueError(
                f"accelerate's ParallelismConfig({name}={size}) splits tokens for its own attention alone; leave it "
                "out, and split them by sq.hf.swap(model, method, parallel=group)"
            )
