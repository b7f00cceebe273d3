"""Any method inside pretrained Hugging Face models (transformers 5).

AutoModel.from_pretrained(name, attn_implementation="subquad:clustered-tail")   # one method in all layers, by name
sq.hf.swap(model, sq.ImprovedClustered(clusters=25))   # in place; returns which layer runs what
sq.hf.restore(model)                                   # the model's own attention again
sq.hf.reattach(model)                                  # what `save_pretrained` recorded; `from_pretrained` does it
model.generate(**inputs, past_key_values=sq.hf.GrowingCache(model))   # keys are not copied at each step
model.generate(**inputs, **sq.hf.compiled_steps(2048))   # one compiled step for all requests up to this length
model.generate(**inputs, past_key_values=sq.hf.StateCache(model))   # from states of fixed size
sq.hf.load_adapter(model, "lha-adapter")               # learned parameters that `subquad calibrate` fitted
with sq.hf.keeping(model, mask): model(**inputs)       # some tokens' attention stays exact
sq.hf.swap(model, "performer", parallel=mesh["sp"])     # tokens split over ranks: model(**sq.hf.shard(model, batch))
sq.hf.extend_positions(model, 4096)                    # past the model's own positions
"""

from subquad.hf import installed  # noqa: F401  (first: an error with the remedy where a package is missing)
from subquad.hf.adapters import Adapter, load_adapter, read_adapter, save_adapter, weights_mark
from subquad.hf.boundary import register_boundary
from subquad.hf.by_name import read_names, register
from subquad.hf.cache_marks import follow_items
from subquad.hf.compiled_generation import compiled_steps, step_backend
from subquad.hf.growing_cache import GrowingCache
from subquad.hf.item_rotary import reaching
from subquad.hf.layers import ATTACHED, NAME, Layer, head_counts
from subquad.hf.mpnet import join_interface
from subquad.hf.positions import extend_positions, position_limit, rotary_limit
from subquad.hf.probe import find_layers
from subquad.hf.reattaching import reattach
from subquad.hf.rotary_passes import expect_new_tokens
from subquad.hf.saved import keep_swaps_in_files
from subquad.hf.split import shard
from subquad.hf.state_cache import StateCache
from subquad.hf.swapping import Swapped, bind, bounds, describe, keeping, provenance, refusals, restore, swap
from subquad.hf.trial import register_trials
from subquad.hf.unwrapping import transformers_model
from subquad.hf.word_timestamps import support_word_timestamps

join_interface()
register_boundary()
register_trials()
keep_swaps_in_files(reattach)
support_word_timestamps()
expect_new_tokens()
follow_items()
read_names()

__all__ = [
    "ATTACHED",
    "NAME",
    "Adapter",
    "GrowingCache",
    "Layer",
    "StateCache",
    "Swapped",
    "bind",
    "bounds",
    "compiled_steps",
    "describe",
    "extend_positions",
    "find_layers",
    "head_counts",
    "keeping",
    "load_adapter",
    "position_limit",
    "provenance",
    "reaching",
    "read_adapter",
    "reattach",
    "refusals",
    "register",
    "restore",
    "rotary_limit",
    "save_adapter",
    "shard",
    "step_backend",
    "swap",
    "transformers_model",
    "weights_mark",
]
