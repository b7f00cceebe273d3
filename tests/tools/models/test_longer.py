"""Notes on inputs that are longer than a model's own positions."""

import pytest

from subquad.tools.models.longer import extension_note

RETRIEVAL, INTERPOLATED, YARN = "For retrieval", "are interpolated without training", "by YaRN (factor 2)"


@pytest.mark.parametrize(
    ("yarn", "causal", "told"),
    [
        (None, False, {INTERPOLATED, RETRIEVAL}),
        (None, True, {INTERPOLATED}),  # as GPT-2 and OPT
        (1024, True, {YARN}),
        (1024, False, {YARN}),
    ],
)
def test_only_a_model_that_embeds_is_advised_on_retrieval(yarn, causal, told):
    note = extension_note(512, yarn, causal=causal)
    assert {part for part in (RETRIEVAL, INTERPOLATED, YARN) if part in note} == told
