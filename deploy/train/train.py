"""Trains a LoRA adapter on preferences that `local2 export dpo|kto` wrote, and says what it did to held-out ones.

    python deploy/train/train.py dpo rows.jsonl --model google/gemma-3-4b-it --out adapter

The environment is deploy/train/requirements.txt; docs/training.md goes from the export to a model that answers as B.
Rows marked `test` (`local2 export dpo --test-share 0.1`) are never trained on: report.json tells the mean
log-probability of their good and bad answers under the model before and after.

dpo: Rafailov et al. 2023, with the likelihood of the preferred answer as a second term (Pang et al. 2024, "Iterative
Reasoning Preference Optimization"): the plain loss widens the distance also by making both answers less likely.
kto: Ethayarajh et al. 2024. LoRA: Hu et al. 2021.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

Messages = list[dict[str, Any]]
# Messages differ: some are calls of tools, whose arguments are of any form. A loader that takes their types from the
# first rows would refuse later ones.
MESSAGES = datasets.List(datasets.Json())
TYPES = {
    "prompt": MESSAGES,
    "chosen": MESSAGES,
    "rejected": MESSAGES,
    "completion": MESSAGES,
    "label": datasets.Value("bool"),
    "split": datasets.Value("string"),
}
COLUMNS = {"dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label")}


class Unusable(Exception):
    """What was given cannot be trained on, and why."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of held-out rows: those that should become likelier, and those that should not."""

    good: list[tuple[Messages, Messages]]
    bad: list[tuple[Messages, Messages]]


def loaded(path: Path, method: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The rows to train on and those that are held out. Raises Unusable."""
    if not path.is_file() or path.stat().st_size == 0:
        raise Unusable(f"{path} has no rows: `local2 export {method} --test-share 0.1 --out {path}` writes them")
    wanted = [*COLUMNS[method], "split"]
    try:
        with path.open(encoding="utf-8") as lines:
            named = sorted(json.loads(next(lines)))
    except (ValueError, TypeError) as exc:
        raise Unusable(f"{path} is no file of JSON lines: {exc}") from exc
    if missing := [name for name in wanted if name not in named]:
        raise Unusable(f"the rows of {path} have no {', '.join(missing)}: is it an export of {method}?")
    columns = datasets.Features({name: TYPES.get(name, datasets.Json()) for name in named})
    rows = datasets.load_dataset("json", data_files=str(path), split="train", features=columns)
    parts = {part: rows.filter(lambda row, part=part: row["split"] == part) for part in ("train", "test")}
    if not len(parts["test"]) or not len(parts["train"]):
        counts = f"{len(parts['train'])} to train on, {len(parts['test'])} held out"
        raise Unusable(f"{counts}: both are needed (`local2 export {method} --test-share 0.1`)")
    kept = [name for name in (*COLUMNS[method], "tools") if name in rows.column_names]
    return parts["train"].select_columns(kept), parts["test"].select_columns(kept)


def tokens_of(tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of an answer behind it, by the model's own chat template."""

    def ids(messages: Messages, *, begun: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begun)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    before = ids(prompt, begun=True)
    whole = ids([*prompt, *answer], begun=False)
    same = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    return whole[:same], whole[same:]


def answers(rows: datasets.Dataset, method: str) -> Answers:
    found = Answers([], [])
    for row in rows:
        prompt = row["prompt"]
        if method == "dpo":
            found.good.append((prompt, row["chosen"]))
            found.bad.append((prompt, row["rejected"]))
        else:
            (found.good if row["label"] else found.bad).append((prompt, row["completion"]))
    return found


def fitting(rows: datasets.Dataset, method: str, tokenizer: PreTrainedTokenizerBase, most: int) -> datasets.Dataset:
    """Rows that fit whole: one that is cut would teach to end in the middle."""

    def fits(row: dict[str, Any]) -> bool:
        prompt = row["prompt"]
        ends = [row[name] for name in ("chosen", "rejected", "completion") if name in row]
        return all(sum(map(len, tokens_of(tokenizer, prompt, end))) <= most for end in ends)

    return rows.filter(fits)


@torch.no_grad()
def log_probability(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[Messages, Messages]]
) -> float | None:
    """The mean over answers of the log-probability of one of their tokens; None without answers."""
    if not rows:
        return None
    model.eval()
    means = []
    for prompt, answer in rows:
        before, behind = tokens_of(tokenizer, prompt, answer)
        ids = torch.tensor([before + behind], device=model.device)
        scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        told = scores.gather(1, ids[0, 1:, None])[:, 0]
        means.append(told[-len(behind) :].mean().item())
    return sum(means) / len(means)


def measured(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, held: Answers
) -> dict[str, float | None]:
    return {
        "good": log_probability(model, tokenizer, held.good),
        "bad": log_probability(model, tokenizer, held.bad),
    }


def trainer(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: datasets.Dataset
) -> DPOTrainer | KTOTrainer:
    on_gpu = torch.cuda.is_available()
    common: dict[str, Any] = {
        "output_dir": str(args.out / "steps"),
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "max_length": args.max_length,
        "beta": args.beta,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "use_cpu": not on_gpu,
        "gradient_checkpointing": on_gpu,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "seed": args.seed,
    }
    lora = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    given: dict[str, Any] = {
        "model": model, "train_dataset": rows, "processing_class": tokenizer, "peft_config": lora
    }  # fmt: skip
    if args.method == "kto":
        return KTOTrainer(args=KTOConfig(**common), **given)
    return DPOTrainer(
        args=DPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, args.likelihood], **common), **given
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes `adapter/` and `report.json` into the folder `out`, and returns the report. Raises Unusable."""
    train, test = loaded(args.rows, args.method)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    except OSError as exc:
        raise Unusable(f"the model {args.model} cannot be loaded: {exc}") from exc
    if torch.cuda.is_available():
        model = model.to("cuda")
    if not tokenizer.chat_template:
        raise Unusable(f"{args.model} has no chat template: name one that was made for conversations (…-it)")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    counts = {"train": len(train), "test": len(test)}
    train, test = (fitting(rows, args.method, tokenizer, args.max_length) for rows in (train, test))
    left_out = counts["train"] + counts["test"] - len(train) - len(test)
    if not len(train) or not len(test):
        raise Unusable(f"no row is left that fits into {args.max_length} tokens: raise --max-length")
    print(
        f"{len(train)} rows to train on, {len(test)} held out, {left_out} longer than {args.max_length} tokens left out"
    )
    held = answers(test, args.method)
    before = measured(model, tokenizer, held)
    training = trainer(args, model, tokenizer, train)
    training.train()
    after = measured(training.model, tokenizer, held)
    training.model.save_pretrained(args.out / "adapter")
    tokenizer.save_pretrained(args.out / "adapter")
    report = {
        "method": args.method,
        "model": args.model,
        "rows": {"train": len(train), "test": len(test), "left_out": left_out},
        "log_probability": {"before": before, "after": after},
        "settings": {
            name: getattr(args, name)
            for name in (
                "epochs",
                "batch",
                "accumulate",
                "learning_rate",
                "beta",
                "rank",
                "max_length",
                "likelihood",
                "seed",
            )
        },
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def told(report: dict[str, Any]) -> str:
    shown = []
    for kind in ("good", "bad"):
        before, after = (report["log_probability"][when][kind] for when in ("before", "after"))
        if before is not None and after is not None:
            shown.append(f"held-out {kind} answers: {before:.3f} before, {after:.3f} after (per token)")
    return "\n".join(shown)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("method", choices=sorted(COLUMNS))
    parser.add_argument("rows", type=Path, help="the file that `local2 export` wrote")
    parser.add_argument("--model", required=True, help="name at the model hub, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter and report.json")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=1, help="rows at once on the device")
    parser.add_argument("--accumulate", type=int, default=16, help="batches of one step")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--beta", type=float, default=0.1, help="how near to the model before it stays")
    parser.add_argument("--likelihood", type=float, default=0.5, help="dpo: weight of the better answer's likelihood")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA matrices")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a prompt with its answer")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    try:
        report = run(args)
    except Unusable as exc:
        print(f"train: {exc}", file=sys.stderr)
        return 1
    print(told(report))
    print(f"The adapter is in {args.out / 'adapter'}; docs/training.md says how it becomes B.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
