"""Baselines on labelled texts without attention: the most frequent class, bags of tokens, means of embeddings."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.tools.compare.labelled_tasks import LabelledTask, Probe, share_right
from subquad.tools.models.pretrained import Pretrained


def baselines(pretrained: Pretrained, task: LabelledTask, items: Sequence[Sequence[int]]) -> dict[str, float]:
    """Accuracies on the test texts, which are cut as the model reads them: `items` are the token ids of all texts."""
    learn, labels, held = task.train, task.labels[: task.train], task.labels[task.train :]
    most, _ = Counter(labels).most_common(1)[0]
    vectors = mean_embeddings(pretrained, items)
    probe = Probe(vectors[:learn], labels)
    return {
        "most frequent class": share_right([most] * len(held), held),
        "mean of the model's token embeddings": share_right(probe.predict(vectors[learn:]), held),
        "bag of tokens": share_right(bag_of_tokens(items[:learn], labels, items[learn:]), held),
    }


def mean_embeddings(pretrained: Pretrained, items: Sequence[Sequence[int]]) -> Tensor:
    """The mean of each item's token embeddings as they are before the first layer, without positions: (n, width)."""
    table = pretrained.model.get_input_embeddings().weight.detach().float().cpu()
    return torch.stack([table[torch.tensor(item)].mean(0) for item in items])


def bag_of_tokens(items: Sequence[Sequence[int]], labels: Sequence[str], unseen: Sequence[Sequence[int]]) -> list[str]:
    """Labels of unseen items by a logistic regression on tf-idf weights of their tokens."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    weights = TfidfVectorizer(analyzer=list, sublinear_tf=True)
    fitted = LogisticRegression(C=10.0, max_iter=300).fit(weights.fit_transform(items), labels)
    return [str(label) for label in fitted.predict(weights.transform(unseen))]
