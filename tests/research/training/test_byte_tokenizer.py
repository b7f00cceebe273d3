"""The tokenizer of bytes gives what the tasks give, before it is saved and after."""

import pytest
from transformers import AutoTokenizer

from subquad.research.training.byte_tokenizer import byte_tokenizer
from subquad.research.training.tasks.lm import Lm
from subquad.research.training.tasks.text_classification import Text

TEXTS = ["abc", "", "Dé €😀\n\n  two \t\x00\x7f\xad", "<pad> is <class> or <start>", "x" * 40]


@pytest.mark.parametrize("task", [Text(length=12), Text(length=12, pooling="class-token"), Lm(length=100)], ids=str)
def test_it_gives_the_tokens_that_the_task_gives(task, tmp_path):
    task.tokenizer.save_pretrained(tmp_path)
    for tokenizer in (task.tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        found = tokenizer(TEXTS, truncation=True, padding=True, return_tensors="pt")
        for name, tensor in task.encode(TEXTS).items():
            assert found[name].tolist() == tensor.tolist(), name
        whole = tokenizer.decode(tokenizer(TEXTS[2])["input_ids"], skip_special_tokens=True)
        assert whole == TEXTS[2]


def test_it_has_the_tokens_of_the_model_and_no_other():
    tokenizer = byte_tokenizer(0, 8, pad=("<pad>", 257), start=("<start>", 256))
    assert sorted(tokenizer.get_vocab().values()) == list(range(258))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (257, 256)
    assert byte_tokenizer(2, 8, pad=("<pad>", 0)).bos_token_id is None
