"""The program of each of two processes: `torchrun --nproc-per-node 2 -m tests.research.training.two FOLDER`."""

import hashlib
import json
import sys
from pathlib import Path

import torch

from subquad.research.training.run import Outcome, train
from subquad.tools.runs import processes
from tests.research.training.small import small, without_times

# Validation and test have 512 examples: at 100 a process, the last batch of both processes together has 112.
COMMON = ("training.evaluation_batch=100",)
RUNS = {
    "full": ("model.method=full", "training.schedule=linear"),
    "i-clustered": ("model.method=i-clustered:clusters=4,topk=4", "training.accumulate=2"),
    "lha": ("model.method=lha:buckets=2",),
    "performer": ("model.method=performer:features=8,redraw=5",),
    "routing": ("model.method=routing:clusters=2",),
    "longer": ("model.method=full",),  # gone on with: 16 steps, then 24
}


def run(name: str, out: Path) -> Outcome:
    if name == "longer":
        train(small(*COMMON, *RUNS[name], "training.steps=16"), out)
    return train(small(*COMMON, *RUNS[name]), out)


def checksum(model: torch.nn.Module) -> str:
    """The checksum of all parameters and buffers, including those that are not saved."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode() + tensor.detach().numpy().tobytes())
    return found.hexdigest()


def main(folder: Path) -> None:
    for name in RUNS:
        outcome = run(name, folder / name)
        sums: list[str] = ["", ""]
        torch.distributed.all_gather_object(sums, checksum(outcome.model))
        if torch.distributed.get_rank() == 0:
            found = {"checksums": sums, "history": without_times(outcome.history)}
            (folder / f"{name}.json").write_text(json.dumps(found))
            torch.save(outcome.model.state_dict(), folder / f"{name}.pt")
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
