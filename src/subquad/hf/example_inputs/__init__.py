"""Small random inputs for a forward pass of any transformers model, without a tokenizer or a processor."""

from subquad.hf.example_inputs.build import example_inputs

__all__ = ["example_inputs"]
