"""Finds the shipped weights of the built-in ladder."""

from __future__ import annotations

from pathlib import Path

from backends.errors import ModelLoadError

MODELS_DIR = Path(__file__).resolve().parent / "models"

# Tier 4 is tier 3's weights, thinking.
_DIRECTORY_OF_TIER = {1: "tier1", 2: "tier2", 3: "tier3", 4: "tier3"}


def model_dir(tier: int) -> Path:
    """Return the folder, in Hugging Face layout, of a tier's weights.

    Parameters
    ----------
    tier : 1 to 4; 3 and 4 share one folder

    Raises
    ------
    ValueError
        The built-in ladder has no such tier.
    ModelLoadError
        The folder is not there: the package was installed without its data.
    """
    if tier not in _DIRECTORY_OF_TIER:
        raise ValueError(f"The built-in ladder has tiers 1 to 4, not {tier!r}.")
    path = MODELS_DIR / _DIRECTORY_OF_TIER[tier]
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"No model in {path}: expected config.json. Reinstall the package, or run python -m backends.builtin.train."
        )
    return path
