"""The recipe of docs/how-to/parallel.md: Trainer on a decoder whose tokens are split over ranks.

torchrun --standalone --nproc-per-node 2 -m tests.library.distributed.trainer FOLDER
"""

import json
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.utils.data import DataLoader

import subquad as sq
from tests.library.distributed.models import llama

LENGTH, STEPS = 16, 20


def texts() -> list[Tensor]:
    """Texts of several lengths, each an arithmetic sequence of tokens."""
    generator = torch.Generator().manual_seed(0)
    starts, lengths = (torch.randint(low, LENGTH + 1, (40,), generator=generator).tolist() for low in (1, 6))
    return [(start + 3 * torch.arange(n)) % 50 + 5 for start, n in zip(starts, lengths, strict=True)]


def collated(items: list[Tensor]) -> dict[str, Tensor]:
    """A batch that is padded on the right."""
    ids = torch.stack([torch.nn.functional.pad(item, (0, LENGTH - len(item))) for item in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where(ids > 0, -100)}


class SameBatches(hf.Trainer):
    """Every rank reads the same batches, of which the collator cuts its part."""

    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.args.seed)
        options = {"batch_size": self.args.per_device_train_batch_size, "collate_fn": self.data_collator}
        return DataLoader(self.train_dataset, shuffle=True, generator=generator, **options)


def losses(group: Any) -> list[float]:
    """The loss of each step; with a group, on this rank's part of the tokens."""
    torch.manual_seed(0)
    model = llama()
    sq.hf.swap(model, "linear", parallel=group)
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = hf.TrainingArguments(
        mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, **options
    )
    trainer = SameBatches(
        model=model,
        args=args,
        train_dataset=texts(),
        data_collator=collated if group is None else lambda items: sq.hf.shard(model, collated(items)),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    hf.logging.set_verbosity_error()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps({"losses": losses(dist.group.WORLD)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
