"""Tasks of lm-eval: accuracies as computed by hand, the protocol in the result, and one line for every mistake."""

import contextlib
import importlib.util
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tokenizers.processors import TemplateProcessing

from fwanda_pruner.cli import main
from fwanda_pruner.errors import UserError
from fwanda_pruner.evaluate.lm_eval_tasks import ZEROSHOT, evaluate_tasks, mean_accuracy
from fwanda_pruner.sweep.tables import evaluation

HUB = Path(__file__).resolve().parents[2] / "shared" / "data" / "hub"
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
needs_hub = pytest.mark.skipif(not HUB.is_dir(), reason="the data sets of the tasks are not beside the repository")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` caches what it makes of a file in the test's folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def examples(count: int) -> list[dict]:
    draw = random.Random(0)
    words = [f"w{i}" for i in range(3, tiny.VOCABULARY)]
    return [
        {
            "question": " ".join(draw.choices(words, k=5)),
            "options": [" ".join(draw.choices(words, k=k)) for k in (1, 2, 3)],
            "answer": draw.randrange(3),
        }
        for _ in range(count)
    ]


@pytest.fixture
def task(tmp_path):
    """Path of a YAML file with a multiple-choice task of 12 examples; its data lie beside it."""
    return write_task(tmp_path, "word_choice", examples(12))


def write_task(folder, name, rows, **settings) -> str:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 3.5},
        **settings,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return str(folder / f"{name}.yaml")


@torch.no_grad()
def hits(model, tokenizer, rows) -> tuple[list[bool], list[bool]]:
    """Whether the likeliest option is right, by log-probability and by log-probability a character."""
    plain, normed = [], []
    for row in rows:
        question, scores = tokenizer(row["question"])["input_ids"], []
        for option in row["options"]:
            ids = torch.tensor(question + tokenizer(option)["input_ids"])
            log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            scores.append(sum(float(log_p[t - 1, ids[t]]) for t in range(len(question), len(ids))))
        by_length = [score / len(option) for score, option in zip(scores, row["options"], strict=True)]
        plain.append(scores.index(max(scores)) == row["answer"])
        normed.append(by_length.index(max(by_length)) == row["answer"])
    return plain, normed


@needs_lm_eval
@pytest.mark.parametrize("limit", [None, 5])
def test_accuracy_and_standard_error_are_those_computed_by_hand(task, limit):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    results = evaluate_tasks(model, tokenizer, [task], batch_size=4, limit=limit)["tasks"]["word_choice"]
    rows = examples(12)[:limit]
    for metric, right in zip(("acc", "acc_norm"), hits(model, tokenizer, rows), strict=True):
        share = sum(right) / len(rows)
        assert results[metric] == pytest.approx(share)
        assert results[f"{metric}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(rows) - 1)))
    assert (results["samples"], results["samples_total"]) == (len(rows), 12)


@needs_lm_eval
def test_the_result_carries_the_protocol_as_json(task):
    import lm_eval

    results = evaluate_tasks(tiny.llama(), tiny.tokenizer(), [task], batch_size=2, limit=np.int64(3))
    assert json.loads(json.dumps(results)) == results
    assert results.pop("tasks").keys() == {"word_choice"}
    expected = {"version": lm_eval.__version__, "batch_size": 2, "limit": 3, "data_dir": None, "bos": False}
    assert results == expected


@needs_lm_eval
def test_versions_and_few_shot_examples_are_those_of_the_task(tmp_path):
    none = write_task(tmp_path, "plain", examples(4))
    two = write_task(tmp_path, "shots", examples(4), num_fewshot=2, fewshot_split="validation")
    results = evaluate_tasks(tiny.llama(), tiny.tokenizer(), [none, two])["tasks"]
    assert {name: (facts["version"], facts["num_fewshot"]) for name, facts in results.items()} == {
        "plain": (3.5, 0),
        "shots": (3.5, 2),
    }


@needs_lm_eval
def test_one_example_has_no_standard_error(task):
    assert evaluate_tasks(tiny.llama(), tiny.tokenizer(), [task], limit=1)["tasks"]["word_choice"]["acc_stderr"] is None


@needs_lm_eval
def test_bos_is_reported_as_the_tokenizer_decides(task):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    seen = []
    model = tiny.llama()
    model.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append([*args, *kwargs.values()][0]), with_kwargs=True
    )
    assert evaluate_tasks(model, tokenizer, [task], batch_size=1)["bos"] is True
    assert all(ids[0, 0] == 1 and (ids[0, 1:] != 1).all() for ids in seen)


@needs_lm_eval
@pytest.mark.parametrize("training", [False, True])
def test_model_tokenizer_random_states_and_standard_output_are_left_as_they_were(task, training, capsys):
    model, tokenizer = tiny.llama().train(training), tiny.tokenizer()
    weights = [p.clone() for p in model.parameters()]
    states = torch.random.get_rng_state(), random.getstate()
    evaluate_tasks(model, tokenizer, [task])
    assert model.training is training and tokenizer.pad_token is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert torch.equal(torch.random.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert capsys.readouterr() == ("", "")


def test_the_mean_of_seven_has_the_error_of_independent_tasks():
    results = [{"acc": 0.2, "acc_stderr": 0.03}, {"acc": 0.6, "acc_stderr": 0.04}]
    assert mean_accuracy(results) == {"acc": pytest.approx(0.4), "acc_stderr": pytest.approx(0.025)}
    assert mean_accuracy([*results, {"acc": 0.1, "acc_stderr": None}])["acc_stderr"] is None


@needs_lm_eval
@needs_hub
def test_zeroshot_and_mmlu_run_from_a_folder(monkeypatch):
    results = evaluate_tasks(tiny.llama(), tiny.tokenizer(), ["zeroshot", "mmlu", "boolq"], data_dir=HUB, limit=2)
    assert list(results["tasks"]) == list(ZEROSHOT)
    for name, facts in results["tasks"].items():
        assert facts["num_fewshot"] == 0 and facts["samples"] == 2 and facts["acc_stderr"] is not None
        assert ("acc_norm" in facts) == (name not in ("boolq", "rte", "winogrande"))
    mean = sum(facts["acc"] for facts in results["tasks"].values()) / 7
    assert results["zeroshot"]["acc"] == pytest.approx(mean) and results["zeroshot"]["acc_stderr"] > 0
    shown = evaluation({"perplexity": [], "lm_eval": results})
    assert shown["zero-shot"] == results["zeroshot"]["acc"] and shown["mmlu stderr"] == results["mmlu"]["acc_stderr"]
    assert shown["boolq"] == results["tasks"]["boolq"]["acc"] and len(shown) == 2 * (1 + 1 + 7)
    mmlu = results["mmlu"]
    assert mmlu["num_fewshot"] == 5 and mmlu["samples"] == 2 * 57 and mmlu["acc_stderr"] > 0
    assert all(facts["num_fewshot"] == 5 for facts in mmlu["tasks"].values())


@needs_lm_eval
def test_a_data_set_that_the_folder_lacks_is_one_line_and_is_not_downloaded(tmp_path):
    with pytest.raises(
        UserError, match=r"has no folder allenai/openbookqa; `hf download .*openbookqa` fetches"
    ) as error:
        evaluate_tasks(tiny.llama(), tiny.tokenizer(), ["openbookqa"], data_dir=tmp_path)
    assert "\n" not in str(error.value)


@needs_lm_eval
def test_a_data_set_that_cannot_be_loaded_is_one_line(tmp_path):
    import datasets

    load = datasets.load_dataset
    (tmp_path / "allenai" / "openbookqa").mkdir(parents=True)
    with pytest.raises(UserError, match="^cannot load the data set .*allenai/openbookqa: ") as error:
        evaluate_tasks(tiny.llama(), tiny.tokenizer(), ["openbookqa"], data_dir=tmp_path)
    assert "\n" not in str(error.value) and datasets.load_dataset is load


@needs_lm_eval
def test_short_memory_names_the_flag(task):
    model = tiny.llama()

    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UserError, match="^the tasks do not fit the memory of cpu; use a smaller --batch-size$"):
        evaluate_tasks(model, tiny.tokenizer(), [task])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    tiny.llama().save_pretrained(path / "model")
    tiny.tokenizer().save_pretrained(path / "model")
    (path / "eval.txt").write_text(tiny.text(300, seed=1))
    return path


@needs_lm_eval
def test_the_command_prints_perplexity_and_tasks_as_one_json(folder, task, capsys):
    command = ["eval", str(folder / "model"), "--eval", str(folder / "eval.txt"), "--eval-seqlen", "24"]
    assert main([*command, "--tasks", f"ppl,{task}", "--limit", "4", "--batch-size", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["perplexity"][0]["windows"] > 10 and facts["sparsity"]["matrices"] == 0
    assert facts["lm_eval"]["batch_size"] == 3 and facts["lm_eval"]["tasks"]["word_choice"]["samples"] == 4


@needs_lm_eval
def test_without_ppl_no_text_is_read(folder, task, capsys):
    assert main(["eval", str(folder / "model"), "--tasks", task]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == {"model", "perplexity", "sparsity", "lm_eval"} and facts["perplexity"] == []
    assert facts["lm_eval"]["batch_size"] == 8


MISTAKES = {
    "unknown task": (["--tasks", "zeroshot,arc_eazy"], "got 'arc_eazy'"),
    "no task": (["--tasks", ""], "--tasks: expected a value"),
    "file that does not exist": (["--tasks", "nowhere.yaml"], "--tasks nowhere.yaml: no such file"),
    "limit of none": (["--tasks", "rte", "--limit", "0"], "--limit must be an integer in [1, 1000000000], got 0"),
    "huge limit": (["--tasks", "rte", "--limit", str(10**30)], "--limit must be an integer in [1, 1000000000], got 10"),
    "batch of none": (["--tasks", "rte", "--batch-size", "0"], "--batch-size must be an integer in [1, 1000000000]"),
    "data nowhere": (["--tasks", "rte", "--eval-data", "nowhere"], "--eval-data must be a folder of data sets"),
    "text without ppl": (["--tasks", "rte", "--eval", "a.txt"], "--eval is the text of ppl, got --tasks rte"),
    "limit without tasks": (["--limit", "5"], "for the tasks of lm-eval; name some by --tasks"),
}


@needs_lm_eval
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_the_model_is_loaded(name, capsys):
    extra, expected = MISTAKES[name]
    assert main(["eval", "no-such-model", *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fwanda: error: ") and expected in error and error.count("\n") == 1


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "no-such-model", "--tasks", "zeroshot"]) == 2
    assert capsys.readouterr().err == (
        "fwanda: error: --tasks zeroshot needs lm-eval; run: pip install 'lm-eval>=0.4.13'\n"
    )


@pytest.mark.parametrize(
    "text", ["task: [1,2", "task: t\ninclude: nowhere.yaml", "group: g\ntask: [there_is_no_such_task]"], ids=str
)
def test_a_broken_task_file_is_one_line(tmp_path, text):
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="^lm-eval cannot load") as error:
        evaluate_tasks(tiny.llama(), tiny.tokenizer(), [str(path)], progress=False)
    assert "\n" not in str(error.value)


@needs_lm_eval
@pytest.mark.fault("odd calls")
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tasks": 5}, "--tasks must be a list of texts, got 5"),
        ({"tasks": ["rte", None]}, "--tasks must be a list of texts, got ('rte', None)"),
        ({"tasks": []}, "--tasks must name a task, got ()"),
        ({"tasks": None}, "--tasks must name a task, got None"),
        ({"limit": "5"}, "--limit must be an integer in [1, 1000000000], got '5'"),
        ({"limit": 0.5}, "--limit must be an integer in [1, 1000000000], got 0.5"),
        ({"batch_size": True}, "--batch-size must be an integer in [1, 1000000000], got True"),
        ({"batch_size": None}, "--batch-size must be an integer in [1, 1000000000], got None"),
        ({"data_dir": 5}, "data_dir must be a path, got int"),
        ({"data_dir": "x" * 5000}, "--eval-data must be a folder of data sets"),
        ({"data_dir": "two\nlines"}, "--eval-data must be a folder of data sets"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_of_other_types_are_one_line(arguments, message):
    with pytest.raises(UserError) as error:
        evaluate_tasks(tiny.llama(), tiny.tokenizer(), **{"tasks": ["rte"], **arguments})
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and len(str(error.value)) < 300


@needs_lm_eval
@pytest.mark.fault("compiled")
def test_a_wrapper_of_torch_compile_is_one_line(task):
    with pytest.raises(UserError, match="^the model is a wrapper of torch.compile; give the model itself"):
        evaluate_tasks(torch.compile(tiny.llama(), backend="eager"), tiny.tokenizer(), [task])


@needs_lm_eval
@pytest.mark.fault("several dtypes")
def test_a_model_that_does_not_run_with_its_dtypes_is_one_line(task):
    model = tiny.llama()
    model.model.layers[1].bfloat16()
    with pytest.raises(UserError, match="^the weights have 2 dtypes "):
        evaluate_tasks(model, tiny.tokenizer(), [task], progress=False)


@needs_lm_eval
@pytest.mark.parametrize("tokens", [tiny.VOCABULARY, tiny.VOCABULARY - 1])
def test_the_ids_of_each_batch_are_looked_at_only_where_the_tokenizer_has_too_many(task, tokens):
    model, hooks = tiny.llama(vocab_size=tokens), []
    embedding = model.get_input_embeddings()
    model.register_forward_pre_hook(lambda *_: hooks.append(len(embedding._forward_pre_hooks)))
    with contextlib.suppress(UserError):  # the token without a row may occur
        evaluate_tasks(model, tiny.tokenizer(), [task], progress=False)
    assert hooks[-1] == (tokens < tiny.VOCABULARY)


@needs_lm_eval
def test_a_tokenizer_with_more_tokens_than_the_model_is_one_line(task):
    model = tiny.llama(vocab_size=tiny.VOCABULARY // 2)
    before = repr(vars(model.get_input_embeddings()))
    with pytest.raises(UserError, match=rf"^token ids must be in \[0, {tiny.VOCABULARY // 2}\), got"):
        evaluate_tasks(model, tiny.tokenizer(), [task])
    assert repr(vars(model.get_input_embeddings())) == before


@needs_lm_eval
def test_a_task_that_fails_in_lm_eval_is_one_line(tmp_path, folder, capsys):
    task = write_task(tmp_path, "no_such_answer", [{"question": "w3", "options": ["w4"], "answer": {}}])
    assert main(["eval", str(folder / "model"), "--tasks", task]) == 2
    error = capsys.readouterr().err
    assert f"fwanda: error: lm-eval cannot run {task}: " in error and "Traceback" not in error
