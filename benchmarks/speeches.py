"""Real inputs of attention: speeches as the encoder of the demo extra reads them, at 512 tokens and more."""

import copy
import zipfile
from dataclasses import dataclass
from pathlib import Path

from subquad import hf
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.models.pretrained import Pretrained, load

ARCHIVE = Path("state_union", "state_union.zip")  # in the folder of real data


@dataclass(frozen=True)
class Passages:
    """Speeches cut to one length, special tokens included, and the encoder that reads them."""

    model: Pretrained
    items: list[list[int]]

    def inputs(self, layers: list[int] | None = None) -> list[LayerInputs]:
        """Queries, keys and values of these layers, or of all, passage by passage."""
        found = []
        for item in self.items:
            with recorded(self.model.model) as calls:
                self.model.forward([item])
            found += [call for call in calls if layers is None or call.number in layers]
        return found


def speeches(data: Path) -> list[str]:
    """All speeches, the latest first."""
    with zipfile.ZipFile(data / ARCHIVE) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        return [archive.read(name).decode("latin1") for name in reversed(names)]


def passages(data: Path, length: int, count: int) -> Passages:
    """The first `length` tokens of the latest `count` speeches that are long enough.

    Beyond the encoder's own 512 positions its table of positions is interpolated.
    """
    own = load(None)
    model = own.with_model(hf.extend_positions(copy.deepcopy(own.model), length)) if length > own.limit else own
    content = length - len(own.wrap([], length))
    items = []
    for speech in speeches(data):
        ids = own.content_ids(speech)
        if len(ids) >= content:
            items.append(model.wrap(ids[:content], length))
        if len(items) == count:
            return Passages(model, items)
    raise SystemExit(f"only {len(items)} speeches have {length:,} tokens, not {count}")
