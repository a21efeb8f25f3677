"""Presets: configuration files that come with dptrain, such as the recipes of published studies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dptrain.errors import UserError, suggest

FOLDER = Path(__file__).resolve().parents[1] / "presets"


@dataclass(frozen=True)
class Preset:
    """A configuration file of dptrain.

    Attributes:
        name: its name, which ``--config`` accepts in place of a file.
        description: the first line of the file.
        path: the file.
    """

    name: str
    description: str
    path: Path


def presets() -> list[Preset]:
    """Return all presets in alphabetical order."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found.append(Preset(path.stem, first.removeprefix("# "), path))
    return found


def find_config(config: Path) -> Path:
    """Return the file that ``--config`` names: an existing file, or the preset of this name.

    Raises:
        UserError: there is neither; the message lists the presets.

    Example:
        >>> find_config(Path("irradiance-study-solar")).name
        'irradiance-study-solar.toml'
    """
    if config.exists() or config.suffix or config.parent != Path():
        return config
    named = {preset.name: preset.path for preset in presets()}
    if str(config) not in named:
        raise UserError(
            f"--config {config}: there is no such file or preset; the presets are "
            f"{', '.join(named)}{suggest(str(config), named)}"
        )
    return named[str(config)]
