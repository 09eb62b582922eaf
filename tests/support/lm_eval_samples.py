"""Samples that a real lm-eval writes: two tasks in local files, and two toy models, one with noise
on its weights.

``python -m tests.support.lm_eval_samples FOLDER`` makes the files in tests/data/flips, in a minute
on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.toy import save_llama

LETTERS = "abcdefghijkl"
# Braces are doubled for ``str.format``; where lm-eval needs two of them, there are four.
CHOICE = """\
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}} A:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
GENERATE = """\
task: toy_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Q: {{{{question}}}} A:"
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
filter_list:
  - {{name: whole, filter: [{{function: take_first}}]}}
  - {{name: first, filter: [{{function: regex, regex_pattern: "(.)"}}, {{function: take_first}}]}}
"""
QUESTIONS = 24


def write_tasks(folder: Path, answers: dict[int, str] | None = None) -> None:
    """Write both tasks.

    ``answers``: the right answers of some generated texts; "?" is that of all others.
    """
    folder.mkdir(exist_ok=True)
    if answers is None:
        answers = {}
    choices = []
    texts = []
    for number in range(QUESTIONS):
        question = f"{number * 37 % 101} and {number * 11 % 53}?"
        choices.append(
            {"question": question, "choices": choices_of(number), "answer": number * 7 % 4}
        )
        texts.append({"question": question, "answer": answers.get(number, "?")})
    for name, task, rows in (("choice", CHOICE, choices), ("generate", GENERATE, texts)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.format(file=file))


def choices_of(number: int) -> list[str]:
    """Return four possible answers to a question: one letter each, one to three times."""
    choices = []
    for index in range(4):
        letter = LETTERS[(number + 5 * index) % len(LETTERS)]
        # The lengths differ because acc_norm divides by them, and acc does not.
        choices.append(letter * (1 + (number + index) % 3))
    return choices


def save_models(folder: Path) -> list[Path]:
    """Save the toy model as "toy", and with noise on its weights as "toy-noise"."""
    models = [save_llama(folder / name, dtype="float32") for name in ("toy", "toy-noise")]
    file = models[1] / "model.safetensors"
    weights = load_file(file)
    torch.manual_seed(1)
    for name, tensor in weights.items():
        weights[name] = tensor + 0.04 * tensor.std() * torch.randn_like(tensor)
    save_file(weights, file, {"format": "pt"})
    return models


def evaluate(model: Path, tasks: Path, output: Path, limit: int | None = None) -> Path:
    """Run both tasks and write samples and results as lm-eval's command line does; return the
    folder with them.

    Only lm-eval's own index of tasks, which takes it 20 seconds, is left out.
    """
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    tracker = EvaluationTracker(output_path=str(output))
    results: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        device="cpu",
        batch_size=1,
        limit=limit,
        tasks=[str(tasks / "choice.yaml"), str(tasks / "generate.yaml")],
        evaluation_tracker=tracker,
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    (folder,) = output.glob(f"*{model.name}")
    return folder


def generated(folder: Path) -> dict[int, str]:
    """Return the first text that each document got with filter "whole"."""
    (file,) = folder.glob("samples_toy_generate_*.jsonl")
    texts = {}
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        if sample["filter"] == "whole":
            texts[sample["doc_id"]] = sample["filtered_resps"][0]
    return texts


def make(folder: Path) -> list[Path]:
    """Return the folders of both models' results and samples.

    Of the texts that "toy" generates, a third is right as a whole, and a third by the first
    character.
    """
    models = save_models(folder)
    write_tasks(folder / "tasks")
    texts = generated(evaluate(models[0], folder / "tasks", folder / "first"))
    answers = {}
    for number, text in texts.items():
        if number % 3 == 1:
            answers[number] = text[:1]
        elif number % 3 == 2:
            answers[number] = text
    write_tasks(folder / "tasks", answers)
    return [evaluate(model, folder / "tasks", folder / "out") for model in models]


def copy_outputs(source: Path, target: Path) -> None:
    """Copy the samples of a model, and the part of its results that tests read."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("samples_*"):
        (target / file.name).write_bytes(file.read_bytes())
    (file,) = source.glob("results_*")
    results = json.loads(file.read_text())
    part = {key: results[key] for key in ("lm_eval_version", "results")}
    (target / "results.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary_folder:
        for model_folder in make(Path(temporary_folder)):
            model_name = model_folder.name.rpartition("__")[2]
            copy_outputs(model_folder, Path(sys.argv[1]) / model_name)
