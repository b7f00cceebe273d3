"""The record of a swap in a model's config, which is saved with the model and shows whether it was edited since.

    "subquad": {"layers": 2, "methods": {"0": {…}, "1": {…}}, "versions": {"subquad": "0.1.0", "torch": "2.13.0", …},
                "keep": "first", "floor": {"min_fidelity": 0.99, "pooling": "mean"}, "verified": {"2048": {…}},
                "audit": {"every": 20}, "digests": {"layers": …, "layer 0": …}}

`keep`, `floor`, `verified` and `audit` are left out where there is none, and `versions` in records of before 0.1.0.

Each part has a digest of its own, so that a warning can name the parts that differ. Records of earlier versions have
no digests, and are read without a warning: nothing shows what they were.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from subquad.core import checksums as seals
from subquad.core.entry_points import BrokenPlugin
from subquad.core.environment import changed_versions, output_versions
from subquad.core.spelling import listed
from subquad.hf.layers import KEEPS
from subquad.methods import Method, from_dict
from subquad.methods.core.plugins import UnknownMethod, record_of

DIGESTS = "digests"
PARTS = "parts"  # in the record of a model: those of its swapped parts
PARTS_DIGEST = "parts_digest"  # of which parts these are
MOST = 4  # differences that a warning names
OPTIONAL = ("keep", "versions", "floor", "verified", "audit")
DIGITS = 16  # of each digest: they tell edits from what was saved, and protect against nobody


@dataclass(frozen=True)
class Record:
    """The swap that a config records: the number of layers, the method of each, and whose attention stays exact.

    Attributes:
        versions: versions of the packages that decide the output, when the methods were chosen.
        floor: the floor of the plan whose methods these are, for `sq.audit`: see `Plan.floor`.
        verified: the plan's measurements at each length: see `Plan.verified`.
        audit: arguments of `sq.audit` that are not its defaults: see `Audit.record`.
    """

    layers: int
    methods: dict[int, Method]
    keep: str | None = None
    floor: dict[str, Any] | None = None
    verified: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    versions: dict[str, str] | None = field(default_factory=output_versions)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, with its digests."""
        methods = {str(number): record_of(method) for number, method in self.methods.items()}
        optional = {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}
        plain = {"layers": self.layers, "methods": methods, **optional}
        return {**plain, DIGESTS: _digests(plain)}


class OtherLayers(ValueError):
    """A record is one of a model with another number of layers, so no method of it can be right."""


def read_record(plain: Any, config: PreTrainedConfig) -> Record:
    """Read a record from plain data, which is in this config.

    Raises:
        ValueError: it is not a valid one.

    Warns:
        UserWarning: it was edited since it was written; names what differs.
    """
    try:
        methods = {int(number): from_dict(method) for number, method in plain["methods"].items()}
        for name in ("versions", "floor", "verified", "audit"):
            if not isinstance(plain.get(name), dict | None):
                raise ValueError(f"{name}={plain[name]!r}")
        record = Record(plain["layers"], methods, **{name: plain.get(name) for name in OPTIONAL})
        if record.keep is not None and record.keep not in list(KEEPS):
            raise ValueError(f"keep={record.keep!r}")
    except (UnknownMethod, BrokenPlugin) as error:
        raise type(error)(f"the config records a swap that is not possible here: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # also settings of another version
        raise ValueError(f"the config's record of a swap is damaged: {type(error).__name__}: {error}") from None
    _warn(_edits(plain), config)
    return record


def warn_of_other_versions(record: Record, config: PreTrainedConfig) -> None:
    """Warn if a record was made with versions whose outputs may differ from those here; names both."""
    changed = changed_versions(record.versions or {})
    if changed:
        recorded, current = (
            listed([f"{package} {pair[side]}" for package, pair in changed.items()]) for side in (0, 1)
        )
        warnings.warn(
            f"the attention of {_where(config)} was chosen with {recorded}, but this is {current}: its output may "
            "differ, and what was measured was measured there. Install those versions, or choose the methods anew here "
            "(subquad plan, or sq.hf.swap) and save the model again",
            stacklevel=3,
        )


def record_with_parts(whole: Mapping[str, Any] | None, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a model, None if only parts are swapped, with those of its parts: {name: record, or None}."""
    return {**(whole or {}), PARTS: dict(parts), PARTS_DIGEST: _digest_of_parts(parts)}


def warn_of_edited_parts(plain: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Warn if a record names other parts than it did when it was written; each part's record has its own digests."""
    if PARTS_DIGEST in plain and plain[PARTS_DIGEST] != _digest_of_parts(plain[PARTS]):
        _warn([f"its swapped parts are {listed(sorted(plain[PARTS])) or 'gone'}"], config)


def _digest_of_parts(parts: Mapping[str, Any]) -> str:
    return seals.digest_of({name: record is None for name, record in parts.items()})[:DIGITS]


def _warn(edits: list[str], config: PreTrainedConfig) -> None:
    """Warn of what was edited, if anything was."""
    if edits:
        named = edits if len(edits) <= MOST else [*edits[:MOST], f"{len(edits) - MOST} more"]
        warnings.warn(
            f"{_where(config)} was edited since the model was saved: {listed(named)}; the edited record runs. If "
            "that is meant, save the model again (save_pretrained); otherwise choose its methods anew (sq.hf.swap)",
            stacklevel=3,
        )


def _where(config: PreTrainedConfig) -> str:
    return str(Path(config.name_or_path) / "config.json") if config.name_or_path else f"the {type(config).__name__}"


def _edits(plain: Mapping[str, Any]) -> list[str]:
    """The differences between a record and what was written, in words."""
    if DIGESTS not in plain:
        return []
    saved, now, parts = plain[DIGESTS], _digests(plain), _parts(plain)
    if not isinstance(saved, Mapping):
        return ["the digests are gone"]
    lines = []
    for part in sorted({*saved, *now}):
        if part not in now:
            lines.append(f"{part} is gone" + ", and exact attention runs there" * part.startswith("layer "))
        elif saved.get(part) != now[part]:
            value = parts[part]
            if part.startswith("layer "):
                lines.append(f"{part} has {from_dict(value)}")
            else:
                lines.append(f"{part} is another" if isinstance(value, dict) else f"{part} is {value!r}")
    return lines


def _digests(plain: Mapping[str, Any]) -> dict[str, str]:
    return {part: seals.digest_of({part: value})[:DIGITS] for part, value in _parts(plain).items()}


def _parts(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a record that have a digest each."""
    methods = {f"layer {number}": method for number, method in plain["methods"].items()}
    return {**{name: value for name, value in plain.items() if name not in ("methods", DIGESTS)}, **methods}
