"""Baselines that read no order."""

from subquad.research.papers.random_encoder import write_random_encoder
from subquad.research.papers.text_baselines import bag_of_tokens, baselines, mean_embeddings
from subquad.tools.compare.labelled_tasks import load_task
from subquad.tools.models.pretrained import load


def test_a_bag_of_tokens_tells_words_apart():
    said = bag_of_tokens([[1, 1, 2], [3, 3, 2], [1, 2, 2], [3, 2]], ["a", "b", "a", "b"], [[1, 1], [3], [2, 3]])
    assert said == ["a", "b", "b"]


def test_all_baselines_of_labelled_texts(tmp_path):
    write_random_encoder(tmp_path)
    pretrained = load(str(tmp_path / "model"))
    task = load_task("labelled", tmp_path / "data")
    items = [pretrained.wrap(pretrained.content_ids(text), 48) for text in task.texts]
    found = baselines(pretrained, task, items)
    assert found["most frequent class"] == 0.5
    assert found["bag of tokens"] == 1.0  # 20 of 40 words of each label are its own
    vectors = mean_embeddings(pretrained, [[4, 6], [6]])
    table = pretrained.model.get_input_embeddings().weight
    assert vectors[0].allclose((table[4] + table[6]) / 2)
