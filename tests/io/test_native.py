"""C functions: compiled once, never from a file that others may have written, or operators."""

import ctypes
from pathlib import Path

import pytest

from fsdpctl.io import native as module
from fsdpctl.io.files import cache_folder
from fsdpctl.io.native import in_threads, native, native_paths


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_paths", {})
    native.cache_clear()
    yield
    native.cache_clear()


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "twice.c"
    file.write_text("int twice(int x) { return FACTOR * x; }\n")
    return file


def again(source: Path, factor: int = 2) -> int:
    native.cache_clear()
    function = native(source, "twice", FACTOR=factor)
    assert function is not None
    return int(function(ctypes.c_int(4)))


def kept() -> list[Path]:
    return sorted(cache_folder("native").iterdir())


def test_a_function_is_compiled_once_per_text_and_macros(source):
    assert again(source) == 8
    (first,) = kept()
    before = first.stat().st_mtime_ns, first.stat().st_ino
    assert again(source) == 8
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == before
    assert again(source, 3) == 12
    source.write_text("int twice(int x) { return FACTOR * x + 1; }\n")
    assert again(source) == 9
    assert len(kept()) == 3
    assert native_paths()["twice"].startswith("compiled with ")


def test_a_file_that_is_cut_off_is_compiled_again(source, tmp_path, monkeypatch):
    again(source)
    (file,) = kept()
    whole = file.read_bytes()
    for size in (0, 100, len(whole) // 2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(size)))
        cut = cache_folder("native") / file.name  # a path that this process hasn't loaded
        cut.parent.mkdir(mode=0o700, parents=True)
        cut.write_bytes(whole[:size])
        cut.chmod(0o700)
        assert again(source) == 8
        assert len(kept()) == 2 - (cut.read_bytes() == whole)


@pytest.mark.parametrize("open_to_others", ["file", "folder"])
def test_what_others_may_write_is_never_loaded(source, open_to_others):
    again(source)
    (file,) = kept()
    planted = source.with_name("planted.c")
    planted.write_text("int twice(int x) { return 666; }\n")
    native.cache_clear()
    assert native(planted, "twice", FACTOR=2)
    (other,) = (each for each in kept() if each != file)
    other.rename(file)
    (file if open_to_others == "file" else file.parent).chmod(0o777)
    assert again(source) == 8
    if open_to_others == "folder":
        assert kept() == [file]  # and nothing is written there


def test_without_a_cache_it_is_compiled_for_this_process(source, tmp_path):
    (tmp_path / "cache").write_text("a file\n")
    assert again(source) == 8


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/missing/cc", "no compiler: /missing/cc"),
        ("false", "false failed"),
        ('gcc "', "CC: No closing quotation"),
        ("sh -c 'echo >&2; exit 1'", "sh failed"),
        ("sh -c 'printf \"one\\ntwo \\377\" >&2; exit 1'", "two \ufffd"),
    ],
)
def test_without_a_compiler_there_is_none_and_the_reason(source, monkeypatch, compiler, said):
    monkeypatch.setenv("CC", compiler)
    assert native(source, "twice", FACTOR=2) is None
    assert native_paths()["twice"].startswith("operators; ")
    assert said in native_paths()["twice"]


@pytest.mark.parametrize("compiler", ["g++", "gcc -fvisibility=hidden", "gcc -ffast-math"])
def test_options_and_compilers_of_other_languages_change_nothing(source, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert again(source) == 8


def test_what_the_compiler_says_is_the_reason(tmp_path):
    source = tmp_path / "wrong.c"
    source.write_text("int wrong(void) { return missing; }\n#error that is wrong\n")
    assert native(source, "wrong") is None
    assert "operators; " in native_paths()["wrong"]


@pytest.mark.parametrize("count", [0, 1, 64, 1000, 1 << 16, (1 << 17) + 5])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_parts_cover_all_elements_once(count, threads):
    parts: list[tuple[int, int]] = []
    in_threads(lambda start, stop: parts.append((start, stop)), count, threads, multiple=64)
    parts.sort()
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]
    assert sum(stop - start for start, stop in parts) == count
    assert all(start % 64 == 0 for start, _ in parts)
