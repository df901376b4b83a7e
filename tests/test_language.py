"""The project's prose follows the vocabulary of CONTRIBUTING.md."""

from tests.language import ROOT, files, findings


def test_all_prose_uses_the_vocabulary() -> None:
    assert [each for path in files() for each in findings(path)] == []


def test_a_phrase_outside_of_the_vocabulary_is_found() -> None:
    path = ROOT / "tests" / "test_language.py"
    planted = "# Whoever trains goes on from there, as ever."
    assert {each.phrase for each in findings(path, planted)} == {"Whoever", "goes on", "as ever"}
    planted = "x = 1  # of a run\n# A comment\n# of two lines\n"
    assert [each.line for each in findings(path, planted)] == [1]
