"""Two tasks of the LM Evaluation Harness on a decoder whose attention is chosen by name.

The tasks are those of examples/evaluate, on the documentation of Python's standard library or on --texts. The answers
of each attention are kept in --keep, and not computed again by the same code on the same texts.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import sheet
import typer
from lm_eval import __version__ as harness_version
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from task_cells import code
from transformers import AutoTokenizer

import subquad.hf  # noqa: F401  from here on, transformers understands the names of methods
from subquad.core.files import write
from subquad.tools.data.texts import read_documents, standard_library
from subquad.tools.models import demo

TASKS = Path(__file__).parents[1] / "examples" / "evaluate"
EXACT = "sdpa"
ATTENTIONS = (EXACT, "subquad", "subquad:clustered-tail", "subquad:clustered-tail:queries=earlier,last=0")
HEAD = (
    "`attn_implementation`",
    "word perplexity",
    "bits per byte",
    "nats per token, difference",
    "right words",
    "same words",
)


class Answers(NamedTuple):
    """The harness's results with one attention.

    `documents` has a log-likelihood, words, bytes and tokens of each document; `words` the log-likelihoods of the four
    words of each passage, and the number of the right one.
    """

    documents: list[tuple[float, int, int, int]]
    words: list[tuple[list[float], int]]

    @property
    def chosen(self) -> list[int]:
        """The number of the likeliest word of each passage."""
        return [likelihoods.index(max(likelihoods)) for likelihoods, _ in self.words]

    def total(self) -> tuple[float, int, int, int]:
        """The sums over all documents."""
        likelihood, words, size, tokens = map(sum, zip(*self.documents, strict=True))
        return likelihood, words, size, tokens


def answers(folder: str, attention: str, asked: dict[str, dict[str, Any]]) -> Answers:
    """Run both tasks with one attention."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples: dict[str, list[dict[str, Any]]] = {}
    for task, metadata in asked.items():
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        arguments = {"pretrained": folder, "attn_implementation": attention, "dtype": "float32"}
        samples |= simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=[task],
            task_manager=manager,
            batch_size=1,
            device="cpu",
            log_samples=True,
            bootstrap_iters=0,
        )["samples"]
    documents = []
    for sample in samples["documents"]:
        text = sample["doc"]["text"]
        tokens = len(tokenizer(text, verbose=False)["input_ids"])
        documents.append((_likelihood(sample["resps"][0]), len(text.split()), len(text.encode()), tokens))
    words = [
        ([_likelihood(each) for each in sample["resps"]], sample["doc"]["answer"]) for sample in samples["last_word"]
    ]
    return Answers(documents, words)


def _likelihood(response: Any) -> float:
    """The log-likelihood in what the harness keeps of a request, in lists around it."""
    while isinstance(response, list | tuple):
        response = response[0]
    return float(response)


def row(attention: str, its: Answers, exact: Answers) -> list[str]:
    """One line of the table."""
    likelihood, words, size, tokens = its.total()
    right = sum(chosen == answer for chosen, (_, answer) in zip(its.chosen, its.words, strict=True))
    same = sum(mine == other for mine, other in zip(its.chosen, exact.chosen, strict=True))
    return [
        f"`{attention}`",
        f"{math.exp(-likelihood / words):.3f}",
        f"{-likelihood / size / math.log(2):.4f}",
        "–" if its is exact else f"{(exact.total()[0] - likelihood) / tokens:+z.4f}",
        f"{right} of {len(its.words)}",
        "–" if its is exact else f"{same} of {len(its.words)}",
    ]


def about(exact: Answers, characters: int) -> str:
    """The texts that were read, one sentence a line."""
    tokens = [each[-1] for each in exact.documents]
    return (
        f"`documents`: {len(tokens)} documents of {min(tokens):,} to {max(tokens):,} tokens, each read as a whole; the "
        "difference is that of the mean negative log-likelihood to exact attention's.\n"
        f"`last_word`: {len(exact.words)} passages of {characters:,} characters and a sentence, with four words to "
        "choose from; same words: the choice of exact attention."
    )


def content(texts: str | None) -> str:
    """A digest of the texts that are read, and of the tasks."""
    read = standard_library() if texts is None else read_documents([Path(texts)])
    tasks = [path.read_text("utf-8") for path in sorted(TASKS.iterdir()) if path.is_file()]
    return hashlib.sha256(json.dumps([read, tasks]).encode()).hexdigest()


def main(
    model: Annotated[str, typer.Option(help="a folder or hub id")] = demo.DECODER,
    texts: Annotated[str | None, typer.Option(help="a file or folder of texts")] = None,
    attention: Annotated[tuple[str, ...], typer.Option(help="names; the first is the exact one")] = ATTENTIONS,
    documents: int = 2,
    characters: Annotated[int, typer.Option(help="of a document, at most")] = 16_000,
    passages: int = 8,
    passage: Annotated[int, typer.Option(help="characters of a passage, at least")] = 6_000,
    keep: Path = Path("harness"),
    out: Path | None = None,
) -> None:
    """Run what is not kept yet, and print the table."""
    folder = demo.decoder() if model == demo.DECODER else model
    read = {"texts": texts} if texts else {}
    asked = {
        "documents": {"items": documents, "characters": characters, **read},
        "last_word": {"items": passages, "characters": passage, **read},
    }
    basis = [folder, asked, harness_version, code(), content(texts)]
    computed: dict[str, Answers] = {}
    for name in attention:
        digest = hashlib.sha256(json.dumps([name, basis]).encode()).hexdigest()[:12]
        kept = keep / f"{digest}.json"
        if not kept.exists():
            write(kept, json.dumps(answers(folder, name, asked)))
        computed[name] = Answers(*json.loads(kept.read_text("utf-8")))
    exact = computed[attention[0]]
    rows = [row(name, its, exact) for name, its in computed.items()]
    harness = f"lm_eval {harness_version}, batches of one item."
    parts = [about(exact, passage), sheet.table(HEAD, rows), harness]
    sheet.publish("The LM Evaluation Harness with attention by name", parts, out)


if __name__ == "__main__":
    sheet.run(main)
