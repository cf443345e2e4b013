"""Finds the batch by trial, with a stand-in for the figures of a GPU: `trial.py ROWS MODEL METHOD`.

Run it in the environment of deploy/train/requirements.txt. It prints the plan and the tried steps as JSON. The status
is 1 if the trial has changed the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "train"))

import torch
import train
from batching import OutOfMemory, Plan
from transformers import AutoModelForCausalLM, AutoTokenizer

# Rows of a step that the device has room for, without checkpointing and with it.
ROOM, ROOM_CHECKPOINTING = 1, 5


class StandIn:
    """Makes each step, as on a GPU, and then raises OutOfMemory for the larger ones."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, bool]] = []

    def free(self) -> int:
        return 100

    def needed(self, plan: Plan, longest: int, step: Callable[[], None]) -> int:
        self.tried.append((plan.batch, plan.checkpointing))
        step()
        if plan.batch > (ROOM_CHECKPOINTING if plan.checkpointing else ROOM):
            raise OutOfMemory
        return 90


def weights(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def main(rows: Path, model_folder: str, method: str) -> int:
    args = train.arguments([method, str(rows), "--model", model_folder, "--out", str(rows.parent / "trial")])
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    train_rows, _ = train.loaded(rows, method)
    kept, lengths = train.fitting(train_rows, tokenizer, args.max_length)
    before, device = weights(model), StandIn()
    plan = train.planned(args, model, tokenizer, kept, lengths, device)
    after = weights(model)
    print(json.dumps({"plan": [plan.batch, plan.accumulate, plan.checkpointing], "tried": device.tried}))
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
