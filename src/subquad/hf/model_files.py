"""The contents of a model's folder or hub id: config, weights, tokenizer; each way to fail in one line.

Nothing of a folder is run: its own code is refused, and pickles are read as plain tensors (`weights_only`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from subquad.core.errors import InputError
from subquad.core.reading import check_size, exists, is_folder, read_json

Pooling = Literal["mean", "cls"]

_READ_WHOLE = (".json", ".txt", ".model", ".jinja")  # by transformers; weights are mapped

POOLING = "1_Pooling/config.json"  # of sentence-transformers
# The prefix of the names of its poolings; several may be true, and are then joined.
_MODES = "pooling_mode_"
_MEAN, _CLS = "pooling_mode_mean_tokens", "pooling_mode_cls_token"


def check_source(where: str) -> None:
    """InputError where a model cannot be under this name: no folder, no hub id."""
    if not where.strip() or not where.isprintable():
        raise InputError(f"no model {where!r}: give a hub id or a folder")
    path = Path(where)
    if exists(path):
        if not is_folder(path):
            raise InputError(f"no model at {where}: it is a file; give the folder that it is in")
        if not exists(path / "config.json"):
            raise InputError(f"no model in the folder {where}: it has no config.json")
        for file in sorted(path.iterdir()):
            if exists(file) and not is_folder(file) and file.suffix in _READ_WHOLE:
                check_size(file)
        return
    if where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise InputError(f"no model at {where}: there is no such folder")


def read_config(where: str) -> Any:
    """The config of a model, whose fields that everything else depends on have the right types.

    Raises:
        InputError: there is none, it is damaged, or the model needs code of its own.
    """
    import transformers

    check_source(where)
    file = Path(where) / "config.json"
    config = read_json(file) if exists(file) else called(transformers.PretrainedConfig.get_config_dict, where)[0]
    if not isinstance(config, dict):
        raise InputError(f"{where}: its config.json must be an object with named fields, not a {type(config).__name__}")
    _refuse_custom_code(where, "config.json", config)
    if str(config.get("model_type")).startswith("subquad-") and optional_file(where, "tokenizer_config.json") is None:
        raise InputError(
            f"{where} is a model of subquad train, which has no tokenizer to read text with; in Python, sq.plan, "
            "sq.hf.swap and sq.audit take it"
        )
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise InputError(f"{where}: 'architectures' in its config.json must be a list of names, not {named!r}")
    return from_pretrained(transformers.AutoConfig, where)


def read_tokenizer(where: str) -> Any:
    """The tokenizer of a model; InputError where there is none, or where it needs code of its own."""
    import transformers

    tokenizer = from_pretrained(transformers.AutoTokenizer, where)
    _refuse_custom_code(where, "tokenizer_config.json", tokenizer.init_kwargs)
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, "▁"}:  # made from the config alone
        raise InputError(
            f"no tokenizer in {where}: without its files, the vocabulary has special tokens alone; save it there with "
            "tokenizer.save_pretrained(…)"
        )
    return tokenizer


def read_model(auto: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """A model by one of transformers' auto classes, and its missing, unexpected and misshapen weights in the file."""
    return from_pretrained(
        auto,
        where,
        attn_implementation="eager",  # a config may name one that transformers would fetch, or that is not here
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused by name
    )


def from_pretrained(auto: Any, where: str, **options: Any) -> Any:
    """`auto.from_pretrained` that never runs a folder's own code, with one line for all that it raises."""
    return called(auto.from_pretrained, where, trust_remote_code=False, **options)


def called(load: Any, where: str, **options: Any) -> Any:
    """Call a loader of transformers; its many ways to fail in one line."""
    try:
        return load(where, **options)
    except Exception as error:  # transformers, safetensors and the hub client raise kinds of their own
        if why := _not_reached(where, error):
            raise InputError(f"no model {where!r}: there is no such folder, and {why}") from error
        reason = " ".join(
            next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).split()
        )
        reason += "" if exists(Path(where)) else f" (and there is no folder {where!r} here)"
        what = getattr(load, "__self__", load).__name__.removeprefix("Auto").removeprefix("PreTrained").lower()
        raise InputError(f"cannot load {what} from {where!r}: {reason}") from error


def _not_reached(where: str, error: Exception) -> str | None:
    """The reason why a hub id was not found, without the network; None if that is not the error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if exists(Path(where)) or not isinstance(error.__cause__, LocalEntryNotFoundError):
        return None
    offline = "nothing is downloaded, because HF_HUB_OFFLINE is set"
    return (
        "no model of this name is in the cache of the Hugging Face hub; "
        f"{offline if constants.HF_HUB_OFFLINE else 'the hub cannot be reached, so nothing is downloaded'}"
    )


def is_sentence_transformer(where: str) -> bool:
    """True if this is the folder of a SentenceTransformer, whose modules are all those of sentence-transformers.

    Raises:
        InputError: a damaged list of modules, or a module of the folder's own.
    """
    file = optional_file(where, "modules.json")
    if file is None:
        return False
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{file} must be a list of objects with named fields")
    for module in modules:
        if not str(module.get("type")).startswith("sentence_transformers."):
            raise InputError(f"{file} names the module {module.get('type')!r}, whose code is not run here")
    return True


def has_pooling(where: str) -> bool:
    """True if the folder configures sentence-transformers' pooling of hidden states."""
    return optional_file(where, POOLING) is not None


def pooling_of(where: str) -> Pooling:
    """The pooling that the folder configures for sentence-transformers; otherwise the mean.

    Raises:
        InputError: a damaged file, or a way of pooling that is neither the mean nor the first token.
    """
    file = optional_file(where, POOLING)
    if file is None:
        return "mean"
    config = read_json(file)
    if not isinstance(config, dict):
        raise InputError(f"{file} must be an object with named fields, not a {type(config).__name__}")
    named = config.get("pooling_mode")
    if named is not None:
        chosen = list(map(str, named)) if isinstance(named, list) else [str(named)]
    else:
        modes = {name: value for name, value in config.items() if name.startswith(_MODES)}
        for name, value in modes.items():
            if not isinstance(value, bool):
                raise InputError(f"{file}: {name!r} must be true or false, not {value!r}")
        chosen = [name for name, value in modes.items() if value]
    ways: dict[str, Pooling] = {_MEAN: "mean", _CLS: "cls", "mean": "mean", "cls": "cls"}
    if len(chosen) != 1 or chosen[0] not in ways:
        pooled_by = " and ".join(name.removeprefix(_MODES) for name in chosen) or "nothing"
        raise InputError(
            f"{file} pools {pooled_by}, but the mean of the tokens or the first one (cls) can be read here"
        )
    return ways[chosen[0]]


def optional_file(where: str, name: str) -> Path | None:
    """A file of a model; None where it has none."""
    from transformers.utils import cached_file

    path = called(cached_file, where, filename=name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _refuse_custom_code(where: str, file: str, config: Mapping[str, Any]) -> None:
    if config.get("auto_map"):
        raise InputError(
            f"{where} asks to run code of its own ('auto_map' in its {file}), which is never done here; if "
            "transformers has this architecture too, remove 'auto_map' from a copy of the folder"
        )
