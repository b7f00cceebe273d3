"""docs/architectures.md: what the survey found, written from its results and read back by the tests."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

PAGE = Path(__file__).parents[4] / "docs" / "architectures.md"
WORDS = {
    "equal": "Equal to the model's own attention",
    "refused at swap": "Refused when swapped in, with the reason",
    "refused at first forward": "Refused only at the first forward pass",
    "silently wrong": "Silently wrong",
    "crashed": "Crashed",
    "not on the interface": "Attention outside of transformers' attention interface, which `swap` refuses",
    "cannot be built": "Not surveyed: no small model of this type could be built or fed",
}
HEAD = """# Architectures

This is the appendix of [the page on models](models.md), which has the models that users ask for, with advice.
It says for every model type that transformers {version} knows whether `full` can be swapped into it.
It is written by `python -m tests.library.hf.survey --out results.json --table`.
For each type, a small model runs on its own attention and then on `sq.hf.swap(model, "full")`.
Its weights are random and three times as large as usual, so that errors are visible.

These are compared:

- all outputs, including hidden states and poolers, without padding and with padding on either side;
- the gradients of all parameters and real-valued inputs;
- eight greedily generated tokens with a dynamic and a static cache;
- packed sequences.

Padded positions are compared too, unless they see no key.
A comparison is left out if it fails with the model's own attention.
*Equal* means that no tensor differs from that of the model's eager attention by more than 0.001 of its largest number.
Where the model's default attention differs from its eager attention, either may be the reference.

The last column of the first table is for decoders with [long prompts](how-to/long-prompts.md).
It describes `sq.hf.swap(model, "clustered-tail")`, with prompts of 27 tokens in blocks of 8.
With more top keys than there are keys the method is exact, and these must be the model's own:

- outputs without padding and with padding on the left, and of a prompt in two pieces on a cache;
- eight greedily generated tokens with a dynamic and a static cache;
- outputs before tokens that change.

With three clusters and three keys, outputs must differ, and each prompt of a left-padded batch must be as it is alone.
Models without `position_ids` are left out of the latter: rotary queries at other positions form other clusters.
*In 1 of 2 layers* means that the other causal layers attend to a window, and are left exact.
*No effect* means that few keys change no output of the small model.
Its keys are all 0 then, or only its last token gives an output.

`sq.hf.refusals(model, method)` says whether a method other than `full` can run in a model.

"""


def write(results: Mapping[str, Mapping[str, Any]], page: Path = PAGE) -> None:
    """Write the page."""
    counts = Counter(r["status"] for r in results.values())
    lines = [HEAD.format(version=".".join(transformers.__version__.split(".")[:2]))]
    lines += ["| what | model types |\n|---|---|\n"]
    lines += [f"| {WORDS[status]} | {counts[status]:,} |\n" for status in WORDS if counts[status]]
    halves = Counter(r["by halves"]["status"] for r in results.values() if "by halves" in r)
    lines += [
        f"\nOf the {halves.total():,} model types with causal self-attention in the first table, {halves['equal']:,} "
        f"run `clustered-tail` in long prompts, {halves['refused']:,} refuse it with the reason, "
        f"{halves['no effect']:,} show no effect, and {halves['not surveyed']:,} take no prompts of 27 tokens.\n"
    ]
    for status, words in WORDS.items():
        types = sorted(t for t, r in results.items() if r["status"] == status)
        if types:
            lines += [f"\n## {words}\n\n", *_rows(status, {t: results[t] for t in types})]
    page.write_text("".join(lines), encoding="utf-8")


def _rows(status: str, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if status == "equal":
        rows = (f"| {t} | {_class(r)} | {long_prompts(r)} |\n" for t, r in results.items())
        return ["| model type | class | long prompts |\n|---|---|---|\n", *rows]
    if not any(r.get("reason") for r in results.values()):
        return ["| model type | class |\n|---|---|\n", *(f"| {t} | {_class(r)} |\n" for t, r in results.items())]
    rows = (f"| {t} | {_class(r)} | {_short(r.get('reason', ''))} |\n" for t, r in results.items())
    return ["| model type | class | reason |\n|---|---|---|\n", *rows]


def long_prompts(result: Mapping[str, Any]) -> str:
    """What the page says of a model by halves; empty where there is no causal self-attention."""
    halves = result.get("by halves")
    if halves is None:
        return ""
    if halves["status"] in ("not surveyed", "no effect"):
        return str(halves["status"])
    if halves["status"] != "equal":
        return f"{halves['status']}: {_short(halves['reason'])}"
    swapped, layers = halves["layers"]
    return "yes" if swapped == layers else f"in {swapped} of {layers} layers"


def _class(result: Mapping[str, Any]) -> str:
    return f"`{result['class']}`" if "class" in result else ""


def _short(reason: str) -> str:
    text = re.sub(r"^\w*(Error|Exception): | \([\w.<> ]+:\d+\)$", "", reason)
    text = re.sub(r"^layer (\d+ \([^)]*\)) of \w+", r"layer \1", text)
    text = text.split("; pass a mapping")[0].split("; architectures that can")[0]
    text = text if len(text) <= 240 else text[:239].rsplit(" ", 1)[0] + " …"
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def documented_long_prompts(page: Path = PAGE) -> dict[str, str]:
    """What the page says of each model type in its column for long prompts, where it says something."""
    first = page.read_text("utf-8").partition(f"## {WORDS['equal']}")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in first.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2].removesuffix("|").strip() for row in rows[1:] if row[2].strip("| ")}


def documented(page: Path = PAGE) -> dict[str, str]:
    """The status of each model type, as the page has it."""
    found: dict[str, str] = {}
    status = ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            status = next(s for s, words in WORDS.items() if words == line[3:])
        elif status and line.startswith("| ") and not line.startswith("| model type"):
            found[line.split("|")[1].strip()] = status
    return found
