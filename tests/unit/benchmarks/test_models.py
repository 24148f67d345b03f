"""Models that several test processes make and share."""

from pathlib import Path

import pytest

from benchmarks.harness import models
from benchmarks.harness.model_specs import TINY


def test_a_model_that_another_process_has_just_made_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Old models of its name were removed after it was found missing: by then a vLLM may read it."""
    monkeypatch.setattr(models, "MODELS_DIR", tmp_path)
    monkeypatch.setattr(models, "make_model", lambda path, spec: (path / "ours").mkdir(parents=True))
    made, old = tmp_path / f"tiny-{models._digest(TINY)}", tmp_path / "tiny-0123456789ab"
    (made / "theirs").mkdir(parents=True)
    old.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda self: False)  # as it was when this process looked
        assert models.cached_model("tiny", TINY) == made
    assert [path.name for path in made.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [made]
