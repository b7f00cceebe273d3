"""Every command in README and the documentation is one that the shell and the real command line accept."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra hf brings transformers")
pytest.importorskip("optuna", reason="the extra tune brings optuna")

from tests.command_lines import Command, Wrong, arguments, check, commands, split
from tests.test_prose import ROOT, name_of
from tests.test_releases import has_address

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_accepted(path: Path):
    wrong = list(wrong_commands(path.read_text("utf-8")))
    assert not wrong, "\n".join(f"{name_of(path)}, {each}" for each in wrong)


def wrong_commands(text: str) -> Iterator[str]:
    for command in commands(text):
        if isinstance(command, tuple):
            yield f"line {command[0]}: {command[1]}"
            continue
        try:
            check_command(command)
        except Wrong as error:
            yield f"line {command.line}: {' '.join(command.words)}: {error}"


def check_command(command: Command) -> None:
    given = arguments(command.words)
    if command.program == "torchrun":
        check_torchrun(command.words)
    if given is not None:
        check(given, command.inline)
    elif command.program in ("python", "python3", "torchrun"):
        check_script(command.words)
    elif command.program == "pytest":
        check_paths(command.words[1:])
    elif command.program == "pip":
        check_packages(command.words)


def check_torchrun(words: Sequence[str]) -> None:
    run = pytest.importorskip("torch.distributed.run")
    try:
        run.get_args_parser().parse_args(list(words[1:]))
    except SystemExit:
        raise Wrong("torchrun does not accept this") from None


def check_script(words: Sequence[str]) -> None:
    """A script or module of the repository exists, and knows the options that it is given."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if module.split(".")[0] in ("tests", "subquad"):
            parts = ROOT.joinpath("src" if module.startswith("subquad") else "", *module.split("."))
            if not (parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file()):
                raise Wrong(f"there is no module {module}")
        return
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script is None or not script.startswith(("benchmarks/", "docs/", "tests/")):
        return
    if not (ROOT / script).is_file():
        raise Wrong(f"there is no script {script}")
    if script.startswith("benchmarks/"):
        known = options_of(ROOT / script)
        given = [word.partition("=")[0] for word in words[words.index(script) + 1 :] if word.startswith("--")]
        unknown = [option for option in given if option not in known]
        if unknown:
            raise Wrong(f"{script} has no option {', '.join(unknown)}")


@cache
def options_of(script: Path) -> frozenset[str]:
    """The possible options of a script: texts that look like one, and names that argparse or typer make one from."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (script, BENCHMARKS / "sheet.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in texts if text.isidentifier()}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg | ast.keyword) and node.arg}
    return frozenset(text for text in texts if text.startswith("--")) | {f"--{n.replace('_', '-')}" for n in names}


def check_paths(words: Sequence[str]) -> None:
    """The paths that pytest is given exist."""
    missing = [word for word in words if "/" in word and not (ROOT / word.partition("::")[0]).exists()]
    if missing:
        raise Wrong(f"there is no {', '.join(missing)}")


def check_packages(words: Sequence[str]) -> None:
    """Files of requirements exist, and subquad is installed from a clone or a wheel until an index has it."""
    for option, value in pairwise(words):
        if option in ("-r", "-c") and not (ROOT / value).is_file():
            raise Wrong(f"there is no {value}")
    installs = "freeze" not in words
    if installs and not has_address() and any(re.match(r"subquad($|[\[=<>~!])", word) for word in words):
        raise Wrong("no package index has subquad; install it from a clone: pip install -c constraints.txt .")


# ---------------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b  # c", [["a", "b"]]),
        ("X=1 a 'b c' \"d;e\" f\\ g", [["a", "b c", "d;e", "f g"]]),
        ("a --b \\\n  c && d | e > f.md", [["a", "--b", "c"], ["d"], ["e"]]),
        ("pip install '.[hf]' dist/subquad-*.whl", [["pip", "install", ".[hf]", "dist/subquad-*.whl"]]),
        ("a b=$(c d) ; e", [["a", "b=$(c d)"], ["e"]]),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[list[str]]):
    assert split(text) == words


@pytest.mark.parametrize("character", ["<", "|", "(", "*", ";", "&", "?", "[", ">", "'"])
def test_characters_that_the_shell_would_read_are_found(character: str):
    with pytest.raises(Wrong):
        split(f"subquad compare --methods a{character}b")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("subquad compare --metods local", "No such option"),
        ("subquad compair", "No such command"),
        ("subquad bench --lengths many", "many"),
        ("subquad compare demo-encoder --methods local:window=64 full", "unexpected extra argument"),
        ("subquad compare --methods 'locl'", "locl"),
        ("subquad compare --methods local:windw=64", "windw"),
        ("subquad compare --methods local:window=x", "window"),
        ("subquad plan --dtype bf17", "bf17"),
        ("subquad train lm --set training.stepz=3", "stepz"),
        ("subquad train text --method clustered:cluster=3", "cluster"),
        ("subquad tune text --search training.stepz=1:3", "stepz"),
        ("subquad reproduce spectrun", "spectrun"),
        ("subquad reproduce spectrum --set nothing=3", "nothing"),
        ("subquad methods locl", "locl"),
        ("torchrun --nproc-per-node 2 -m subquad bench --causl", "No such option"),
        ("torchrun --nproc-per-nodes 2 -m subquad bench", "torchrun"),
        ("python benchmarks/absent.py", "no script"),
        ("python benchmarks/spans.py --outt a", "no option --outt"),
        ("python -m tests.absent", "no module"),
        ("pytest tests/absent.py", "tests/absent.py"),
        ("pip install -r absent.txt", "absent.txt"),
    ],
)
def test_a_wrong_command_is_found(command: str, message: str):
    for line, text in ((4, f"One line.\n\n```sh\n{command}\n```\n"), (3, f"One line.\n\nUse `{command}`.\n")):
        (wrong,) = wrong_commands(text)
        assert wrong.startswith(f"line {line}: ")
        assert message in wrong


@pytest.mark.parametrize("known", [False, True])
def test_subquad_comes_from_an_index_once_it_has_an_address(monkeypatch, known):
    monkeypatch.setattr("tests.test_commands.has_address", lambda: known)
    found = list(wrong_commands("Use `pip install 'subquad[hf]'`.\n"))
    assert (not found) if known else "clone" in found[0]


@pytest.mark.parametrize(
    "code",
    [
        "subquad compare path/or/hub-id --text notes/ --methods 'local:window=32+keep:first full'",
        "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m subquad train text … --set parallel.sequence=2",
        "subquad train TASK --method linear",
        "subquad plan --minutes",
        "subquad COMMAND --help",
        "subquad --install-completion",
        "subquad report FOLDER",
    ],
)
def test_right_commands_are_accepted(code: str):
    assert list(wrong_commands(f"Use `{code}`.\n")) == []
