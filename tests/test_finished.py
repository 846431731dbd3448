"""What `--resume` finds in an output that is finished: it says what it compared, and names what has changed."""

import json
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file

from fwanda_pruner.cli import main

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def prune(tmp_path, monkeypatch, capsys):
    """Prunes a tiny model of a family to `out`; once more with --resume: exit code and last line."""
    monkeypatch.chdir(tmp_path)

    def run(family="mistral", save="dense") -> tuple[int, str]:
        if not Path("model").exists():
            tiny.build(family).save_pretrained("model")
        settings = ["--method", "magnitude", "--no-check", "--save", save, "--device", "cpu"]
        code = main(["prune", "model", *settings, "--output", "out", "--resume"])
        return code, " ".join(capsys.readouterr()).strip().splitlines()[-1].strip()

    return run


def edit(file: str, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def flip_last_bit(file: str, ending: str) -> None:
    def flip(tensors):
        tensors[next(name for name in sorted(tensors) if name.endswith(ending))].view(-1)[-1] ^= 1

    edit(file, flip)


@pytest.mark.fault("changed output")
@pytest.mark.parametrize("save", ["dense", "packed", "masks"])
def test_it_says_what_was_compared(save, prune):
    assert prune(save=save)[0] == 0
    code, line = prune(save=save)
    assert code == 0 and line.endswith(
        "this command: 14 matrices in its files have as many zeros as its report says; model and texts were not read"
    )


@pytest.mark.fault("changed output")
@pytest.mark.parametrize("change", ["rows", "extra"])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_masks_are_those_of_the_weights_and_no_others(change, family, prune):
    assert prune(family, "masks")[0] == prune(family, "masks")[0] == 0

    def damage(masks):
        name = min(masks)
        masks |= {"extra": masks[name].clone()} if change == "extra" else {name: masks[name].roll(1, 0)}

    edit("out/masks.safetensors", damage)
    code, line = prune(family, "masks")
    assert code == 2 and {"rows": "is not that of its weights", "extra": "holds a mask of extra"}[change] in line


@pytest.mark.fault("changed output")
def test_a_report_without_pruned_matrices_is_refused(prune):
    assert prune()[0] == 0
    report = json.loads(Path("out/fwanda.json").read_text())
    Path("out/fwanda.json").write_text(json.dumps(report | {"matrices": []}))
    code, line = prune()
    assert code == 2 and "lists no pruned matrix" in line


@pytest.mark.fault("changed output")
@pytest.mark.parametrize("family", [name for name in ("mixtral", "gpt_oss") if name in tiny.FUSED])
def test_bits_of_packed_experts_are_checked(family, prune):
    assert prune(family, "packed")[0] == 0
    assert prune(family, "packed")[0] == 0
    flip_last_bit("out/model.safetensors", "experts.packed_down_proj_0")
    code, line = prune(family, "packed")
    assert code == 2 and "experts" in line


@pytest.mark.fault("changed output")
@pytest.mark.parametrize("save", ["dense", "masks"])
def test_experts_under_their_own_name_are_counted(save, prune):
    assert prune("gpt_oss", save)[0] == 0
    code, line = prune("gpt_oss", save)
    assert code == 0 and "not counted" not in line

    def damage(tensors):
        tensors[next(name for name in sorted(tensors) if name.endswith("experts.down_proj"))].fill_(1)

    edit("out/model.safetensors", damage)
    assert prune("gpt_oss", save)[0] == 2


@pytest.mark.fault("changed output")
@pytest.mark.skipif("mixtral" not in tiny.FUSED, reason="transformers 4 has lists of linear layers")
def test_experts_under_other_names_are_said_to_be_left_out(prune):
    assert prune("mixtral")[0] == 0
    code, line = prune("mixtral")
    assert code == 0 and line.endswith("with other names there were not counted; model and texts were not read")
