"""A model of two layers with random weights and a tokenizer for the words of some rows: `tiny.py ROWS FOLDER`.

To be run in the environment of deploy/train/requirements.txt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# As the templates of real models do it: calls of tools and their results are turns too.
TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor -%}
{{ message.content or '' }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{% endif -%}"""


def main(rows: Path, folder: Path) -> None:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = ByteLevel()
    special = ["<|start|>", "<|end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [json.dumps(json.loads(line)["prompt"]) + line for line in rows.read_text().splitlines()]
    words.train_from_iterator(texts, BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
