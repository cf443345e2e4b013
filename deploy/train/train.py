"""Train a LoRA adapter on preferences that `local2 export dpo|kto` wrote, and report its effect on held-out ones.

    python deploy/train/train.py dpo rows.jsonl --model google/gemma-3-4b-it --out adapter

The environment is deploy/train/requirements.txt; docs/training.md goes from the export to a model that answers as B.
Rows marked `test` (`local2 export dpo --test-share 0.1`) are never trained on. report.json has, before and after, the
mean log-probability of their good and bad answers, and the share of pairs whose better answer is the likelier one.

A step takes 16 rows. The script finds the number of rows at once by trial with the longest rows (GPU), or estimates it
from the free memory (CPU).

dpo: Rafailov et al. 2023, with the likelihood of the preferred answer as a second term (Pang et al. 2024, "Iterative
Reasoning Preference Optimization"): the plain loss widens the distance also by making both answers less likely.
kto: Ethayarajh et al. 2024. LoRA: Hu et al. 2021.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import datasets
import psutil
import torch
from batching import NothingFits, OutOfMemory, Plan, Shape, Wish, accuracy, by_length, choose, progress, step_bytes
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
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
# The smallest batch: kto estimates a divergence from the other rows of a batch.
LEAST = {"dpo": 1, "kto": 2}
# Seconds between lines about the progress.
EVERY_S = 10.0


class Unusable(Exception):
    """What was given cannot be trained on, and why."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of held-out rows: those that should become likelier, and those that should not.

    pairs: numbers of a good and of a bad answer to the same prompt.
    """

    good: list[tuple[Messages, Messages]] = field(default_factory=list)
    bad: list[tuple[Messages, Messages]] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        bad_of: dict[str, list[int]] = {}
        for number, (prompt, _) in enumerate(self.bad):
            bad_of.setdefault(json.dumps(prompt), []).append(number)
        return [(n, m) for n, (prompt, _) in enumerate(self.good) for m in bad_of.get(json.dumps(prompt), ())]


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
    found = Answers()
    for row in rows:
        prompt = row["prompt"]
        if method == "dpo":
            found.good.append((prompt, row["chosen"]))
            found.bad.append((prompt, row["rejected"]))
        else:
            (found.good if row["label"] else found.bad).append((prompt, row["completion"]))
    return found


def length(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a row's prompt with the longer of its answers."""
    ends = [row[name] for name in ("chosen", "rejected", "completion") if name in row]
    return max(sum(map(len, tokens_of(tokenizer, row["prompt"], end))) for end in ends)


def fitting(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, most: int
) -> tuple[datasets.Dataset, list[int]]:
    """Return the rows that fit whole, and their lengths: a cut row would teach the model to stop in the middle."""
    lengths = [length(row, tokenizer) for row in rows]
    kept = [number for number, tokens in enumerate(lengths) if tokens <= most]
    return rows.select(kept), [lengths[number] for number in kept]


@torch.no_grad()
def log_probabilities(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[Messages, Messages]]
) -> list[float]:
    """Return for each answer the mean log-probability of one of its tokens."""
    model.eval()
    means = []
    for prompt, answer in rows:
        before, behind = tokens_of(tokenizer, prompt, answer)
        ids = torch.tensor([before + behind], device=model.device)
        scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        of_tokens = scores.gather(1, ids[0, 1:, None])[:, 0]
        means.append(of_tokens[-len(behind) :].mean().item())
    return means


def measured(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, held: Answers
) -> dict[str, float | None]:
    """Return the figures of held-out answers under a model. A figure without answers or pairs is None."""
    good, bad = (log_probabilities(model, tokenizer, rows) for rows in (held.good, held.bad))
    return {
        "good": sum(good) / len(good) if good else None,
        "bad": sum(bad) / len(bad) if bad else None,
        "accuracy": accuracy([(good[n], bad[m]) for n, m in held.pairs]),
    }


# ── the training ─────────────────────────────────────────────────────────────────────────────────────────────────


class Printing(TrainerCallback):
    """Prints the rows per second, the time left and the loss, every `EVERY_S` seconds and at the end."""

    def __init__(self, rows: int, step: int) -> None:
        self._rows, self._step, self._loss = rows, step, ""
        self._began = self._printed = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        self._began = self._printed = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any) -> None:
        now = time.monotonic()
        if now - self._printed >= EVERY_S or state.global_step == state.max_steps:
            self._printed = now
            line = progress(min(self._rows, state.global_step * self._step), self._rows, now - self._began)
            print(line + self._loss, flush=True)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_more: Any
    ) -> None:
        if logs and "loss" in logs:
            self._loss = f", loss {float(logs['loss']):.3f}"


def trainer(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    plan: Plan,
    trial: bool = False,
) -> DPOTrainer | KTOTrainer:
    """Return a trainer with a fresh adapter around the model.

    trial: one step with a learning rate of 0, to measure its memory.
    """
    on_gpu = torch.cuda.is_available()
    common: dict[str, Any] = {
        "output_dir": str(args.out / "steps"),
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": plan.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "max_length": args.max_length,
        "beta": args.beta,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "use_cpu": not on_gpu,
        "gradient_checkpointing": plan.checkpointing,
        # `by_length` has ordered the rows.
        "train_sampling_strategy": "sequential",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": args.seed,
    }
    if trial:
        common |= {"max_steps": 1, "gradient_accumulation_steps": 1, "learning_rate": 0.0, "logging_strategy": "no"}
    lora = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    given: dict[str, Any] = {
        "model": model, "train_dataset": rows, "processing_class": tokenizer, "peft_config": lora,
        "callbacks": [] if trial else [Printing(round(len(rows) * args.epochs), plan.batch * plan.accumulate)],
    }  # fmt: skip
    made: DPOTrainer | KTOTrainer
    if args.method == "kto":
        made = KTOTrainer(args=KTOConfig(**common), **given)
    else:
        losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, args.likelihood]}
        made = DPOTrainer(args=DPOConfig(**losses, **common), **given)
    # PrinterCallback prints each log as a dictionary.
    made.remove_callback(PrinterCallback)
    return made


# ── the batch ────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory(Protocol):
    """The memory of a device."""

    def free(self) -> int:
        """Return the free bytes for a step, without the model's."""

    def needed(self, plan: Plan, longest: int, step: Callable[[], None]) -> int:
        """Return the bytes of a step by a plan. step: makes one with the longest rows. Raises OutOfMemory."""


class GpuMemory:
    """Makes the step and reads its peak."""

    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def needed(self, plan: Plan, longest: int, step: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            step()
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory from exc
        return torch.cuda.max_memory_reserved() - before


class HostMemory:
    """Estimates: the system would kill a process whose step needs too much memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self._shape = Shape(config.num_hidden_layers, config.hidden_size, config.vocab_size, model.dtype.itemsize)

    def free(self) -> int:
        return int(psutil.virtual_memory().available)

    def needed(self, plan: Plan, longest: int, step: Callable[[], None]) -> int:
        return step_bytes(self._shape, plan, longest)


def planned(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    lengths: Sequence[int],
    memory: Memory,
) -> Plan:
    """Return the plan of the training. The model stays unchanged. Raises Unusable."""
    least, longest = LEAST[args.method], max(lengths)
    if args.batch is not None and args.batch < least:
        raise Unusable(f"{args.method} needs at least {least} rows at once: --batch {least} or more, or leave it out")
    longest_first = sorted(range(len(rows)), key=lambda row: -lengths[row])

    def needed(plan: Plan) -> int:
        def step() -> None:
            # Repeat rows if the batch needs more.
            first = [longest_first[n % len(longest_first)] for n in range(plan.batch)]
            trial = trainer(args, model, tokenizer, rows.select(first), plan, trial=True)
            try:
                trial.train()
            finally:
                trial.model.unload()
                model.gradient_checkpointing_disable()

        try:
            found = memory.needed(plan, longest, step)
        except OutOfMemory:
            found = None
        # Outside the handler: its frames keep references to the step's tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if found is None:
            raise OutOfMemory
        return found

    try:
        return choose(Wish(args.batch, args.accumulate, least), len(rows), needed, memory.free())
    except NothingFits as exc:
        raise Unusable(
            f"there is not enough memory for rows of {longest} tokens: use a smaller --max-length or a smaller model"
        ) from exc


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
    counts = len(train) + len(test)
    (train, lengths), (test, _) = (fitting(rows, tokenizer, args.max_length) for rows in (train, test))
    left_out = counts - len(train) - len(test)
    if len(train) < LEAST[args.method] or not len(test):
        raise Unusable(f"too few rows fit into {args.max_length} tokens: raise --max-length, or export more rows")
    print(f"rows to train on: {len(train)}; held out: {len(test)}; longer than {args.max_length} tokens: {left_out}")
    memory = GpuMemory() if torch.cuda.is_available() else HostMemory(model)
    plan = planned(args, model, tokenizer, train, lengths, memory)
    how = " with gradient checkpointing" if plan.checkpointing else ""
    step = plan.batch * plan.accumulate
    print(f"rows at once: {plan.batch}{how}; in a step: {step}; tokens of the longest: {max(lengths)}", flush=True)
    order = by_length(lengths, plan.batch, args.seed, LEAST[args.method])
    left_out += len(train) - len(order)
    train = train.select(order)
    held = answers(test, args.method)
    before = measured(model, tokenizer, held)
    training = trainer(args, model, tokenizer, train, plan)
    training.train()
    after = measured(training.model, tokenizer, held)
    training.model.save_pretrained(args.out / "adapter")
    tokenizer.save_pretrained(args.out / "adapter")
    report = {
        "method": args.method,
        "model": args.model,
        "rows": {"train": len(train), "test": len(test), "left_out": left_out},
        "pairs": len(held.pairs),
        "log_probability": {
            when: {name: figures[name] for name in ("good", "bad")}
            for when, figures in (("before", before), ("after", after))
        },
        "accuracy": {"before": before["accuracy"], "after": after["accuracy"]},
        "settings": {
            "batch": plan.batch,
            "accumulate": plan.accumulate,
            "checkpointing": plan.checkpointing,
            **{
                name: getattr(args, name)
                for name in ("epochs", "learning_rate", "beta", "rank", "max_length", "likelihood", "seed")
            },
        },
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def summary(report: dict[str, Any]) -> str:
    """Return the report's figures as lines."""
    lines = []
    before, after = (report["accuracy"][when] for when in ("before", "after"))
    if before is not None and after is not None:
        lines.append(
            f"held-out pairs whose better answer is the likelier one: {before:.1%} before, {after:.1%} after "
            f"({report['pairs']} pairs)"
        )
    for kind in ("good", "bad"):
        before, after = (report["log_probability"][when][kind] for when in ("before", "after"))
        if before is not None and after is not None:
            lines.append(f"held-out {kind} answers: {before:.3f} before, {after:.3f} after (per token)")
    return "\n".join(lines)


def count(text: str) -> int:
    """Return a number of at least 1. Raises ValueError."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("method", choices=sorted(COLUMNS))
    parser.add_argument("rows", type=Path, help="the file that `local2 export` wrote")
    parser.add_argument("--model", required=True, help="name at the model hub, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter and report.json")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=count, help="rows at once on the device; left out: as many as fit, at most 16")
    parser.add_argument("--accumulate", type=count, help="batches of one step; left out: 16 rows in a step")
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
    print(summary(report))
    print(f"The adapter is in {args.out / 'adapter'}; how it becomes B is in docs/training.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
